"""Cells of a row -> checked text and messages -> the text that a chat template makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from tandem.data.rows import BadRow, Row
from tandem.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED = ("images", "videos", "tools", "agent_name")
"""Columns of the verl format that change what the prompt means."""

ChatMessages = list[dict[str, Any]]


def check_supported(row: Row) -> None:
    """Raise BadRow where a column that is not supported holds something."""
    for column in UNSUPPORTED:
        if row.get(column):
            raise BadRow(column, "is not supported yet", "leave it out, or empty")


def check_text(value: Any, column: str) -> str:
    """`value`, which must be a string that is not blank."""
    if not isinstance(value, str):
        raise BadRow(column, "has the wrong type", f"{type(value).__name__} where text is needed")
    if not value.strip():
        raise BadRow(column, "is empty")
    return _check_unicode(value, column)


def check_messages(value: Any, column: str) -> ChatMessages:
    """`value`, which must be a list of {role, content}, the last with content. Further keys reach the template."""
    if not isinstance(value, list):
        raise BadRow(column, "has the wrong type", f"{type(value).__name__} where messages are needed")
    messages = [_check_message(item, column, f"message {number}") for number, item in enumerate(value, start=1)]
    if not messages or not messages[-1]["content"].strip():
        raise BadRow(column, "is empty", "the last message has no content" if messages else "no messages")
    return messages


def _check_message(item: Any, column: str, place: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise BadRow(column, "has the wrong type", f"{place} is a {type(item).__name__}, not {{role, content}}")
    message = {key: value for key, value in item.items() if value is not None}
    if message.get("role") not in ROLES:
        raise BadRow(column, "has an unknown role", f"{place}: {message.get('role')!r}, known are {', '.join(ROLES)}")
    if message.get("tool_calls"):
        raise BadRow(column, "has tool calls, which are not supported yet", place)
    if not isinstance(message.get("content"), str):
        kind = type(message.get("content")).__name__
        raise BadRow(column, "has a message whose content is not text", f"{place}: {kind}")
    _check_unicode(message["content"], column)
    return message


def _check_unicode(text: str, column: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(column, "is not valid Unicode", str(error)) from error
    return text


def render(
    tokenizer: PreTrainedTokenizerBase, messages: ChatMessages, column: str, *, generation_prompt: bool = False
) -> str:
    """The text of `messages` by the tokenizer's chat template.

    Raises UserError when the tokenizer has no template, BadRow when the template refuses these messages.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"the rows hold messages, and the tokenizer in {tokenizer.name_or_path or 'use'} has no chat template: "
            "give the tokenizer a chat_template (chat_template.jinja in the model directory), or use string prompts"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt))
    except TemplateError as error:
        raise BadRow(column, "is refused by the chat template", str(error)) from error


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
    """Token ids of each text. `special_tokens`: add what the tokenizer puts before plain text, such as a BOS token."""
    if not texts:
        return []
    encoded: Any = tokenizer(list(texts), add_special_tokens=special_tokens, return_attention_mask=False, verbose=False)
    rows: list[list[int]] = encoded["input_ids"]
    for ids, text in zip(rows, texts, strict=True):
        # Some tokenizers also put EOS after plain text, but these texts are to be continued.
        if special_tokens and ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(str(tokenizer.eos_token)):
            ids.pop()
    return rows
