"""Chat templates are rendered as transformers does, in a process that ends at limits of time, memory and size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from data_tokenizer import CHAT_TEMPLATE, char_tokenizer
from published_templates import FOLDER, needs_trl, with_template

from tandem.cli import main
from tandem.config.model import ModelConfig
from tandem.config.tree import ServeConfig
from tandem.errors import UserError
from tandem.jobs.serve import make_answerer
from tandem.models.rendering import TemplateFailed, rendered

ASKED = [{"role": "user", "content": "hi"}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "s <b> é"}, *ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": '{"y": 2}'},
    {"role": "assistant", "content": "<think>\nt\n</think>\n\na", "reasoning_content": "r"}, *ASKED,
]  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


@needs_trl
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_published_templates_are_rendered_as_by_transformers(name: str) -> None:
    tokenizer: Any = with_template(name)
    for messages, tools in ((ASKED, None), (TALK[:2], None), (TALK, [TOOL]), ([*TALK[:2], TALK[4]], None)):
        for asked in (True, False):
            expected: Any = None
            try:
                expected = tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=asked
                )
            except Exception as error:  # noqa: BLE001 - what a template raises
                with pytest.raises(TemplateFailed) as raised:
                    rendered(tokenizer, messages, tools, generation_prompt=asked)
                assert str(raised.value) == f"{type(error).__name__}: {error}"
            else:
                assert rendered(tokenizer, messages, tools, generation_prompt=asked) == expected


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set s = namespace(x='aa') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}"
CALLS = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (ENDLESS, "has not ended after 1 s of computing"),
        ("{{ 'a' * 10**10 }}", "takes more than 1 GiB of memory"),
        ("{{ 'a'.center(10**10) }}", "takes more than 1 GiB of memory"),
        (GROWS, ("takes more than 1 GiB of memory", "has not ended after 1 s")),  # the kernel may be slow to give it
        ("{{ 'a' * 10**7 }}", "makes more than 1,000,"),
        (CALLS, "calls itself without an end"),
        ("\n{% for %}", "is no Jinja template: line 2: Expected"),
        ("{{ 1 | sparkle }}", "is no Jinja template: line 1: No filter named 'sparkle'"),
    ],
)
def test_a_template_without_an_end_is_refused_by_its_file(
    template: str, told: str | tuple[str, ...], tmp_path: Path
) -> None:
    tokenizer: Any = char_tokenizer(template)
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError) as raised:
        rendered(tokenizer, ASKED)
    place = f"{tmp_path}/chat_template.jinja: the chat template "
    assert str(raised.value).startswith(place) and str(raised.value).removeprefix(place).startswith(told)
    assert rendered(char_tokenizer(CHAT_TEMPLATE), ASKED).startswith("<|start|>user\nhi")  # the next one is rendered


def test_a_template_that_hangs_on_some_messages_alone(tmp_path: Path) -> None:
    tokenizer: Any = char_tokenizer(
        "{% if messages | length > 2 %}{{ 'a' * 10**10 }}{% endif %}{{ messages[0].content }}"
    )
    assert [rendered(tokenizer, ASKED * n) for n in (1, 2)] == ["hi", "hi"]
    with pytest.raises(UserError, match=r"takes more than 1 GiB of memory on messages of user, user, user"):
        rendered(tokenizer, ASKED * 3)


def test_what_a_template_raises_is_told_with_its_type() -> None:
    with pytest.raises(TemplateFailed, match=r"^ZeroDivisionError: ") as raised:
        rendered(char_tokenizer("{{ 1 // 0 }}"), ASKED)
    assert not raised.value.refused
    with pytest.raises(TemplateFailed, match=r"^TemplateError: no$") as raised:
        rendered(char_tokenizer("{{ raise_exception('no') }}"), ASKED)
    assert raised.value.refused


def test_a_fork_renders_in_a_process_of_its_own() -> None:
    tokenizer: Any = char_tokenizer(CHAT_TEMPLATE)
    ours = rendered(tokenizer, ASKED)
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writes, rendered(tokenizer, ASKED).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reads, 10_000).decode() == ours == rendered(tokenizer, ASKED)
    os.close(reads), os.close(writes)


def test_train_and_serve_end_with_the_name_of_the_file(
    grpo_config: Path, sort4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in (sort4 / "model").iterdir():
        (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").write_text("{{ 'a' * 10**10 }}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "ab"}], "ground_truth": "1"}\n' * 8)
    overrides = [f"model.path={model}", f"data.train_files=[{tmp_path}/rows.jsonl]", "data.on_bad_row=skip"]
    assert main(["train", str(grpo_config), "--dry-run", *overrides]) == 2
    told = f"{model}/chat_template.jinja: the chat template takes more than 1 GiB of memory"
    assert told in capsys.readouterr().err
    with pytest.raises(UserError, match="takes more than 1 GiB of memory"):
        make_answerer(ServeConfig(model=ModelConfig(path=model)), "model")
