"""The HH recipes on real pairs and a tiny model: fine-tuning, DPO, a reward model, PPO that raises its score."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT, load_file

PAIRS = ROOT.parent / "shared/data/hh_rlhf_helpful/pairs_4000.jsonl.gz"
pytestmark = pytest.mark.skipif(not PAIRS.is_file(), reason=f"the HH pairs are not at {PAIRS}")
FEW = ["trainer.epochs=null", "trainer.steps=25", "trainer.eval_every=25"]
"""One pass."""
hh = load_file(ROOT / "examples/hh/tiny.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand short pairs, of which a fifth is held out, and a model of a tenth of the example's parameters."""
    directory = tmp_path_factory.mktemp("hh")
    with gzip.open(PAIRS, "rt", encoding="utf-8") as lines:
        short = [line for line in lines if len(line) < 400][:1000]
    (directory / "pairs.jsonl").write_text("".join(short), encoding="utf-8")
    hh.prepare(directory / "pairs.jsonl", directory, held_out=5, tokens=512, width=64)
    return directory


@pytest.fixture(scope="module")
def policy(runs: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return hh.run(runs, "sft", runs / "model", *FEW, "training.optimizer={lr: 1e-2, warmup_steps: 0}")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def ends(run: Path) -> tuple[dict[str, float], dict[str, float]]:
    """What the first and the last record say."""
    before, *_, after = read_metrics(run / "metrics.jsonl")
    return before, after


def test_dpo(runs: Path, policy: Path) -> None:
    fewer = ["trainer.steps=15", "trainer.eval_every=15"]
    hh.run(runs, "dpo", policy, *FEW, *fewer, "training.optimizer={lr: 1e-3, warmup_steps: 0}")
    before, after = ends(runs / "dpo")
    assert after["val/loss"] < before["val/loss"] - 0.02 and after["val/margin"] > before["val/margin"] + 0.05
    assert after["val/accuracy"] > 0.55


@pytest.mark.nightly
def test_ppo_raises_the_score_of_a_reward_model(runs: Path, policy: Path) -> None:
    """The reward model is above chance on pairs held out; PPO raises its score of answers to prompts held out."""
    judge = hh.run(runs, "reward_model", policy, *FEW, "training.optimizer={lr: 3e-3, warmup_steps: 0}")
    before, after = ends(runs / "reward_model")
    assert after["val/accuracy"] > 0.57 and after["val/loss"] < before["val/loss"]
    short = ["trainer.steps=16", "trainer.eval_every=16", "generation.max_response_tokens=24"]
    fast = "training.optimizer={lr: 2e-3, warmup_steps: 0}"
    hh.run(runs, "ppo", policy, f"model.reward_model_path={judge}", *short, fast)
    before, after = ends(runs / "ppo")
    assert after["val/hh/reward/mean@1"] > before["val/hh/reward/mean@1"] + 0.15
    assert after["reward/model"] == after["reward/mean"] and after["actor/kl"] > 0
