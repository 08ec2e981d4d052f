"""The section `model.chat_template`: arguments, a system prompt, another template; in what is saved, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_tokenizer import write_lines
from transformers import AutoTokenizer
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from tandem.cli import main
from tandem.config.data import SftDataConfig
from tandem.config.model import ChatTemplateConfig, ModelConfig
from tandem.data.sft import SftDataset
from tandem.errors import UserError
from tandem.models.chat_template import changed, literal
from tandem.models.loading import load_tokenizer
from tests.picture_families import make_model
from tests.unit.published_templates import FOLDER, REAL, needs_tokenizers, needs_trl

ASKED = [{"role": "user", "content": "2+3?"}]
WORDS = [{"role": "user", "content": "ab"}]
TWO_TURNS = [*ASKED, {"role": "assistant", "content": "5"}, {"role": "user", "content": "And 4?"}]
SHOUTS = "{% for m in messages %}{{ m.role }}: {{ m.content | upper if loud else m.content }}\n{% endfor %}"


def rendered(template: str, messages: Any, **given: Any) -> str:
    """As transformers renders it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **given)
    return text


@needs_trl
def test_qwen3_thinks_or_not() -> None:
    template = (FOLDER / "qwen3.jinja").read_text()
    opening = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(changed(template, ChatTemplateConfig()), ASKED) == opening
    silent = changed(template, ChatTemplateConfig(arguments={"enable_thinking": False}))
    assert rendered(silent, ASKED) == opening + "<think>\n\n</think>\n\n"
    assert rendered(silent, ASKED, enable_thinking=True) == opening  # who calls it has the last word
    thinks = changed(silent, ChatTemplateConfig(arguments={"enable_thinking": True}))  # a later run
    assert rendered(thinks, ASKED) == opening
    assert changed(silent, ChatTemplateConfig(arguments={"enable_thinking": False})) == silent


@needs_trl
def test_llama_3_has_a_date_and_a_system_prompt() -> None:
    config = ChatTemplateConfig(arguments={"date_string": "01 Jan 2026"}, system_prompt='Say "5".\n{{ no }} %} 😀')
    text = rendered(changed((FOLDER / "llama3_1.jinja").read_text(), config), TWO_TURNS, bos_token="<|begin|>")
    assert text.startswith("<|begin|><|start_header_id|>system<|end_header_id|>\n\n")
    assert "Today Date: 01 Jan 2026\n" in text and 'Say "5".\n{{ no }} %} 😀<|eot_id|>' in text
    own = rendered(
        changed((FOLDER / "llama3_1.jinja").read_text(), config), [{"role": "system", "content": "Mine."}, *ASKED]
    )
    assert "Mine." in own and "Say" not in own


@pytest.mark.parametrize("begins", ["", "\n", "  x"])
def test_the_rest_of_a_template_is_rendered_as_it_was(begins: str) -> None:
    config = ChatTemplateConfig(arguments={"loud": False}, system_prompt=None)
    assert rendered(changed(begins + SHOUTS, config), ASKED) == rendered(begins + SHOUTS, ASKED)
    loud = ChatTemplateConfig(arguments={"loud": True}, system_prompt="Hush")
    assert rendered(changed(begins + SHOUTS, loud), WORDS) == f"{begins}system: HUSH\nuser: AB\n"


def test_values_reach_the_template_as_they_are() -> None:
    values = [True, None, 1, -2.5, 'a"b\\n{{%}}\n\té😀', [1, [False]], {"a b": {"c": None}}]
    template = "{% for value in values %}{{ value | tojson }}\n{% endfor %}"
    expected = rendered(template, ASKED, values=values)
    assert rendered(changed(template, ChatTemplateConfig(arguments={"values": values})), ASKED) == expected
    assert literal({"a": [True]}) == '{"a": [true]}'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"lout": True}, "arguments.lout: the chat template reads nothing of that name; did you mean 'loud'?"),
        ({"messages": []}, "arguments.messages: no argument of that name can be given"),
        ({"a b": 1}, "arguments.a b: no argument of that name"),
    ],
)
def test_arguments_that_do_nothing_are_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=r"^model\.chat_template\.") as raised:
        changed(SHOUTS, ChatTemplateConfig(arguments=arguments))
    assert told in str(raised.value)


def test_a_file_in_the_place_of_the_template(sort4: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=sort4 / "model", chat_template=ChatTemplateConfig(arguments={"loud": True}))
    with pytest.raises(UserError, match=r"the tokenizer has no chat template; give one with model.chat_template.file"):
        load_tokenizer(config)
    (tmp_path / "shouts.jinja").write_text(SHOUTS)
    section = ChatTemplateConfig(arguments={"loud": True}, file=tmp_path / "shouts.jinja")
    shouting = load_tokenizer(config.model_copy(update={"chat_template": section}))
    assert shouting.apply_chat_template(WORDS, tokenize=False) == "user: AB\n"
    missing = config.model_copy(update={"chat_template": ChatTemplateConfig(file=tmp_path / "none.jinja")})
    with pytest.raises(UserError, match=r"none.jinja cannot be read"):
        load_tokenizer(missing)


