"""What is usually written wrong in a configuration gets a message that says what is wrong, and how to write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.load import load_config, read_config
from tandem.config.tree import TrainConfig
from tandem.errors import UserError

SOUND = """
model: {path: m}
data: {train_files: [a.parquet], prompts_per_step: 8}
trainer: {run_dir: r, steps: 3}
"""
NO_PATH, VARIABLE = (
    "input should be a path",
    "has a variable, which nothing here fills in; write the value, or give key=va",
)
NULL, NO_RUN = "'None' is text; YAML has null for it, or leave the key out", "trainer.run_dir: field required"
NO_LENGTH, DEEP = "trainer: give exactly one of steps and epochs", "nested too deeply"


def said(tmp_path: Path, text: str, *overrides: str, name: str = "c.yaml") -> list[str]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    try:
        return read_config(TrainConfig, path, overrides).problems
    except UserError as error:
        return [str(error).removeprefix(f"{path}: ")]


@pytest.mark.parametrize(
    ("override", "messages"),
    [
        (
            "algorithm={type: 'own.py:Mine', kl: {refresh_steps: 2}}",
            ["algorithm.kl: place: none has no reference to refresh; leave refresh_steps out, or give a place"],
        ),
        ("trainer.run_dir=$HOME/x", [f"trainer.run_dir: '$HOME/x' {VARIABLE}"]),
        ("data.train_files=['${oc.env:HOME}/x']", ["data.train_files.0: '${oc.env:HOME}/x' " + VARIABLE]),
        ("trainer.steps=${oc.env:STEPS}", ["trainer.steps: '${oc.env:STEPS}' " + VARIABLE]),
        ("model.critic_path=None", [f"model.critic_path: {NULL}"]),
        ("cluster={type: ray, address: None}", [f"cluster.address: {NULL}"]),
        ("trainer.run_dir=", [f"trainer.run_dir: {NO_PATH}, not None"]),
        ("trainer=", [NO_RUN, NO_LENGTH]),
        ("trainer={seed: 1}", [NO_RUN, NO_LENGTH]),
        ("reward.functions=a.py:f", ["reward.functions: input should be a list, as [a.py:f], not 'a.py:f'"]),
        ("placement.pools={main: 8}", ["placement.pools.main: input should be a list, as [8], not 8"]),
        ("data=[]", ["data: is a section of keys and values, not []"]),
        (
            "model.lora.target_modules=q_proj",
            ["model.lora.target_modules: input should be a list, as [q_proj] or 'all-linear', not 'q_proj'"],
        ),
        (
            "conversation={environment: {tools: [{functon: a.py:f}, {type: mcp}]}}",
            [
                "conversation.environment.tools.0.functon: unknown key; did you mean "
                "conversation.environment.tools.function?",
                "conversation.environment.tools.1: give one of `url` and `command`: where the server answers, or what",
            ],
        ),
        ("data.val_sets={aime: }", ["data.val_sets.aime.files: field required"]),
        ("trianer={steps: many}", ["trianer: unknown key; did you mean trainer?"]),
    ],
)
def test_a_value_that_is_not_meant_so(tmp_path: Path, override: str, messages: list[str]) -> None:
    found = said(tmp_path, SOUND, override)
    assert len(found) == len(messages) and all(map(str.startswith, found, messages)), found


def test_mistakes_in_a_misspelt_section_are_told_with_its_name(tmp_path: Path) -> None:
    found = said(tmp_path, SOUND.replace("trainer", "trianer").replace("steps: 3", "steps: many"))
    assert found[0] == "trianer: unknown key; did you mean trainer?" and found[1].startswith("trainer.steps: ")
    assert len(found) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: m}\n\ttrainer: {}\n", "a tab begins here, and YAML wants spaces"),
        ("model: &a {path: *a}\n", "recursive"),
        ("model: " + "[" * 3000, DEEP),
        ("model: " + "{a: " * 3000 + "1" + "}" * 3000, DEEP),
        (f"trainer: {{steps: {'9' * 6000}}}", "not valid YAML: "),
        ("trainer: {steps: !!int many}", "not valid YAML: "),
        ("trainer: {steps: !!bool many}", "'many' is neither true nor false"),
        ("trainer: {steps: !!timestamp many}", "is no kind of YAML 1.2's core schema"),
        ('model: {path: "\\ud800"}', "not valid YAML: "),
        ('model: {path: "a\\0"}\n' + SOUND.split("\n", 2)[2], "model.path: a path has no NUL character"),
        ("prompt: 1=\nanswer: 1\n", "is no configuration of this command, which has sections (model, "),
    ],
)
def test_text_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (found,) = said(tmp_path, text)
    assert message in found


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.jsonl.gz"])
def test_rows_in_the_place_of_a_configuration(tmp_path: Path, name: str) -> None:
    (found,) = said(tmp_path, '{"prompt": "1="}\n{"prompt": "2="}\n', name=name)
    assert found == "is a file of rows; give a configuration in YAML, which names it, as data.train_files"


def test_what_is_meant_is_taken_where_there_is_no_doubt(tmp_path: Path) -> None:
    """One file without a list, an empty section, words that a model reads."""
    overrides = ["data.train_files=~/a.jsonl", "data.val_sets={a: {files: v.jsonl}}", "tracking=", "algorithm.kl="]
    overrides += ["generation.stop_strings=[None, '${x}']", "model.chat_template.system_prompt=Pay $HOME in ${x}"]
    assert said(tmp_path, SOUND, *overrides) == []
    config = load_config(TrainConfig, tmp_path / "c.yaml", overrides)
    assert config.data.train_files == [Path.home() / "a.jsonl"]
    assert config.data.val_sets["a"].files == [Path.cwd() / "v.jsonl"]
    assert config.generation.stop_strings == ["None", "${x}"] and config.algorithm.kl.place == "none"
