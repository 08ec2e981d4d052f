"""Calls of one turn: said back in order, within limits of time, number and length."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.config.conversation import ToolLimitsConfig
from tandem.errors import UserError
from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.rollout.conversation_images import Content, appended, shown
from tandem.rollout.environment import Answer, Counts, ToolCall, ToolSchema
from tandem.rollout.together import together
from tandem.rollout.tools.base import ToolError, ToolResult, ToolSession, ToolSet
from tandem.types import Message, Prompt


class Toolbox:
    """The tool sets of a run, under one roof: who has which tool, and how many calls run at once."""

    def __init__(
        self, sets: Sequence[ToolSet], limits: ToolLimitsConfig, pictures: ModelPictures | None = None
    ) -> None:
        """`pictures`: of a model that sees them."""
        self.limits = limits
        self.pictures = pictures
        self._sets = list(sets)
        self.set_of: dict[str, int] = {}
        """By the name of a tool: the place of its set."""
        self.schemas: list[ToolSchema] = []

    async def open(self) -> None:
        """Raises UserError where a set cannot be opened, or two have a tool of the same name; nothing is open then."""
        opened = 0
        try:
            for place, tools in enumerate(self._sets):
                await tools.open()
                opened = place + 1
                self._note(place, tools)
        except BaseException:
            for tools in self._sets[:opened]:
                await tools.close()
            raise

    def _note(self, place: int, tools: ToolSet) -> None:
        for schema in tools.schemas:
            name = schema["function"]["name"]
            if name in self.set_of:
                raise UserError(f"conversation.environment.tools: two tools are named {name!r}; rename one")
            self.set_of[name] = place
            self.schemas.append(schema)

    def sessions(self, prompt: Prompt) -> list[ToolSession]:
        return [tools.session(prompt) for tools in self._sets]

    async def close(self) -> None:
        for tools in self._sets:
            await tools.close()


class Calls:
    """The calls of one trajectory."""

    def __init__(self, toolbox: Toolbox, prompt: Prompt, counts: Counts) -> None:
        self._toolbox = toolbox
        self._counts = counts
        self._sessions = toolbox.sessions(prompt)

    async def start(self) -> Content:
        """What the tools say before the first turn, to be appended to the prompt."""
        said: Content = ""
        for content in await together(session.start() for session in self._sessions):
            said = appended(said, await shown(content or "", self._toolbox.pictures))
        return said

    async def answer(self, answer: Answer) -> tuple[list[Message], float | None]:
        """What the tools say to a turn, a message a call in their order, and then what could not be read; and the
        reward that they give for it. The calls run at the same time. Raises EnvironmentFailed as tools do."""
        limit = self._toolbox.limits.calls_a_turn
        self._counts.add("broken_calls", len(answer.broken))
        results = await together(self._call(call) for call in answer.tool_calls[:limit])
        late = f"error: not run: only {limit} calls a turn are allowed"
        said = [result.content for result in results] + [late] * len(answer.tool_calls[limit:])
        messages = [_said(call, content) for call, content in zip(answer.tool_calls, said, strict=True)]
        messages += [{"role": "tool", "name": "error", "content": f"error: {why}"} for why in answer.broken]
        rewards = [result.reward for result in results if result.reward is not None]
        return messages, sum(rewards) if rewards else None

    async def close(self) -> float | None:
        """Close every session, also where one cannot be. Returns the reward of the tools for the whole trajectory."""
        closed = await asyncio.gather(*(session.close() for session in self._sessions), return_exceptions=True)
        for result in closed:
            if isinstance(result, BaseException):
                raise result
        rewards = [result for result in closed if isinstance(result, float)]
        return sum(rewards) if rewards else None

    async def _call(self, call: ToolCall) -> ToolResult:
        """What is said back; a call that fails is told, not raised."""
        self._counts.add("calls")
        place, timeout_s = self._toolbox.set_of.get(call.name), self._toolbox.limits.timeout_s
        if place is None:
            self._counts.add("unknown_tools")
            return ToolResult(f"error: there is no tool {call.name!r}, only {', '.join(sorted(self._toolbox.set_of))}")
        try:
            result = await self._sessions[place].call(call.name, call.arguments)
            content = await shown(result.content, self._toolbox.pictures)
        except TimeoutError as error:
            self._counts.add("timeouts")
            return ToolResult(self._cut(f"error: {str(error) or f'no answer within {timeout_s:g} s'}"))
        except (ToolError, BadPicture) as error:
            self._counts.add("failed_calls")
            return ToolResult(self._cut(f"error: {error}"))
        for name, number in result.numbers.items():
            self._counts.add(name, number)
        return ToolResult(self._cut(content), result.reward)

    def _cut(self, content: Content) -> Content:
        """Text up to the limit, and all pictures."""
        limit, length = self._toolbox.limits.result_characters, _length(content)
        if length <= limit:
            return content
        self._counts.add("cut_results")
        more = f"… ({length - limit:,} more characters)"
        if isinstance(content, str):
            return content[:limit] + more
        parts: list[dict[str, Any]] = []
        for part in content:
            parts.append({**part, "text": part["text"][:limit]} if part["type"] == "text" else part)
            limit -= len(part.get("text", "")[:limit])
        return [*parts, {"type": "text", "text": more}]


def _length(content: Content) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def _said(call: ToolCall, content: Content) -> Message:
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}
