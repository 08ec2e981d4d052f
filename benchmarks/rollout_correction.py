"""Does importance correction save a run whose engine disagrees with the trainer? sort4, engine weights perturbed.

    python benchmarks/rollout_correction.py [--noise 0.3] [--steps 100]      (after scripts/quickstart)

At every publish the engine's weights get the same noise, a share of each tensor's standard deviation. Compared: no
noise; noise; noise with each correction. The figure of a run is the trainer's own policy on held-out prompts, which the
engine's samples alone can teach. Baseline: the perturbed run without correction.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from command_line import parse_arguments
from warmed import Warmed, warmed

from tandem.cluster.inline import InlineCluster
from tandem.config.load import load_config
from tandem.config.model import ModelConfig
from tandem.config.tree import TrainConfig
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import Role
from tandem.data.dataset import RLHFDataset
from tandem.generation.native import NativeEngine
from tandem.jobs.inputs import read_inputs
from tandem.jobs.rl import RlJob
from tandem.models.loading import load_policy
from tandem.reward.manager import RewardManager
from tandem.workers.rollout import RolloutWorker

ROOT = Path(__file__).parents[1]
CORRECTIONS = {
    "none": [],
    "TIS": ["type=truncate"],
    "MIS": ["type=mask"],
    "IcePop": ["type=mask", "lower=0.5", "upper=5"],
    "TIS, sequence": ["type=truncate", "level=sequence"],
    "MIS, geometric": ["type=mask", "level=geometric", "lower=0.5"],
    "skip the old log-probs": ["skip_old_logprobs=true"],
}


class PerturbedRollout(RolloutWorker):
    """Trains on samples of other weights; validates by the trainer's own."""

    noise = 0.0

    def _native(self, model: ModelConfig, config: Any, tokenizer: Any, actor: Any) -> NativeEngine:
        served = load_policy(model)
        generator = torch.Generator().manual_seed(1)
        self._offsets = {
            name: torch.randn(parameter.shape, generator=generator) * parameter.std() * self.noise
            for name, parameter in served.named_parameters()
            if parameter.dim() > 1
        }
        self._served = served
        return NativeEngine(served, max_running=config.max_running, tokenizer=tokenizer)

    def publish(self, version: int) -> None:
        super().publish(version)
        self._shift(1)

    def generate_for_eval(self, requests: Any) -> Any:
        self._shift(-1)
        answers = super().generate_for_eval(requests)
        self._shift(1)
        return answers

    @torch.no_grad()
    def _shift(self, sign: int) -> None:
        for name, offset in self._offsets.items():
            self._served.get_parameter(name).add_(offset, alpha=sign)


class PerturbedPlacement(Placement):
    def group(self, role: Role, group: type, kind: type, *args: Any, **kwargs: Any) -> Any:
        return super().group(role, group, PerturbedRollout if role is Role.Rollout else kind, *args, **kwargs)


def curve(correction: list[str], steps: int, every: int, start: Warmed) -> tuple[list[float], float]:
    """Accuracy of the trainer's policy at step 0, `every`, …; the mean KL between engine and trainer."""
    overrides = [f"model.path={start.model}", f"trainer.steps={steps}", "trainer.trajectories_every=0"]
    overrides += [f"data.{part}_files=[{start.rows}/{part}.jsonl]" for part in ("train", "val")]
    overrides += [f"algorithm.rollout_correction.{setting}" for setting in correction]
    with tempfile.TemporaryDirectory() as run_dir:
        config = load_config(TrainConfig, ROOT / "recipes/sort4_grpo.yaml", [*overrides, f"trainer.run_dir={run_dir}"])
        inputs = read_inputs(config, RLHFDataset)
        with closing(RewardManager(config.reward, 0)) as reward:
            job = RlJob(config, inputs, PerturbedPlacement(InlineCluster(), pools_of(config)), reward)
            found, kl = [job.evaluate(0)["val/sort4/acc/mean@4"]], 0.0
            for step in range(1, steps + 1):
                kl += job.step(step).get("rollout/mismatch_kl", 0.0) / steps
                if step % every == 0:
                    found.append(job.evaluate(step)["val/sort4/acc/mean@4"])
            job.close()
    return found, kl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(CORRECTIONS), default=list(CORRECTIONS))
    arguments = parse_arguments(parser, steps=2, every=1, only=["none", "TIS"])
    curves: dict[str, list[float]] = {}
    with warmed(arguments.small) as start:
        for name, noise in [("no noise", 0.0), *((name, arguments.noise) for name in arguments.only)]:
            PerturbedRollout.noise = noise
            curves[name], kl = curve(CORRECTIONS.get(name, []), arguments.steps, arguments.every, start)
            print(f"{name:<24} {' '.join(f'{value:.3f}' for value in curves[name])}   mismatch KL {kl:.4f}", flush=True)
    last = {f"accuracy, {name}": values[-1] for name, values in curves.items()}
    ratio = curves["TIS"][-1] / max(curves["none"][-1], 1e-9) if {"TIS", "none"} <= curves.keys() else None
    print(json.dumps({"benchmark": "rollout_correction", "figures": last, "baseline": "none", "ratio": ratio}))


if __name__ == "__main__":
    main()
