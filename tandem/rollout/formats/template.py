"""Any chat template as a Format.

    open     messages --template--> text --> ids
    extend   [stand-in turn that ends in a mark, new messages] --template--> text behind the mark's stop token --> ids
    parse    sampled ids --> text --> thinking, content, calls

`extend` renders a stand-in for the conversation and takes what follows the stop token behind the mark, so that nothing
that templates do to earlier turns (thinking dropped, a default system prompt, calls laid out anew) reaches the result.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from tandem.errors import UserError
from tandem.rollout.environment import Answer, ToolSchema
from tandem.rollout.formats.calls.base import ReadsAnswer, read_text, without_bad_json
from tandem.rollout.formats.chat_template import ChatTemplate, TemplateRefuses, with_text
from tandem.rollout.formats.control_tokens import ControlTokens, unused_word
from tandem.rollout.formats.stand_in import (
    ASKED,
    CALLED,
    PROBE,
    SPOKEN,
    TOOL,
    TOOL_ANSWERS,
    USER_SPEAKS,
    stand_in,
    with_calls,
    with_ids,
)
from tandem.types import Message

Thinking = Literal["all", "template"]
SAME_END = (("<|end|>", "<|return|>", "<|call|>"), ("<|eot_id|>", "<|eom_id|>"))
"""Tokens that end a turn in each other's place: gpt-oss's template writes `<|end|>`, which is no stop token, where the
policy has sampled `<|return|>`; Llama 3's `<|eot_id|>` for `<|eom_id|>`."""
THOUGHT_BEGINS = ("<think>", "[THINK]", "<|START_THINKING|>")
_TAIL_OF_PROMPT = 8
"""Tokens; a generation prompt that begins a thought ends in `<think>` and a line feed or two."""
_ID = re.compile("[0-9A-Za-z]{9}")
"""Of a call: Mistral's template takes no other, and the policy may write any."""
_MARK = "mark"
"""Behind a word that occurs nowhere else: no placeholder of a control token, which has a number there."""


