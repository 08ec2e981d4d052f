"""A judge on engines of its own trains a policy, in the actor's process and beside it, and its weights stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_groups, trajectories_path
from tests.conftest import load_file

SHORT = "generation: {max_response_tokens: 4}"
PARSER = """
def odd(reply):
    if not reply:
        raise ValueError("nothing was said")
    return float(ord(reply[0]) % 2)
"""


def test_its_judgements_are_the_frozen_models_wherever_it_runs(grpo_config: Path, sort4: Path, tmp_path: Path) -> None:
    judge = shutil.copytree(sort4 / "model", tmp_path / "judge")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(judge).config)
    model.save_pretrained(judge)
    (tmp_path / "parser.py").write_text(PARSER)
    (tmp_path / "told.txt").write_text("{question}{answer}")
    settings = f"{{template: {tmp_path}/told.txt, parser: {tmp_path}/parser.py:odd, unparsed: 0.5, {SHORT}}}"

    def train(run: str, *overrides: str) -> list[dict[str, float]]:
        fixed = [
            f"model.judge_path={judge}",
            f"reward.judge={settings}",
            "reward.judge.generation.max_response_tokens=4",
        ]
        fixed += ["reward.functions=[]", "training.optimizer.lr=0.01", f"trainer.run_dir={tmp_path / run}"]
        assert main(["train", str(grpo_config), *fixed, *overrides]) == 0
        names = ("reward/mean", "reward/judge", "reward/judge_attempts", "reward/judge_unparsed", "actor/grad_norm")
        steps = [step for step in read_metrics(tmp_path / run / "metrics.jsonl") if "reward/mean" in step]
        return [{name: step[name] for name in names if name in step} for step in steps]

    beside = train("beside")
    assert len(beside) == 3 and all(0 < step["reward/mean"] < 1 for step in beside)
    assert beside == train("apart", "placement={pools: {main: [1], judges: [1]}, roles: {judge: judges}}")
    tokenizer = AutoTokenizer.from_pretrained(judge)
    groups = read_groups(trajectories_path(tmp_path / "beside", 3), 3)
    grade, compared = load_file(tmp_path / "parser.py").odd, 0
    for trajectory, score in (
        (t, s) for group in groups[:2] for t, s in zip(group.trajectories, group.scores, strict=True)
    ):
        told = f"{trajectory.prompt.text}{trajectory.text}"
        asked = tokenizer(told, return_tensors="pt").input_ids
        said = model.generate(asked, max_new_tokens=4, do_sample=False)[0, asked.shape[1] :]
        reply = tokenizer.decode(said, skip_special_tokens=True)
        if reply:
            assert score.judgement == reply and score.parts["judge"] == score.value == grade(reply), told
            compared += 1
    assert compared > 8
