"""Whole runs that generate by vLLM while they train: each token's log-prob is that of the version it names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import ROOT

BOUND = 2e-5
STALENESS, STEPS, PROMPTS, SAMPLES, ANSWER_TOKENS = 2, 6, 3, 3, 200
SPLIT = {"pools": {"training": [1], "generation": [1]}, "roles": {"rollout": "generation"}}
SHARED = {"pools": {"all": [1]}}


def config(directory: Path, sort4: Path, placement: dict[str, Any]) -> dict[str, Any]:
    (directory / "reward.py").write_text(
        "def share_of_digits(completion, ground_truth):\n    return sum(map(str.isdigit, completion)) / 20\n"
    )
    return {
        "model": {"path": str(sort4 / "model")},
        "data": {"train_files": [str(sort4 / "train.jsonl")], "prompts_per_step": PROMPTS, "max_prompt_tokens": 10},
        "algorithm": {"type": "grpo", "group_size": SAMPLES},
        "generation": {
            "type": "vllm",
            "max_response_tokens": ANSWER_TOKENS,
            # fewer slots than three steps have answers: when a step has its own, others are half done
            "engine_args": {"gpu_memory_utilization": 0.1, "max_num_seqs": 13},
        },
        "training": {"optimizer": {"lr": 3e-3}},
        "reward": {"functions": [f"{directory}/reward.py:share_of_digits"], "workers": 1},
        "placement": placement,
        "trainer": {
            "run_dir": str(directory / "run"),
            "steps": STEPS,
            "max_staleness": STALENESS,
            "save_every": 1,
            "keep_last": STEPS,
        },
    }


def trained_rows(run_dir: Path) -> list[dict[str, Any]]:
    files = sorted((run_dir / "trajectories").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def logprobs(model: PreTrainedModel, row: dict[str, Any]) -> np.ndarray[Any, Any]:
    """`[T]`, of a response, by a forward pass of the whole row."""
    ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
    with torch.no_grad():
        logprobs_NV = model(ids[None]).logits[0].float().log_softmax(-1)[:-1]
    return logprobs_NV.gather(1, ids[1:, None])[len(row["prompt_ids"]) - 1 :, 0].numpy()


@pytest.mark.parametrize(
    "placement", [pytest.param(SPLIT, id="two pools", marks=pytest.mark.nightly), pytest.param(SHARED, id="one pool")]
)
def test_answers_that_go_on_over_publishes_have_the_logprobs_of_the_versions_that_they_name(
    vllm: None, sort4: Path, tmp_path: Path, placement: dict[str, Any]
) -> None:
    """On two pools publishes fall into what runs. On one pool that is aborted, kept, and goes on after the publish."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config(tmp_path, sort4, placement)))
    command = [sys.executable, "-m", "tandem", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    saved = [sort4 / "model", *sorted((tmp_path / "run/checkpoints").glob("step_*/model"))]
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in saved]
    rows = trained_rows(tmp_path / "run")
    assert len(models) == STEPS + 1 and len(rows) == STEPS * PROMPTS * SAMPLES
    assert len({row["prompt_index"] for row in rows}) == STEPS * PROMPTS, "no prompt is trained twice"
    mixed = 0
    for row in rows:
        versions = np.array(row["policy_versions"])
        assert len(versions) == len(row["response_ids"]) and (np.diff(versions) >= 0).all()
        assert versions[0] >= row["step"] - 1 - STALENESS and versions[-1] <= row["step"] - 1
        by_version = {version: logprobs(models[version], row) for version in {*versions.tolist()}}
        expected = np.array([by_version[version][place] for place, version in enumerate(versions)])
        np.testing.assert_allclose(row["rollout_logprobs"], expected, atol=BOUND, rtol=0)
        if len(by_version) > 1:
            mixed += 1
            wrong = by_version[versions[0]]
            assert np.abs(wrong - expected).max() > 10 * BOUND, "a token of another version would be seen"
    print(f"{mixed} answers have several versions")
    assert mixed, "a publish met an answer that was trained"