class TemplateFormat:
    """The Format of a tokenizer with a chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        read: ReadsAnswer | None = None,
        thinking: Thinking = "all",
    ) -> None:
        """`read`: what reads the policy's turns; None: nobody knows how this model writes calls, and there are none.
        `thinking`: "template" lets the template drop what was thought before the user speaks again."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._controls = ControlTokens(tokenizer, self._template.text)
        self._stop_ids = {_spelled(tokenizer, token): token for token in stop_token_ids}
        ends = {end for ends in SAME_END for end in ends}
        same = {
            token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.content in ends
        }
        self._end_ids = same | self._stop_ids
        self._read, self._thinking = read, thinking
        self.refuses_tools = self._why_no_tools()
        self.refuses_users = self._why_not(USER_SPEAKS, (), SPOKEN)

    @property
    def name(self) -> str:
        """Where the tokenizer is from, for messages to the user."""
        return str(self._tokenizer.name_or_path)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        return self.encode(*self.written(messages, tools))

    def written(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[str, str]:
        """The text whose tokens `open` returns, and the word that its placeholders of control tokens are made of, for
        `encode`. Raises UserError as `open` does."""
        if tools:
            self.require_tools()
        messages = with_ids([with_text(message) for message in messages])
        if self._template.left_out(messages, tools) is not None:
            messages = with_calls(messages)  # Gemma 4's leaves out results that answer no call
        word = unused_word(messages, tools)
        text = self.rendered(*self._controls.hide(messages, tools, word))
        self._require_shown(messages, tools)
        return text, word

    def encode(self, text: str, word: str) -> list[int]:
        """The tokens of text in which placeholders made of `word` stand for what spells control tokens."""
        return self._controls.encode(text, word)

    def extend(self, ids: Sequence[int], new: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int] | None:
        roles = {message["role"] for message in new}
        if "assistant" in roles or ("user" in roles and self._thinking == "template"):
            return None
        self._require("tool" if "tool" in roles else "user")
        new = with_ids([with_text(message) for message in new])
        if roles - {"tool", "user"}:  # those were tried when this was made
            self._require_shown([*ASKED, stand_in((), PROBE), *new], tools)
        word = unused_word(new, tools)
        stop, text = self.tail(*self._controls.hide(new, tools, word), word + _MARK)
        end = self._end_ids[stop]
        following = self._controls.encode(stop + text, word)  # with it, since some swallow the spaces around them
        following = following[following.index(end) :]
        ended = int(ids[-1]) in (self._end_ids.get(same) for same in _same_end(stop))
        return following[1:] if ended else following

    def rendered(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """The template's text of `messages`, up to the policy's next turn. Raises UserError where it refuses them."""
        try:
            return self._template.render(messages, tools)
        except TemplateRefuses as error:
            try:  # gpt-oss's refuses results that answer no call, as those that say that a call could not be read
                return self._template.render(with_calls(messages), tools)
            except TemplateRefuses:
                raise self._refused(messages, error) from error

    def tail(self, new: Sequence[Message], tools: Sequence[ToolSchema], mark: str) -> tuple[str, str]:
        """The stop token behind a turn of the policy, and the template's text behind that where `new` are the next
        messages. `mark` must not occur in them. Raises UserError where the template refuses them."""
        try:
            return self._tail(new, tools, mark)
        except TemplateRefuses as error:
            raise self._refused(new, error) from error

    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[ToolSchema]) -> Answer:
        stopped = len(sampled_ids) > 0 and int(sampled_ids[-1]) in self._stop_ids.values()
        text = self.text(sampled_ids[:-1] if stopped else sampled_ids)
        opened = begun_thought(self.text(prompt_ids[-_TAIL_OF_PROMPT:]))
        answer = without_bad_json((self._read or read_text)(opened + text, tools))
        # A conversation's next prompt is longer by more than a call.
        numbered = (
            replace(call, id=call.id if _ID.fullmatch(call.id) else f"call{(len(prompt_ids) + number) % 100_000:05d}")
            for number, call in enumerate(answer.tool_calls)
        )
        return replace(answer, tool_calls=tuple(numbered))

    def spelled(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[str]:
        """The control tokens that texts in them spell, and that become letters, each once."""
        return self._controls.spelled(messages, tools)

    def require_tools(self) -> None:
        """Raises UserError where conversations with tools cannot be held."""
        self._require("tool")
        if self._read is None:
            raise UserError(
                f"{self.name}: its chat template does not tell how the model writes calls of tools; name the format in "
                "conversation.calls, or a function that reads them, path/to/file.py:function"
            )

    def require_users(self) -> None:
        """Raises UserError where the user cannot speak twice."""
        self._require("user")

    def _require(self, role: Literal["tool", "user"]) -> None:
        what, why = (
            ("cannot render calls of tools", self.refuses_tools)
            if role == "tool"
            else ("cannot continue a conversation with a user turn", self.refuses_users)
        )
        if why is not None:
            mend = "put one that can into its chat_template.jinja"
            raise UserError(f"{self.name}: the chat template {what}: {why}; {mend}")

    def _require_shown(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        """Raises UserError where the template leaves out what somebody says, of messages that it can render."""
        if (problem := self._template.left_out(messages, tools)) is not None:
            raise UserError(f"{self.name}: {problem}")

    def _refused(self, messages: Sequence[Message], error: TemplateRefuses) -> UserError:
        roles = ", ".join(message["role"] for message in messages)
        return UserError(f"{self.name}: its chat template refuses the messages {roles}: {error}")

    def encoded(self, text: str) -> list[int]:
        """Token ids of text that a template has written."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def text(self, ids: Sequence[int]) -> str:
        """Control tokens spelled out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _why_no_tools(self) -> str | None:
        """Why no conversation with tools can be held, None where it can."""
        try:
            if TOOL["function"]["name"] not in self._template.render(ASKED, [TOOL]):
                return "it does not show the policy its tools"
        except TemplateRefuses as error:
            return str(error)
        why = self._why_not(TOOL_ANSWERS, [TOOL], CALLED)
        if why is not None:
            self._template.arguments_as_text = True
            if self._why_not(TOOL_ANSWERS, [TOOL], CALLED) is None:
                return None
            self._template.arguments_as_text = False
        return why

    def _why_not(self, new: Sequence[Message], tools: Sequence[ToolSchema], history: Sequence[Message]) -> str | None:
        """Why `new` cannot follow a turn of the policy, None where it can."""
        try:
            tail = self._tail(new, tools, PROBE + _MARK)
            later = self._tail(new, tools, PROBE + _MARK, before=history)
        except TemplateRefuses as error:
            return str(error)
        if new[0]["content"] not in tail[1]:
            return f"it leaves out what the {new[0]['role']} says"
        if tail != later:
            return f"what it writes behind the policy's turn depends on earlier turns: {tail[1]!r} or {later[1]!r}"
        return None

    def _tail(
        self, new: Sequence[Message], tools: Sequence[ToolSchema], mark: str, before: Sequence[Message] = ()
    ) -> tuple[str, str]:
        """The stop token behind a turn that ends in `mark`, and what follows it where `new` are the next messages.
        Raises TemplateRefuses."""
        text = self._behind_mark(new, tools, mark, before)
        places = [(text.find(end), end) for end in self._end_ids if end in text]
        if not places:
            stops = ", ".join(self._stop_ids)
            raise TemplateRefuses(
                f"it writes none of the model's stop tokens, {stops}, behind the policy's turn: {text!r}"
            )
        place, stop = min(places)
        return stop, text[place + len(stop) :]

    def _behind_mark(
        self, new: Sequence[Message], tools: Sequence[ToolSchema], mark: str, before: Sequence[Message]
    ) -> str:
        results = [message for message in new if message["role"] == "tool"]
        opening = before or ASKED
        try:
            text = self._template.render([*opening, stand_in(results, mark), *new], tools)
        except TemplateRefuses:
            if len(results) < 2:
                raise
            # Llama 3.1's renders one call a turn, and any number of results.
            text = self._template.render([*opening, stand_in(results[:1], mark), *new], tools)
        _, found, tail = text.rpartition(mark)
        if not found:
            raise TemplateRefuses("the policy's turn is left out")
        return tail


def begun_thought(prompt: str) -> str:
    """The tag at the end of a prompt that begins the policy's thought, "" where there is none."""
    return next((tag for tag in THOUGHT_BEGINS if prompt.rstrip().endswith(tag)), "")


def _spelled(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _same_end(stop: str) -> tuple[str, ...]:
    return next((ends for ends in SAME_END if stop in ends), (stop,))
