"""A run whose reference is the policy without its adapters is the run that a reference of its own gives."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.pools import Role
from tandem.jobs.trainer import Trainer
from tandem.tracking.jsonl import read_metrics
from tandem.workers.training import TrainWorker


class OwnReference(TrainWorker):
    """A worker class for the role, so that a model is loaded for it."""

    made = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        type(self).made += 1


@pytest.mark.parametrize("critic", [False, True])
def test_no_second_model_gives_the_same_run(grpo_config: Path, tmp_path: Path, critic: bool) -> None:
    (tmp_path / "reward.py").write_text("def length(completion):\n    return float(len(completion) % 3)\n")
    settings = [
        f"reward.functions=[{tmp_path}/reward.py:length]",
        "model.lora={rank: 2}",
        f"algorithm={{type: {'ppo' if critic else 'grpo'}, kl: {{place: {'reward' if critic else 'loss'}}}}}",
        "training.optimizer.lr=0.01",
        "trainer.steps=3",
        "trainer.eval_every=0",
    ]
    found: list[list[dict[str, Any]]] = []
    for name, kinds in (("without", {}), ("loaded", {Role.RefPolicy: OwnReference})):
        run = tmp_path / name
        config = load_config(TrainConfig, grpo_config, [*settings, f"trainer.run_dir={run}"])
        OwnReference.made = 0
        assert Trainer(config, workers=kinds).fit()
        assert OwnReference.made == len(kinds)
        found.append(
            [
                {name: value for name, value in step.items() if name.startswith(("actor", "critic", "reward", "kl"))}
                for step in read_metrics(run / "metrics.jsonl")
            ]
        )
    without, loaded = found
    assert len(without) == 3 and without == loaded
    kl = [value for name, value in without[-1].items() if "kl" in name]
    assert kl and max(kl) > 0, without[-1]
