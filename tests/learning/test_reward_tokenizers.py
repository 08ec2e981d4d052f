"""Runs with a reward model of another tokenizer: its scores are those of transformers' own class for such models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tests.unit.data_tokenizer import char_tokenizer

POLICY_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ANSWERS = [
    "data.max_prompt_tokens=40",
    "generation.max_response_tokens=24",
    "generation.eval.samples=4",
    "reward.functions=[]",
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: a Llama with a head of one number, and the tokenizer and template of its own that it came with."""
    directory = tmp_path_factory.mktemp("judges") / "judge"
    tokenizer = char_tokenizer(around="<bos> $A")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, num_labels=1, **sizes, **ends)
    )
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def chat(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a policy that is asked by messages, with rows of messages and of plain text."""
    directory = tmp_path_factory.mktemp("chat")
    shutil.copytree(sort4 / "model", directory / "model")
    (directory / "model/chat_template.jinja").write_text(POLICY_TEMPLATE)
    rows = [json.loads(line) for line in (sort4 / "val.jsonl").read_text().splitlines()[:8]]
    (directory / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for place, row in enumerate(rows):
        system = [{"role": "system", "content": "Sort."}] if place % 2 else []
        row["prompt"] = [*system, {"role": "user", "content": row["prompt"]}]
    (directory / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def arguments(grpo_config: Path, chat: Path, judge: Path, rows: str = "messages") -> list[str]:
    tree = yaml.safe_load(grpo_config.read_text())
    tree["model"] = {"path": str(chat / "model"), "reward_model_path": str(judge)}
    tree["data"] |= {key: [str(chat / f"{rows}.jsonl")] for key in ("train_files", "val_files")}
    grpo_config.write_text(yaml.safe_dump(tree))
    return [str(grpo_config), *ANSWERS]


def score(judge: Path, prompt: Any, answer: str, cut: bool) -> float:
    """What transformers says of the text that the reward model's own template gives."""
    tokenizer: Any = AutoTokenizer.from_pretrained(judge)
    model: Any = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    if isinstance(prompt, str):
        ids = tokenizer(prompt + answer)["input_ids"] + ([] if cut else [tokenizer.eos_token_id])
    else:
        said = [*prompt, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(said, tokenize=False)
        ids = tokenizer(text.removesuffix("<|end|>\n") if cut else text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.item()


@pytest.mark.parametrize(
    ("rows", "overrides"),
    [
        ("messages", ["cluster.ranks=2"]),
        ("text", []),
        pytest.param("messages", ["cluster.type=ray", "cluster.ranks=2"], marks=pytest.mark.nightly),
    ],
)
def test_scores_are_those_of_transformers(
    request: pytest.FixtureRequest, grpo_config: Path, chat: Path, judge: Path, tmp_path: Path, rows: str,
    overrides: list[str], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if "cluster.type=ray" in overrides:
        request.getfixturevalue("ray_nodes")
    out = tmp_path / "answers.parquet"
    assert main(["eval", *arguments(grpo_config, chat, judge, rows), *overrides, f"--answers={out}"]) == 0
    assert "the reward model reads conversations by its own tokenizer and chat template" in capsys.readouterr().err
    answers = pq.read_table(out).to_pylist()
    prompts = [json.loads(line)["prompt"] for line in (chat / f"{rows}.jsonl").read_text().splitlines()]
    assert len(answers) == 32 and {answer["status"] for answer in answers} == {"completed", "truncated"}
    for answer in answers:
        wanted = score(judge, prompts[answer["prompt_index"]], answer["response"], answer["status"] == "truncated")
        assert answer["reward"] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert len({round(answer["reward"], 6) for answer in answers}) > 20


def with_positions(judge: Path, directory: Path, positions: int) -> Path:
    shutil.copytree(judge, directory)
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(described | {"max_position_embeddings": positions}))
    return directory


def test_answers_that_are_not_read_have_no_reward_and_too_many_end_the_run(
    grpo_config: Path, chat: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = with_positions(judge, tmp_path / "small", 42)
    given, out = arguments(grpo_config, chat, small), tmp_path / "answers.parquet"
    assert main(["eval", *given, "reward.max_error_share=1", f"--answers={out}"]) == 0
    answers = pq.read_table(out).to_pylist()
    lost = [answer for answer in answers if answer["reward"] is None]
    assert 0 < len(lost) < len(answers)
    assert {answer["status"] for answer in lost} == {"reward_error"}
    assert all("tokens, and the reward model reads 42 (max_position_embeddings" in answer["error"] for answer in lost)
    assert all(answer["error"].startswith("model.reward_model_path has not read row ") for answer in lost)
    capsys.readouterr()
    assert main(["eval", *given, "reward.max_error_share=0.01"]) == 1
    assert "lost their reward to errors and time-outs" in capsys.readouterr().err
    none = with_positions(judge, tmp_path / "none", 20)
    assert main(["train", *given, f"model.reward_model_path={none}", "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "model.reward_model_path: data row 0 cannot be shown to" in told and "reads 20 (max_position" in told


def test_a_policy_learns_from_it(grpo_config: Path, chat: Path, judge: Path, tmp_path: Path) -> None:
    given = arguments(grpo_config, chat, judge)
    assert main(["train", *given, "trainer.steps=2", "algorithm.type=ppo"]) == 0
    for record in read_metrics(tmp_path / "run/metrics.jsonl"):
        assert record["reward/model"] == record["reward/mean"] != 0 and record["reward/errors"] == 0


def test_check_says_what_the_reward_model_reads(
    grpo_config: Path, chat: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(grpo_config, chat, judge)
    assert main(["check", *given]) == 0
    told = capsys.readouterr().out
    assert "pass  reward model, tokens of its own" in told and "pass  reward model, rows alone" in told
    assert "conversations by its own tokenizer and chat template; 0 of 64 answers are not read" in told
    small = with_positions(judge, tmp_path / "small", 42)
    assert main(["check", *given, f"model.reward_model_path={small}"]) == 1
    assert "FAIL  reward model, tokens of its own" in capsys.readouterr().out
