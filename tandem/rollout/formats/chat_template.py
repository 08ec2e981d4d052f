"""A tokenizer's chat template: messages -> text, with what published templates differ in."""

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.errors import UserError
from tandem.rollout.environment import ToolSchema
from tandem.types import Message


class TemplateRefuses(Exception):
    """The template raised on messages; the message says what."""


class ChatTemplate:
    """Renders conversations. `arguments_as_text`: the template takes a call's arguments as JSON, not as an object."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.text = template_of(tokenizer)
        self.arguments_as_text = False
        self._has_thinking = "message.thinking" in self.text  # gpt-oss: its name for reasoning_content

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """The text of `messages` up to the policy's next turn. Raises TemplateRefuses."""
        prepared: Any = [self._prepared(message) for message in messages]
        shown: Any = [*tools] or None
        try:
            return str(
                self._tokenizer.apply_chat_template(prepared, tools=shown, tokenize=False, add_generation_prompt=True)
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise TemplateRefuses(f"{type(error).__name__}: {error}") from error

    def _prepared(self, message: Message) -> Message:
        """As this template expects it."""
        if self._has_thinking and "reasoning_content" in message:
            message = _with_thinking(message)
        if self.arguments_as_text and message.get("tool_calls"):
            message = message | {"tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        return message


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


def _with_thinking(message: Message) -> Message:
    """gpt-oss refuses a turn that calls a tool, thinks and says something: the last two become one there."""
    thought = message["reasoning_content"]
    if message.get("tool_calls") and message["content"]:
        return message | {"thinking": f"{thought}\n{message['content']}", "content": ""}
    return message | {"thinking": thought}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
