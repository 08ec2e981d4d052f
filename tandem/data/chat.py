"""Messages of a row -> the text that a chat template makes of them -> token ids."""

from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.data.messages import Messages
from tandem.data.rows import BadRow
from tandem.errors import UserError
from tandem.models.rendering import TemplateFailed, rendered
from tandem.models.shown_messages import left_out, misnamed_role
from tandem.models.template_dialects import prepared
from tandem.types import IntArray

Tools = Sequence[dict[str, Any]]


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, generation_prompt: bool = False, tools: Tools = ()
) -> str:
    """The text of `messages`. Raises UserError when there is no template, BadRow when it fails on these messages."""
    try:
        return _rendered(tokenizer, messages, generation_prompt, tools)
    except TemplateFailed as error:
        if error.refused:
            raise BadRow(f"the messages are refused by the chat template: {error.reason}") from error
        raise BadRow(f"the chat template failed on the messages: {error}") from error


def require_shown(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    generation_prompt: bool = False,
    tools: Tools = (),
    learned: Collection[int] = (),
) -> None:
    """Raises BadRow where the chat template, which can render them, leaves out what messages say. `learned`: as of
    `left_out`."""

    def render_others(others: Sequence[Any], of: Sequence[Any]) -> str:
        return _rendered(tokenizer, list(others), generation_prompt, list(of))

    template = str(tokenizer.chat_template)
    problem = misnamed_role(template, messages) or left_out(template, messages, tools, render_others, learned)
    if problem is not None:
        raise BadRow(problem)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages, generation_prompt: bool, tools: Tools) -> str:
    """Raises TemplateFailed."""
    if tokenizer.chat_template is None:
        mend = "add chat_template.jinja to the model directory, or use string prompts"
        raise UserError(f"the rows hold messages, and the tokenizer has no chat template; {mend}")
    template = str(tokenizer.chat_template)
    given = [prepared(message, template) for message in messages]
    try:
        return rendered(tokenizer, given, tools, generation_prompt=generation_prompt)
    except TemplateFailed:
        if not any(message.get("tool_calls") for message in messages):
            raise
        given = [prepared(message, template, arguments_as_text=True) for message in messages]
        return rendered(tokenizer, given, tools, generation_prompt=generation_prompt)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool) -> list[int]:
    """Token ids of `text`. `special_tokens`: with what the tokenizer puts before plain text, such as a BOS token."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens, verbose=False)
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