def test_a_run_follows_the_section(grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shouts.jinja").write_text(SHOUTS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "ab"}], "ground_truth": "1"}\n' * 8)
    overrides = [
        f"model.chat_template.file={tmp_path}/shouts.jinja", "model.chat_template.arguments={loud: true}",
        f"data.train_files=[{tmp_path}/rows.jsonl]", "data.val_files=[]", "trainer.steps=1", "trainer.eval_every=0",
    ]  # fmt: skip
    assert main(["train", str(grpo_config), *overrides]) == 0, capsys.readouterr().err
    saved = load_tokenizer(ModelConfig(path=tmp_path / "run"))
    assert saved.apply_chat_template(WORDS, tokenize=False) == "user: AB\n"


@needs_trl
@needs_tokenizers
def test_turns_whose_thoughts_a_template_drops_later_are_learned_one_by_one(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(REAL / "qwen3")
    tokenizer.chat_template = (FOLDER / "qwen3.jinja").read_text()
    thought = "<think>\nTwo and three.\n</think>\n\n5"
    again = "<think>\nFour more.\n</think>\n\n9"
    messages = [*ASKED, {"role": "assistant", "content": thought}, TWO_TURNS[-1]]
    row = {"messages": [*messages, {"role": "assistant", "content": again}]}
    path = write_lines(tmp_path / "rows.jsonl", [row, row])
    dataset = SftDataset([path], tokenizer, SftDataConfig(train_files=[path]))
    opening = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    later = opening + "5<|im_end|>\n<|im_start|>user\nAnd 4?<|im_end|>\n<|im_start|>assistant\n"
    found = [dataset[number] for number in range(len(dataset))]
    assert [tokenizer.decode(one.prompt_ids) for one in found] == [opening, later] * 2
    assert [tokenizer.decode(one.response_ids) for one in found] == [
        thought + "<|im_end|>\n",
        again + "<|im_end|>\n",
    ] * 2
    assert all(one.loss_mask.all() for one in found) and [one.index for one in found] == [0, 1, 2, 3]
    assert dataset.descriptions[0].endswith("2 `messages` rows; 0 skipped")


@needs_trl
@needs_tokenizers
def test_turns_without_thoughts_are_one_row(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(REAL / "llama3")
    tokenizer.bos_token, tokenizer.chat_template = "<|begin_of_text|>", (FOLDER / "llama3.jinja").read_text()
    row = {"messages": [*TWO_TURNS, {"role": "assistant", "content": "9"}]}
    path = write_lines(tmp_path / "rows.jsonl", [row])
    dataset = SftDataset([path], tokenizer, SftDataConfig(train_files=[path]))
    learned = dataset[0].response_ids[dataset[0].loss_mask]
    assert len(dataset) == 1 and tokenizer.decode(learned) == "5<|eot_id|>9<|eot_id|>"


PARTS = (
    "\n{% for m in messages %}{{ m.role }}: {% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>"
    "{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("where", ["chat_template.jinja", "chat_template.json"])
def test_a_template_that_shows_parts_alone_shows_text_too(where: str, tmp_path: Path) -> None:
    """Of models that see pictures, whose templates are published so, and in a file that tokenizers do not read."""
    make_model("llava", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / where).write_text(PARTS if where.endswith("jinja") else json.dumps({"chat_template": PARTS}))
    pictured = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    talk = [{"role": "system", "content": "Look."}, pictured, {"role": "assistant", "content": "A dog."}]
    tokenizer = load_tokenizer(ModelConfig(path=tmp_path))
    text = "\nsystem: Look.user: <image>What?assistant: A dog."
    assert tokenizer.apply_chat_template(talk, tokenize=False) == text
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(ModelConfig(path=tmp_path))
    assert again.chat_template == tokenizer.chat_template and again.apply_chat_template(talk, tokenize=False) == text


def test_the_template_of_smolvlm_shows_text_too(tmp_path: Path) -> None:
    make_model("smolvlm", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(DEFAULT_CHAT_TEMPLATE)
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    text = "<|im_start|>User:<image>What?<end_of_utterance>\nAssistant: A dog.<end_of_utterance>\n"
    tokenizer = load_tokenizer(ModelConfig(path=tmp_path))
    answer = {"role": "assistant", "content": "A dog."}
    assert tokenizer.apply_chat_template([asked, answer], tokenize=False) == text
