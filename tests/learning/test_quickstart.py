"""The quickstart from nothing, once a session: its model has learned, and everything it leaves behind is of use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.cli import main
from tandem.errors import UserError
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories
from tests.conftest import ROOT, load_file


def warmed(quickstart: Path) -> list[str]:
    """Overrides that start a sort4 recipe from the quickstart's warmed model and task."""
    warmup = quickstart.with_name(f"{quickstart.name}-warmup")
    return [
        f"model.path={warmup}/sft/checkpoints/step_000350/model",
        f"data.train_files=[{warmup}/task/train.jsonl]",
        f"data.val_files=[{warmup}/task/val.jsonl]",
        f"reward.functions=[{ROOT}/examples/sort4/reward.py:compute_score]",
    ]


def test_the_model_learned(quickstart: Path) -> None:
    summary = json.loads((quickstart / "summary.json").read_text())
    assert summary["prompts"] >= 200
    assert summary["after"]["pass_at_1"] >= 0.9
    assert summary["after"]["pass_at_1"] >= summary["before"]["pass_at_1"] + 0.4


def test_a_run_that_went_on_after_the_quickstart_is_not_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/sort4"))
    monkeypatch.chdir(ROOT)
    made = load_file(ROOT / "examples/sort4/quickstart.py").Quickstart("grpo", 0, tmp_path / "run")
    (tmp_path / "run-warmup/sft").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step_000101").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("model: {")
    with pytest.raises(UserError, match="not made by the quickstart"):
        made._clear()
    former = "model: {{path: {}/run-warmup/sft/model}}\nalgorithm: {{type: {}}}"
    (tmp_path / "run/config.yaml").write_text(former.format(tmp_path, "grpo"))
    with pytest.raises(UserError, match="its run went on to step 101, after the quickstart's 100"):
        made._clear()
    (tmp_path / "run/config.yaml").write_text(former.format(tmp_path, "ppo"))
    made._clear()
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_ppo_reaches_the_bar_with_a_critic_that_explains(quickstart: Path, tmp_path: Path) -> None:
    run = tmp_path / "ppo"
    assert main(["train", str(ROOT / "recipes/sort4_ppo.yaml"), *warmed(quickstart), f"trainer.run_dir={run}"]) == 0
    records = read_metrics(run / "metrics.jsonl")
    assert records[-1]["val/sort4/acc/mean@4"] >= 0.9
    assert max(record.get("critic/vf_explained_var", 0.0) for record in records) > 0.3


def test_the_saved_model_loads_and_gives_the_logits_it_was_trained_to(quickstart: Path) -> None:
    """The trainer's log-probs of the last step, from transformers alone on the checkpoint before that step."""
    directory = quickstart / "checkpoints" / (quickstart / "checkpoints" / "latest").read_text().strip() / "model"
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer("4821=", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(answer[0], skip_special_tokens=True) == "4821=1248"


def test_trainer_and_engine_agree_on_every_step(quickstart: Path) -> None:
    records = [record for record in read_metrics(quickstart / "metrics.jsonl") if record["step"] > 0]
    assert max(record["rollout/mismatch_max"] for record in records) < 5e-5
    assert all(record["rollout/staleness/mean"] == 0 for record in records)


def test_every_metric_is_documented(quickstart: Path) -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    patterns = [re.sub(r"<\w+>", ".+", name) for name in re.findall(r"^\| `([^`]+)`", page, re.M)]
    warmup = quickstart.with_name(f"{quickstart.name}-warmup")
    names = {
        name
        for run in (quickstart, warmup / "sft")
        for record in read_metrics(run / "metrics.jsonl")
        for name in record
    }
    assert {name for name in names - {"step"} if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()


def test_trajectories_hold_both_sides_log_probs(quickstart: Path) -> None:
    oldest_kept = min((quickstart / "trajectories").glob("step_*.parquet"))
    table = read_trajectories(oldest_kept)
    rows: list[dict[str, Any]] = table.to_pylist()
    assert len(rows) == 128
    assert {row["status"] for row in rows} <= {"completed", "truncated"}
    for row in rows:
        assert len(row["response_ids"]) == len(row["rollout_logprobs"]) == len(row["trainer_logprobs"])
        if row["advantage"] != 0:
            assert torch.allclose(
                torch.tensor(row["rollout_logprobs"]), torch.tensor(row["trainer_logprobs"]), atol=5e-5
            )
    assert (quickstart / "report.html").stat().st_size > 10_000


def test_failing_rewards_are_counted_and_the_run_goes_on(quickstart: Path, tmp_path: Path) -> None:
    """One in ten answers makes the function raise; others make it sleep for an hour, or kill its own process."""
    source = tmp_path / "rewards.py"
    source.write_text(
        "import os, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    kind = sum(map(ord, solution_str + ground_truth)) % 10\n"
        "    if kind == 0: raise RuntimeError('no luck')\n"
        "    if ground_truth == '0123': time.sleep(3600)\n"
        "    if ground_truth == '4567': os.kill(os.getpid(), 9)\n"
        "    return float(solution_str == ground_truth)\n"
    )
    train = tmp_path / "train.jsonl"
    asked = ["3210", "7654", "1205", "9431", "8642", "7531", "9876", "5021"]
    rows = [{"prompt": f"{a}=", "data_source": "sort4", "ground_truth": "".join(sorted(a))} for a in asked]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        *warmed(quickstart), f"data.train_files=[{train}]", "data.prompts_per_step=8", "trainer.steps=1",
        "trainer.eval_every=0", f"trainer.run_dir={tmp_path / 'run'}", f"reward.functions=[{source}:compute_score]",
        "reward.timeout_s=0.5", "reward.max_error_share=0.6",
    ]  # fmt: skip
    assert main(["train", str(ROOT / "recipes/sort4_grpo.yaml"), *arguments]) == 0
    for record in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert record["reward/timeouts"] + record["reward/errors"] >= 16
        assert 1 <= record["reward/timeouts"] <= 8 <= record["reward/errors"]
    statuses = read_trajectories(tmp_path / "run/trajectories/step_000001.parquet", ["status", "reward", "loss_mask"])
    for row in statuses.to_pylist():
        failed = row["status"] in ("reward_error", "reward_timeout")
        assert failed == (row["reward"] is None)
        assert failed != any(row["loss_mask"])


def test_too_many_failing_rewards_stop_the_run(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rewards.py"
    source.write_text(
        "def compute_score(data_source, solution_str, ground_truth):\n    raise RuntimeError('no luck')\n"
    )
    arguments = [
        *warmed(quickstart),
        f"reward.functions=[{source}:compute_score]",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    assert main(["train", str(ROOT / "recipes/sort4_grpo.yaml"), *arguments, "trainer.eval_every=0"]) == 1
    assert "max_error_share" in capsys.readouterr().err
    assert (tmp_path / "run/trajectories/step_000001.parquet").exists()
