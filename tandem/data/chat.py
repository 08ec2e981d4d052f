"""Messages of a row -> the text that a chat template makes of them -> token ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.data.messages import Messages
from tandem.data.rows import BadRow
from tandem.errors import UserError
from tandem.models.rendering import TemplateFailed, rendered
from tandem.models.shown_messages import left_out, misnamed_role
from tandem.models.template_dialects import prepared
from tandem.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]
_LETTERS_A_TOKEN, _SHORT = 4, 1024
"""A text of fewer letters than this many a token, and so many, is tokenised whole."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    generation_prompt: bool = False,
    tools: Tools = (),
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """The text of `messages`; the template reads `arguments` besides. Raises UserError when there is no template,
    BadRow when it fails on these messages."""
    try:
        return _rendered(tokenizer, messages, generation_prompt, tools, arguments)
    except TemplateFailed as error:
        if error.refused:
            raise BadRow(f"the messages are refused by the chat template: {error.reason}") from error
        raise BadRow(f"the chat template failed on the messages: {error}") from error


def require_known_roles(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> None:
    """Raises BadRow where a message has a role by another name than chat templates have."""
    if (problem := misnamed_role(str(tokenizer.chat_template), messages)) is not None:
        raise BadRow(problem)


def require_shown(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    generation_prompt: bool = False,
    tools: Tools = (),
    learned: Collection[int] = (),
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Raises BadRow where the chat template, which can render them, leaves out what messages say. `learned`: as of
    `left_out`."""

    def render_others(others: Sequence[Any], of: Sequence[Any]) -> str:
        return _rendered(tokenizer, list(others), generation_prompt, list(of), arguments)

    template = str(tokenizer.chat_template)
    problem = misnamed_role(template, messages) or left_out(template, messages, tools, render_others, learned)
    if problem is not None:
        raise BadRow(problem)


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    generation_prompt: bool,
    tools: Tools,
    arguments: Mapping[str, Any] | None,
) -> str:
    """Raises TemplateFailed."""
    if tokenizer.chat_template is None:
        mend = "add chat_template.jinja to the model directory, or use string prompts"
        raise UserError(f"the rows hold messages, and the tokenizer has no chat template; {mend}")
    template = str(tokenizer.chat_template)
    given = [prepared(message, template) for message in messages]
    try:
        return rendered(tokenizer, given, tools, generation_prompt=generation_prompt, arguments=arguments)
    except TemplateFailed:
        if not any(message.get("tool_calls") for message in messages):
            raise
        given = [prepared(message, template, arguments_as_text=True) for message in messages]
        return rendered(tokenizer, given, tools, generation_prompt=generation_prompt, arguments=arguments)


class TooLong(Exception):
    """A text that has more tokens than there is room for."""

    def __init__(self, tokens: int, of_tools: int = 0) -> None:
        """`tokens`: those of its beginning alone. `of_tools`: how many of them describe tools."""
        super().__init__(f"more than {tokens:,} tokens")
        self.tokens, self.of_tools = tokens, of_tools


def refuse_long(text: str, most_tokens: float, count: Callable[[str], int]) -> None:
    """Raises TooLong where a beginning of the text alone has more than twice `most_tokens`: the rest, which may be any
    length, is not looked at.

    Twice, since a few tokens at the end of a beginning may be others in the whole text. `count` says how many tokens a
    text has.
    """
    end = _LETTERS_A_TOKEN * most_tokens + _SHORT
    while end < len(text):
        tokens = count(text[: int(end)])
        if tokens > 2 * most_tokens:
            raise TooLong(tokens)
        end *= 2


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool, most_tokens: float = math.inf
) -> list[int]:
    """Token ids of `text`. `special_tokens`: with what the tokenizer puts before plain text, such as a BOS token.

    Raises TooLong where they are sure to be more than `most_tokens`, before it costs what the whole text would; a few
    more may be returned.
    """

    def ids_of(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=special_tokens, verbose=False)

    refuse_long(text, most_tokens, lambda beginning: len(ids_of(beginning)))
    ids = ids_of(text)
    # Some tokenizers also put EOS after plain text, but this text is to be continued.
    if special_tokens and ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()
    return ids


def require_one_bos(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | IntArray, *, templated: bool) -> None:
    """Raises BadRow where a text begins with the BOS token twice."""
    bos: Any = tokenizer.bos_token_id
    if bos is not None and list(ids[:2]) == [bos, bos]:
        by = "the chat template" if templated else "the text, and the tokenizer puts one before it"
        mend = "write it once in the template" if templated else "take it out of the text"
        raise BadRow(f"it begins with {tokenizer.bos_token} twice: one stands in {by}; {mend}")
