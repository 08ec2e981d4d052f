"""PPO whose critic learns adapters and its value head: what moves, what stays, and that a run in two halves is one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForTokenClassification
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from tandem.cli import main
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.tracking.jsonl import read_metrics

ADAPTERS = "model.critic_lora={rank: 2, target_modules: [q_proj, v_proj]}"


def train(config: Path, run: Path, *settings: str) -> list[dict[str, Any]]:
    rewards = config.with_name("reward.py")
    rewards.write_text("def letters(completion):\n    return float(sum(map(ord, completion)) % 5)\n")
    given = [
        f"reward.functions=[{rewards}:letters]",
        "algorithm={type: ppo, critic_optimizer: {lr: 0.01}}",
        f"trainer.run_dir={run}",
        "trainer.eval_every=0",
        *settings,
    ]
    assert main(["train", str(config), *given]) == 0
    return read_metrics(run / "metrics.jsonl")


def test_a_critic_of_adapters_learns_and_resumes(grpo_config: Path, sort4: Path, tmp_path: Path) -> None:
    """Beside a policy that learns as a whole; what its first step is taught does not depend on the critic, which says 0
    of everything."""
    once = train(grpo_config, tmp_path / "once", ADAPTERS, "trainer.steps=4")
    train(grpo_config, tmp_path / "halves", ADAPTERS, "trainer.steps=2")
    halves = train(grpo_config, tmp_path / "halves", ADAPTERS, "trainer.steps=4", "trainer.resume=true")
    moved = [record["critic/vf_loss"] for record in once]
    assert len(set(moved)) == 4 and moved == [record["critic/vf_loss"] for record in halves]
    whole = train(grpo_config, tmp_path / "whole", "trainer.steps=1")
    first, other = ({k: v for k, v in records[0].items() if k.startswith("actor/")} for records in (once, whole))
    assert first and first == other
    ends = [tmp_path / run / "checkpoints/step_000004/critic" for run in ("once", "halves")]
    learned, again = (load_file(end / "model/model.safetensors") for end in ends)
    assert all(torch.equal(again[name], weight) for name, weight in learned.items())
    start = load_file(sort4 / "model/model.safetensors")
    changed = {name for name, weight in learned.items() if name not in start or not torch.equal(weight, start[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {"q_proj", "v_proj", "score"}
    adapted: Any = AutoPeftModelForTokenClassification.from_pretrained(ends[0] / "adapter", num_labels=1)
    merged: Any = AutoModelForTokenClassification.from_pretrained(ends[0] / "model")
    row = torch.arange(4, 12)[None]
    with torch.no_grad():
        values = merged(row).logits
        torch.testing.assert_close(adapted(row).logits, values, rtol=1e-4, atol=1e-5)
    assert values.abs().min() > 0
    assert not (ends[0].parent / "adapter").exists(), "the policy has none"


def test_a_critic_goes_on_in_a_branch_where_it_is_of_the_same_kind(
    grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(grpo_config, tmp_path / "parent", ADAPTERS, "trainer.steps=1")
    for adapters, how in (([ADAPTERS], "weights and optimizer"), ([], "weights, with a new optimizer")):
        name = f"branch {len(adapters)}"
        train(grpo_config, tmp_path / name, *adapters, "trainer.steps=1", f"trainer.branch_from={tmp_path}/parent")
        assert f"(the model: weights and optimizer; the critic: {how})" in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["model.critic_lora", "model.critic_path", "algorithm.critic_warmup_steps"])
def test_an_algorithm_of_one_s_own_that_needs_no_values_has_no_critic(
    grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "from tandem.algorithms import PolicyGradient\n\n\nclass Mine(PolicyGradient):\n"
        "    def estimate(self, rollouts, rewards_T):\n        raise AssertionError\n"
    )
    given = {
        "model.critic_lora": ADAPTERS,
        "model.critic_path": f"model.critic_path={load_config(TrainConfig, grpo_config).model.path}",
        "algorithm.critic_warmup_steps": "algorithm.critic_warmup_steps=2",
    }
    assert main(["train", str(grpo_config), f"algorithm={{type: '{tmp_path}/mine.py:Mine'}}", given[asked]]) == 2
    said = f"{asked}: {tmp_path}/mine.py:Mine needs no values, and has no critic; leave it out"
    assert said in capsys.readouterr().err
