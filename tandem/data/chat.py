"""Messages of a row -> the text that a chat template makes of them -> token ids."""

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tandem.data.rows import BadRow, Row, cell
from tandem.errors import UserError

Messages = list[dict[str, Any]]


def messages_of(row: Row, column: str) -> Messages:
    """The messages in `column`, each {role, content}, both text; further keys reach the template. Raises BadRow."""
    messages: Messages = []
    for number, item in enumerate(cell(row, column, list), start=1):
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
            raise BadRow(f"column `{column}` has the wrong type: message {number} is not {{role, content}} of text")
        messages.append({key: value for key, value in item.items() if value is not None})
    if not messages[-1]["content"].strip():
        raise BadRow(f"column `{column}` is empty: its last message has no content")
    return messages


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, generation_prompt: bool = False) -> str:
    """The text of `messages`. Raises UserError when there is no template, BadRow when it fails on these messages."""
    if tokenizer.chat_template is None:
        mend = "add chat_template.jinja to the model directory, or use string prompts"
        raise UserError(f"the rows hold messages, and the tokenizer has no chat template; {mend}")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt))
    except TemplateError as error:
        raise BadRow(f"the messages are refused by the chat template: {error}") from error
    except Exception as error:  # a template is a program, which may divide by zero
        raise BadRow(f"the chat template failed on the messages: {type(error).__name__}: {error}") from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool) -> list[int]:
    """Token ids of `text`. `special_tokens`: with what the tokenizer puts before plain text, such as a BOS token."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens, verbose=False)
    # Some tokenizers also put EOS after plain text, but this text is to be continued.
    if special_tokens and ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()
    return ids
