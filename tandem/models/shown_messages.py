"""Whether a chat template shows all that messages say: what it leaves out would be neither asked nor learned.

A template is asked by rendering the conversation twice, with two words in the place of what is looked for: where the
texts are equal, it does not show it. What it shows of a shape (a role between its neighbours, and what the message
has) is remembered, so a template is asked once a shape, and not once a row.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from tandem.models.rendering import TemplateFailed
from tandem.models.template_dialects import THOUGHTS, thought_of

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Renders = Callable[[Sequence[Message], Tools], str]
"""Raises TemplateFailed."""
What = Literal["content", "tool_calls", "thought"]
ROLES = ("system", "developer", "user", "assistant", "tool")
_WORDS = ("Qz7xa", "Qz7xb")
_MEANT = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model", "chatbot"), "assistant"),
    "function_call": "assistant, with `tool_calls`",
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "ipython"), "tool"),
}
"""Roles as other data sets call them."""


def misnamed_role(template: str, messages: Sequence[Message]) -> str | None:
    """What is wrong with the role of a message: one by another name than chat templates have, or misspelled, unless the
    template itself speaks of it."""
    for place, message in enumerate(messages, start=1):
        role = str(message["role"])
        if role in ROLES or f"'{role}'" in template or f'"{role}"' in template:
            continue
        lower = role.lower()
        close = [lower] if lower in ROLES else get_close_matches(lower, ROLES, 1, cutoff=0.8)
        meant = _MEANT.get(lower) or next(iter(close), None)
        if meant is not None:
            return f"message {place} has the role {role!r}, which the chat template does not know; write {meant}"
    return None


def left_out(
    template: str, messages: Sequence[Message], tools: Tools, render: Renders, learned: Collection[int] = ()
) -> str | None:
    """What the template does not show, in words; None where it shows all. `learned`: messages that are learned, of
    which thoughts have to be there, too, and content beside calls of tools."""
    shown = _shown(template)
    if tools and "tools" not in shown:
        if not _differ(render, [(messages, _renamed(tools, word)) for word in _WORDS]):
            return "the chat template does not show `tools`; leave them out, or take a template that does"
        shown.add("tools")
    for place, message in enumerate(messages):
        for what in _said(message, place in learned):
            shape = _shape(messages, place, what, bool(tools))
            if shape in shown:
                continue
            others = [[*messages[:place], _with(message, what, word), *messages[place + 1 :]] for word in _WORDS]
            if not _differ(render, [(changed, tools) for changed in others]):
                return _told(messages, place, what, render)
            shown.add(shape)
    return None


@lru_cache(maxsize=64)
def _shown(template: str) -> set[Any]:
    """Shapes that a template is known to show."""
    return set()


def _said(message: Message, learned: bool) -> list[What]:
    """What of a message has to be shown. What the policy has thought before, or said beside a call, is the template's
    to drop."""
    said: list[What] = []
    content, calls = message.get("content"), message.get("tool_calls")
    if _texts(content) and (learned or not calls):
        said.append("content")
    if calls:
        said.append("tool_calls")
    if learned and thought_of(message):
        said.append("thought")
    return said


def _texts(content: Any) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part.get("type") == "text" and str(part.get("text")).strip() for part in content or ())


def _shape(messages: Sequence[Message], place: int, what: What, has_tools: bool) -> tuple[Any, ...]:
    message = messages[place]
    beside = [messages[at]["role"] if 0 <= at < len(messages) else None for at in (place - 1, place + 1)]
    in_parts = isinstance(message.get("content"), list)
    return what, message["role"], *beside, in_parts, bool(message.get("tool_calls")), has_tools


def _with(message: Message, what: What, word: str) -> dict[str, Any]:
    if what == "tool_calls":
        first, *rest = message["tool_calls"]
        arguments = dict.fromkeys(first["function"].get("arguments") or (), word)
        return {**message, "tool_calls": [{**first, "function": {"name": word, "arguments": arguments}}, *rest]}
    if what == "thought":
        return {**message, **{key: word for key in THOUGHTS if message.get(key)}}
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": word}
    return {**message, "content": [{**part, "text": word} if part.get("type") == "text" else part for part in content]}


def _renamed(tools: Tools, word: str) -> Tools:
    first = tools[0]
    function: Any = first.get("function")
    changed = {**first, "function": {**function, "name": word}} if function else {**first, "name": word}
    return [changed, *tools[1:]]


def _differ(render: Renders, cases: Sequence[tuple[Sequence[Message], Tools]]) -> bool:
    """Also where the template refuses one of them: it has read it."""
    try:
        one, other = (render(messages, tools) for messages, tools in cases)
    except TemplateFailed:
        return True
    return one != other


def _told(messages: Sequence[Message], place: int, what: What, render: Renders) -> str:
    role, number = messages[place]["role"], place + 1
    if what == "tool_calls":
        return f"the chat template leaves out the calls of tools in message {number}"
    if what == "thought":
        key = next(key for key in THOUGHTS if messages[place].get(key))
        return f"the chat template leaves out `{key}` of message {number}, which is to be learned"
    if messages[place].get("tool_calls"):
        return f"the chat template leaves out what message {number} says beside its calls of tools"
    roles = ", ".join(one for one in ROLES if _shows_role(render, one))
    return f"the chat template leaves out message {number}, of role {role!r}; it shows {roles or 'no role'}"


def _shows_role(render: Renders, role: str) -> bool:
    """First, or after a message of the user."""
    word, said = _WORDS[0], {"role": "user", "content": "u"}
    for before in ([], [said]):
        try:
            if word in render([*before, {"role": role, "content": word}], ()):
                return True
        except TemplateFailed:
            continue
    return False
