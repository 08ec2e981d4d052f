"""The section `model.chat_template`: what a run changes of a tokenizer's chat template.

The changes are written into the template itself, so everything that renders messages with the tokenizer follows them,
and so does whoever loads what the run has saved: a model is asked as it was trained. They are defaults there:
an argument of the call and a system message of the conversation go before them.
"""

import json
import re
from collections.abc import Mapping
from datetime import date
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.config.model import ChatTemplateConfig
from tandem.errors import UserError
from tandem.models.rendering import TemplateFailed, rendered

_PROBE = "tandem"
_IN_PARTS = (
    "{%- set in_parts = namespace(messages=[]) %}{%- for message in messages %}{%- if message.content is string %}"
    "{%- set message = dict(message, content=[{'type': 'text', 'text': message.content}]) %}{%- endif %}"
    "{%- set in_parts.messages = in_parts.messages + [message] %}{%- endfor %}"
    "{%- set messages = in_parts.messages +%}"
)
"""The text of a message as one part of it."""
_OURS = ("messages", "tools", "add_generation_prompt", "documents")
"""What every call gives."""


def day_shown(tokenizer: PreTrainedTokenizerBase) -> str:
    """Today, where the chat template shows it, as Llama 3.2's does; else nothing."""
    return date.today().isoformat() if "strftime_now" in str(tokenizer.chat_template) else ""


def take_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Change the tokenizer's template where it shows parts of messages alone, as those of some models that see pictures
    do: a message that is text, as rows and answers are, would be left out without a word."""
    template: Any = tokenizer.chat_template
    if not isinstance(template, str) or _shows(tokenizer, _PROBE):
        return
    if _shows(tokenizer, [{"type": "text", "text": _PROBE}]):
        tokenizer.chat_template = _IN_PARTS + template


def _shows(tokenizer: PreTrainedTokenizerBase, content: Any) -> bool:
    try:
        return _PROBE in rendered(tokenizer, [{"role": "user", "content": content}])
    except TemplateFailed:
        return False


def apply_section(tokenizer: PreTrainedTokenizerBase, config: ChatTemplateConfig) -> None:
    """Change the tokenizer's template in place. Raises UserError where it cannot follow the section."""
    template: Any = tokenizer.chat_template
    if config.file is not None:
        template = _read(config)
    if template is None:
        raise UserError(
            "model.chat_template: the tokenizer has no chat template; give one with model.chat_template.file"
        )
    if isinstance(template, dict):  # several, by name
        tokenizer.chat_template = {name: changed(text, config) for name, text in template.items()}  # pyright: ignore[reportAttributeAccessIssue]
    else:
        tokenizer.chat_template = changed(template, config)


def changed(template: str, config: ChatTemplateConfig) -> str:
    """The template with the section's defaults in front."""
    _check_arguments(template, config.arguments)
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {literal(value)} %}}{{%- endif %}}"
        for name, value in config.arguments.items()
    ]
    if config.system_prompt is not None:
        ours = f"[{{'role': 'system', 'content': {literal(config.system_prompt)}}}]"
        test = "{%- if messages and messages[0].role != 'system' %}"
        lines.append(f"{test}{{%- set messages = {ours} + messages %}}{{%- endif %}}")
    front = "".join(lines)
    if front:  # + keeps a line feed that the template begins with
        front = front.removesuffix(" %}") + " +%}"
    return template if template.startswith(front) else front + template


def literal(value: Any) -> str:
    """A value of YAML as Jinja writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "none"
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return f"{{{', '.join(f'{literal(str(key))}: {literal(one)}' for key, one in value.items())}}}"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _read(config: ChatTemplateConfig) -> str:
    try:
        assert config.file is not None
        return config.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"model.chat_template.file: {config.file} cannot be read: {error}") from None


def _check_arguments(template: str, arguments: Mapping[str, Any]) -> None:
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    for name in arguments:
        key = f"model.chat_template.arguments.{name}"
        if name in _OURS or not name.isidentifier():
            raise UserError(f"{key}: no argument of that name can be given; leave it out")
        if name not in words:
            close = get_close_matches(name, words, 1)
            mend = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise UserError(f"{key}: the chat template reads nothing of that name; {mend}")
