"""Messages of a row -> the text that a chat template makes of them -> token ids."""

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tandem.data.rows import BadRow, Row, cell
from tandem.errors import UserError
from tandem.pictures.sources import IMAGE_PARTS, VIDEO_PART

Messages = list[dict[str, Any]]


def messages_of(row: Row, column: str) -> Messages:
    """The messages in `column`, each {role, content}: role is text, content is text or a list of parts, each with its
    `type`: text, a picture or a video. Further keys reach the template. Raises BadRow."""
    messages: Messages = []
    for number, item in enumerate(cell(row, column, list), start=1):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            raise BadRow(f"column `{column}` has the wrong type: message {number} is not {{role, content}} of text")
        message = {key: value for key, value in item.items() if value is not None}
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = [_part(part, f"column `{column}`, message {number}") for part in content]
        elif not isinstance(content, str):
            raise BadRow(f"column `{column}` has the wrong type: message {number} is not {{role, content}} of text")
        messages.append(message)
    last = messages[-1]["content"]
    if not (
        last.strip() if isinstance(last, str) else any(part["type"] != "text" or part["text"].strip() for part in last)
    ):
        raise BadRow(f"column `{column}` is empty: its last message has no content")
    return messages


def _part(part: Any, place: str) -> dict[str, Any]:
    """Parquet has every key of any part in every part: null ones are left out."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", VIDEO_PART, *IMAGE_PARTS) or (kind == "text" and not isinstance(part.get("text"), str)):
        known = "text with its `text`, image, image_url and video"
        raise BadRow(f"{place} has a part of type {kind!r}, or one without its text; parts are {known}")
    own = ("type", "text") if kind == "text" else part
    return {key: part[key] for key in own if part[key] is not None}


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
