"""A run whose workers die goes on from its last checkpoint by itself, and ends as the undisturbed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tandem
from tandem.errors import WorkerLost
from tandem.tracking.jsonl import read_metrics

STEPS = 8


@pytest.mark.parametrize(
    ("cluster", "losses"),
    [
        pytest.param({"ranks": 2}, 1, id="a process"),
        pytest.param({"ranks": 2}, 4, id="processes", marks=pytest.mark.nightly),
        pytest.param({"type": "ray", "ranks": 1}, 1, id="a node", marks=pytest.mark.nightly),
    ],
)
def test_losses_change_nothing(cluster: dict[str, Any], losses: int, grpo_config: Path, tmp_path: Path) -> None:
    """`lose_workers.py` takes any number of losses."""
    tree = yaml.safe_load(grpo_config.read_text())
    (tmp_path / "reward.py").write_text("def digits(completion):\n    return sum(map(str.isdigit, completion)) / 8\n")
    tree["reward"] = {"functions": [f"{tmp_path}/reward.py:digits"], "workers": 1}
    tree["trainer"] |= {"steps": STEPS, "save_every": 2, "max_restarts": 2}
    tree["cluster"] = cluster
    config = tmp_path / "lost.yaml"
    config.write_text(yaml.safe_dump(tree))
    script = Path(__file__).with_name("lose_workers.py")
    done = subprocess.run(
        [sys.executable, str(script), str(config), str(tmp_path), str(losses)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("same outcome") == losses


class Dying(tandem.RolloutWorker):
    """Its process is killed once, while it answers for the fifth step."""

    answered = 0

    async def answer(self, request: tandem.RolloutRequest, sampling: tandem.SamplingParams) -> list[tandem.Trajectory]:
        Dying.answered += 1
        if Dying.answered == 4 * 4 + 2 and not (once := Path(os.environ["DIED"])).exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().answer(request, sampling)


@pytest.mark.parametrize("restarts", [None, 0])
def test_engines_that_are_lost_cost_no_step_of_a_trainer_that_is_not(
    grpo_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int | None
) -> None:
    """By default the run goes on from there; without restarts it ends there."""
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    pools = ["placement.pools={train: [1], engines: [1]}", "placement.roles={rollout: engines}"]
    given = [] if restarts is None else [f"trainer.max_restarts={restarts}"]
    settings = [*pools, *given, f"trainer.steps={STEPS}", "trainer.save_every=0", "data.val_files=[]"]
    config = tandem.load_config(tandem.TrainConfig, grpo_config, settings)

    def run(**others: Any) -> None:
        changed = config.model_copy(update={"trainer": config.trainer.model_copy(update=others)})
        tandem.Trainer(changed, workers={tandem.Role.Rollout: Dying}).fit()

    if restarts == 0:
        with pytest.raises(WorkerLost, match=r"engines rank 0 .* was killed by SIGKILL"):
            run()
        assert [path.name for path in (tmp_path / "run/checkpoints").glob("step_*")] == ["step_000004"]
        run(resume=True)
    else:
        run()
    steps = [record["step"] for record in map(dict, read_metrics(tmp_path / "run/metrics.jsonl"))]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert steps == list(range(1, STEPS + 1)) and len(lines) == STEPS, "none was trained twice"
