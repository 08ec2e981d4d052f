"""A tokenizer's chat template: messages -> text, with what published templates differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError
from tandem.models.rendering import TemplateFailed, rendered
from tandem.models.shown_messages import left_out
from tandem.models.template_dialects import prepared
from tandem.rollout.environment import ToolSchema
from tandem.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TemplateRefuses(Exception):
    """The template raised on messages; the message says what."""


class ChatTemplate:
    """Renders conversations. `arguments_as_text`: the template takes a call's arguments as JSON, not as an object."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.text = template_of(tokenizer)
        self.arguments_as_text = False

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """The text of `messages` up to the policy's next turn. Raises TemplateRefuses, and UserError for a template
        that exceeds its limits."""
        try:
            return self._text(messages, tools)
        except TemplateFailed as error:
            raise TemplateRefuses(str(error)) from error

    def left_out(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str | None:
        """What the template does not show of messages that it can render, in words; None where it shows all."""
        return left_out(self.text, messages, tools, self._text)

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        taken = [prepared(message, self.text, arguments_as_text=self.arguments_as_text) for message in messages]
        return rendered(self._tokenizer, taken, tools, generation_prompt=True)


def with_text(message: Message) -> Message:
    """The message with its text in one piece: templates put parts of it together, or take none. Parts that are no text
    are the template's to refuse."""
    content = message.get("content")
    if content is None:
        return message | {"content": ""}
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return message | {"content": "".join(part["text"] for part in content)}
    return message


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The source of a chat template, or of all where it has several. Raises UserError."""
    template: Any = tokenizer.chat_template
    if template is None:
        raise UserError(
            f"{tokenizer.name_or_path}: conversations need a chat template, and the tokenizer has none; add "
            "chat_template.jinja to the model directory"
        )
    return template if isinstance(template, str) else "\n".join(template.values())
