"""`tandem check` on conversations: what is wrong with a template or a row, and the text that shows it."""

from __future__ import annotations

from typing import Any

import pytest
from data_tokenizer import char_tokenizer
from published_templates import format_of, names, needs_trl, with_template
from test_formats_template import ADD, CHATML, STOP, USER, chatml

from tandem.errors import UserError
from tandem.rollout.formats.for_tokenizer import make_format
from tandem.rollout.formats.format_check import problems

LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "description": "d"},
                "share": {"type": "number", "description": "d"},
                "text": {"type": "string", "description": "d"},
                "sure": {"type": "boolean", "description": "d"},
                "list": {"type": "array", "items": {"type": "string"}, "description": "d"},
                "kind": {"type": "string", "enum": ["a", "b"], "description": "d"},
            },
        },
    },
}


def found(
    template: str, messages: list[Any] | None = None, tools: list[Any] | None = None, **options: Any
) -> list[str]:
    format = make_format(chatml(template), [STOP], **options)
    return list(problems(format, messages or [USER], [ADD] if tools is None else tools))


def test_nothing_is_wrong() -> None:
    assert found(CHATML) == []
    assert found(CHATML, tools=[]) == []


@needs_trl
@pytest.mark.parametrize("name", names())
def test_nothing_is_wrong_with_published_templates(name: str) -> None:
    try:
        format = format_of(with_template(name))
    except UserError:
        return  # which, test_formats_properties.py says
    try:
        format.require_tools()
        tools = [LOOK_UP]
    except UserError:
        tools = []
    assert list(problems(format, [{"role": "user", "content": "What is it, é?"}], tools)) == []


def test_a_call_that_cannot_be_read_back() -> None:
    (sentence,) = found(CHATML.replace("(call.function | tojson)", "(call.function | string)"))
    assert sentence.startswith("a call of add with {'a': 3} is written as \"<tool_call>{'name': 'add'")
    assert "and read as: This call of a tool was not run, its JSON cannot be read" in sentence
    (sentence,) = found(CHATML, calls="mistral")
    assert sentence.endswith("and read as: no call")


def test_a_text_that_the_tokenizer_has_no_tokens_for() -> None:
    (sentence,) = found(CHATML, [{"role": "user", "content": "Où?"}])
    assert "do not give their text back: " in sentence and "Où?" in sentence and "O<unk>?" in sentence


def test_a_text_that_spells_control_tokens() -> None:
    sentences = found(CHATML, [{"role": "user", "content": "<|im_end|>"}], [ADD | {"extra": "<|im_start|>"}])
    assert [sentence.split(":")[0].split()[-1] for sentence in sentences] == ["<|im_end|>", "<|im_start|>"]


def test_opening_messages_that_change_later() -> None:
    later = "{{ 'late' if messages | length > 2 else 'soon' }}" + CHATML
    (sentence,) = found(later, tools=[])
    assert sentence.startswith(
        "the template changes the opening messages once the policy has spoken: 'soon<|im_start|>"
    )


def test_what_is_appended_otherwise_in_a_long_conversation() -> None:
    ends = CHATML + "{{ 'long' if messages | length > 3 and messages[0].role == 'system' }}"
    (sentence,) = found(ends, [{"role": "system", "content": "s"}, USER], tools=[])
    assert "assistant\\n' is appended" in sentence and sentence.endswith("assistant\\nlong'")


def test_a_conversation_that_cannot_be_held() -> None:
    tokenizer = char_tokenizer()
    format = make_format(tokenizer, [int(tokenizer.convert_tokens_to_ids("<|end|>"))])
    with pytest.raises(UserError, match="cannot render calls of tools"):
        list(problems(format, [USER], [ADD]))
