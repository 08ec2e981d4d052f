"""Learning from answers of older weights, by how they are corrected: sort4, at an exact staleness.

    python benchmarks/staleness.py [--seeds 0 1 2] [--staleness 1 4] [--only none dppo]      (after scripts/quickstart)

The answers of step s are made by the weights of version s - 1 - k, all of them and all of one version (those of the
first steps by version 0). That is the worst that `trainer.max_staleness: k` allows. Compared: k = 0, and for each k no
correction at all, which a configuration cannot ask for, and each correction. The figure of a run is pass@1 of 256
held-out prompts, four answers each, after the last step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from command_line import parse_arguments
from warmed import Warmed, warmed

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Algorithm
from tandem.batching.packing import to_batch
from tandem.cluster.inline import InlineCluster
from tandem.config.load import load_config
from tandem.config.ratio import Anchor, RatioPlan, TrainerPass
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import Roles, make_roles
from tandem.controller.dataflow import compute_advantages, describe_batch, prepare
from tandem.controller.learning import placed_step, update
from tandem.controller.placement import Placement, pools_of
from tandem.data.dataset import RLHFDataset
from tandem.data.sampler import Sampler
from tandem.jobs.inputs import read_inputs
from tandem.jobs.validation import ValidationSets, summarize, validate
from tandem.reward.manager import RewardManager
from tandem.types import Group, Prompt, StepMetrics
from tandem.workers.rollout import seeded_requests

ROOT = Path(__file__).parents[1]
NONE = "none"
CORRECTIONS = {
    NONE: [],
    "TIS": ["rollout_correction.type=truncate"],
    "IcePop": ["rollout_correction.type=mask", "rollout_correction.lower=0.5", "rollout_correction.upper=5"],
    "default": [],
    "dppo": ["loss.type=dppo"],
}


class Run(NamedTuple):
    """What one run came to."""

    accuracy: float
    drift_kl: float
    """`rollout/drift_kl`, mean over the steps."""
    effective_share: float
    """`rollout/ess`, mean over the steps."""
    clip_fraction: float


def run(correction: str, staleness: int, seed: int, steps: int, start: Warmed) -> Run:
    """One training, every answer `staleness` versions older than the weights that it trains."""
    overrides = [f"model.path={start.model}", f"trainer.steps={steps}", f"trainer.seed={seed}", "reward.workers=1"]
    overrides += [f"reward.functions=[{ROOT}/examples/sort4/reward.py:compute_score]"]
    overrides += [f"data.{part}_files=[{start.rows}/{part}.jsonl]" for part in ("train", "val")]
    overrides += [f"algorithm.{setting}" for setting in CORRECTIONS[correction]]
    overrides += [f"trainer.max_staleness={0 if correction == NONE else staleness}"]
    with tempfile.TemporaryDirectory() as run_dir:
        config = load_config(TrainConfig, ROOT / "recipes/sort4_grpo.yaml", [*overrides, f"trainer.run_dir={run_dir}"])
    inputs = read_inputs(config, RLHFDataset)
    assert inputs.train is not None and inputs.val is not None
    algorithm = make_algorithm(config.algorithm, config.generation.max_response_tokens)
    with (
        closing(RewardManager(config.reward, seed)) as reward,
        closing(Placement(InlineCluster(), pools_of(config))) as placement,
    ):
        roles = make_roles(config, inputs.tokenizer, algorithm, steps, placement, reward)
        learned = list(train(roles, algorithm, config, inputs.train, staleness, steps))
        groups = validate(roles.experience, inputs.val, ValidationSets(inputs.val, config), seed, steps)
        accuracy = summarize(groups)["val/sort4/acc/mean@4"]
    return Run(
        accuracy, *(mean_of(name, learned) for name in ("rollout/drift_kl", "rollout/ess", "actor/clip_fraction"))
    )


def train(
    roles: Roles, algorithm: Algorithm, config: TrainConfig, data: RLHFDataset, staleness: int, steps: int
) -> Iterator[StepMetrics]:
    """Each step's metrics. The answers of `staleness` steps to come are made before a step learns."""
    sampler = Sampler(len(data), config.data.prompts_per_step, config.data.shuffle, config.trainer.seed)
    waiting: deque[list[Group]] = deque()
    rows = iter(sampler)
    asked = 0
    for step in range(1, steps + 1):
        while asked < min(step + staleness, steps):
            asked += 1
            waiting.append(scored_answers(roles, config, [data[row] for row in next(rows)], asked))
        yield learn(roles, algorithm, config, waiting.popleft(), step)


def scored_answers(roles: Roles, config: TrainConfig, prompts: Sequence[Prompt], step: int) -> list[Group]:
    """The groups of a step to come, by the weights that are served now."""
    requests = seeded_requests(prompts, config.algorithm.group_size, config.trainer.seed, step)
    return roles.experience.reward.score(roles.experience.rollout.generate(requests).get(), step)


def learn(roles: Roles, algorithm: Algorithm, config: TrainConfig, groups: list[Group], step: int) -> StepMetrics:
    """One step of `tandem train` after its generation. Where nothing corrects, the ratio is to the trainer's log-probs
    before the step, as it would be with fresh answers."""
    batch = to_batch(groups)
    with placed_step(batch, algorithm, config, step) as placed:
        if placed.ratio_plan.anchor is Anchor.OWN_PASS:
            placed.ratio_plan = RatioPlan(Anchor.TRAINER, TrainerPass.BEFORE_UPDATE)
        prepare(roles, algorithm, placed)
        compute_advantages(algorithm, groups, batch, (config.trainer.seed, step))
        metrics = update(roles.actor, roles.critic, algorithm, placed, config)
    roles.publish(step)
    if config.trainer.max_staleness:
        metrics |= describe_batch(batch, config, version=step - 1)  # asserts the bound
    return metrics


def mean_of(name: str, steps: Sequence[StepMetrics]) -> float:
    """The mean over the steps that have the metric; NaN where none has."""
    return fmean([metrics[name] for metrics in steps if name in metrics] or [float("nan")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=list(CORRECTIONS), default=list(CORRECTIONS))
    arguments = parse_arguments(parser, seeds=[0], staleness=[0, 1], steps=2)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    with warmed(arguments.small) as start:
        for staleness in arguments.staleness:
            for correction in arguments.only if staleness else [NONE]:
                runs = [run(correction, staleness, seed, arguments.steps, start) for seed in arguments.seeds]
                name = f"k={staleness}, {correction}"
                figures[name] = fmean(one.accuracy for one in runs)
                _, drift, effective, clipped = map(fmean, zip(*runs, strict=True))
                by_seed = " ".join(f"{one.accuracy:.3f}" for one in runs)
                print(
                    f"{name:<16} pass@1 {figures[name]:.3f} ({by_seed})   drift KL {drift:.4f}   "
                    f"effective {effective:.2f}   clipped {clipped:.4f}",
                    flush=True,
                )
    print(json.dumps({"benchmark": "staleness", "figures": figures, "baseline": NONE}))


if __name__ == "__main__":
    main()
