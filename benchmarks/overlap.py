"""How much of generation and training runs at the same time, by `trainer.max_staleness`, against what is possible.

    python benchmarks/overlap.py [--only known tails slots real shared] [--rounds 3]

Whole runs of `tandem train` with its ordinary outputs, on a random model of examples/sort4 whose answers are as long as
the data says. A figure is the median time from update to update, after the first few.

    known    two pools; engines and update sleep for known times. k = 1 against max(generate, train), and k = 0 against
             their sum
    tails    the same, one prompt in 16 with answers eight times longer. k = 4 against
             max(train, generate at full engines, (longest answer + train) / (k + 1))
    slots    the same with two engines of few slots, and siblings of different lengths: k = 4 against generation at full
             engines
    real     two pools, a core each: the native engine generates, the trainer trains. The overlap is the share of the
             shorter of the two that k = 1 saves; how long each takes is measured at k = 0
    shared   one process, which generates or trains, one prompt in 16 with answers 16 times longer: k = 1 fills the
             tail of a step with prompts of the next one

The first three hardly compute, and bear neighbours; the other two want two cores with nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from command_line import parse_arguments

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.pools import Role
from tandem.generation.base import EngineLimits
from tandem.jobs.trainer import Trainer
from tandem.tracking.jsonl import read_metrics
from tandem.types import Completion, Request, SamplingParams, Status, Trajectory
from tandem.workers.rollout import RolloutRequest, RolloutWorker
from tandem.workers.training import TrainWorker

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples/sort4"))
TOKEN_S, SPREAD, TRAIN_S, UPDATES = "OVERLAP_TOKEN_S", "OVERLAP_SPREAD", "OVERLAP_TRAIN_S", "OVERLAP_UPDATES"
"""Environment of the workers: how long a token takes, by how much of that siblings differ, how long an update takes at
least, where updates are noted."""
WARM_STEPS = 4
"""Steps that do not count: the first ones fill the pipeline."""
STAGES = ("generation", "reward", "preparation", "advantages", "update", "publish")
SPLIT = ("placement.pools={training: [1], generation: [1]}", "placement.roles={rollout: generation}")
SPLIT_TWO = ("placement.pools={training: [1], generation: [2]}", "placement.roles={rollout: generation}")


class TimedEngine:
    """A GenerationEngine of so many slots, in which each sample sleeps for a known time a token.

    Tokens of different samples take different times: from `1 - spread` to `1 + spread` times `token_s`, by the seed.
    """

    def __init__(self, slots: int, token_s: float, spread: float) -> None:
        self.version = -1
        self.limits = EngineLimits(positions=10**9, vocabulary=99, stop_strings=False, max_running=slots)
        self._slots = asyncio.Semaphore(slots)
        self._token_s = token_s
        self._spread = spread

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        samples = [asyncio.create_task(self._sample(request, place)) for place in range(len(request.seeds))]
        for ended in asyncio.as_completed(samples):
            yield await ended

    async def _sample(self, request: Request, place: int) -> Completion:
        tokens = request.sampling.max_tokens
        slowness = 1 + self._spread * (2 * (request.seeds[place] // 7 % 1000) / 999 - 1)
        async with self._slots:
            version = self.version
            await asyncio.sleep(tokens * self._token_s * slowness)
        ids = np.full(tokens, 10 + request.seeds[place] % 80, np.int32)
        versions = np.full(tokens, version, np.int32)
        return Completion(place, ids, np.full(tokens, -4.5, np.float32), versions, Status.TRUNCATED)

    def load_weights(self, version: int, weights: Iterable[Any] | None) -> None:
        for _ in weights or ():
            pass  # they come over the bridge, and are taken off it
        self.version = version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class ScriptedRollout(RolloutWorker):
    """Every answer to a prompt has as many tokens as the prompt's ground truth says."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stop_token_ids = ()

    async def answer(self, request: RolloutRequest, sampling: SamplingParams) -> list[Trajectory]:
        return await super().answer(request, replace(sampling, max_tokens=int(request.prompt.ground_truth)))


class TimedRollout(ScriptedRollout):
    """With a TimedEngine."""

    def _native(self, model: Any, config: Any, tokenizer: Any, actor: Any) -> Any:
        self._weights = lambda: None
        return TimedEngine(config.max_running, float(os.environ[TOKEN_S]), float(os.environ[SPREAD]))


class TimedActor(TrainWorker):
    """Notes when each update begins, and takes a known time for it at least."""

    def learn(self, *arguments: Any) -> Any:
        began = time.monotonic()
        with open(os.environ[UPDATES], "a") as file:
            file.write(f"{began}\n")
        result = super().learn(*arguments)
        time.sleep(max(0.0, began + float(os.environ[TRAIN_S]) - time.monotonic()))
        return result


def score_by_letters(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward that differs between siblings."""
    return sum(map(ord, solution_str)) % 7 / 6


@dataclass(frozen=True)
class Task:
    """What is trained on, and how long it takes where that is known."""

    lengths: Sequence[int]
    """Tokens of the answers to each prompt, over and over."""
    prompts: int
    samples: int
    slots: int
    """Of each engine."""
    token_s: float = 0.0
    """0: the native engine generates."""
    spread: float = 0.0
    train_s: float = 0.0
    pools: Sequence[str] = SPLIT

    @property
    def generate_s(self) -> float:
        """At full engines, of which there is one for each process of the last pool."""
        tokens = self.samples * sum(self.lengths) * self.prompts / len(self.lengths)
        engines = 2 if self.pools is SPLIT_TWO else 1
        return tokens * self.token_s / (self.slots * engines)


class Measured(NamedTuple):
    """Of the steps of a run."""

    wall_s: float
    """From update to update, mean."""
    stages: dict[str, float]
    """Where the controller spends that, means; `other`: what lies between the stages."""


def run(task: Task, staleness: int, steps: int) -> Measured:
    """One training run. The steps at its beginning and its end do not count: there the pipeline fills and empties."""
    import task as sort4

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        sort4.write_model(directory / "model", seed=0)
        prompts = sort4.split_prompts(0)[0][: task.prompts * steps]
        rows = (
            {"prompt": f"{prompt}=", "data_source": "overlap", "ground_truth": str(length)}
            for prompt, length in zip(prompts, itertools.cycle(task.lengths))
        )
        sort4.write_rows(directory / "train.jsonl", rows)
        os.environ |= {TOKEN_S: str(task.token_s), SPREAD: str(task.spread), TRAIN_S: str(task.train_s)}
        os.environ[UPDATES] = str(directory / "updates")
        kinds = {Role.Rollout: TimedRollout if task.token_s else ScriptedRollout, Role.Actor: TimedActor}
        config = load_config(TrainConfig, ROOT / "recipes/sort4_grpo.yaml", settings(task, directory, staleness, steps))
        with open(os.devnull, "w") as silence, redirect_stdout(silence):
            Trainer(config, workers=kinds).fit()
        began = [float(line) for line in (directory / "updates").read_text().split()]
        records = read_metrics(directory / "run/metrics.jsonl")
    last, together = steps - staleness, staleness + 1  # so many steps may get their groups at once
    count = (last - 1 - WARM_STEPS - staleness) // together * together
    walls = [after - before for before, after in pairwise(began[last - count - 1 : last])]
    counted = records[last - count : last]
    stages = {stage: fmean(one.get(f"time/{stage}_s", 0.0) for one in counted) for stage in STAGES}
    wall_s = fmean(walls)
    stages["other"] = wall_s - sum(stages.values())
    print(
        f"k={staleness}: {1000 * wall_s:.0f} ms a step:", *(f"{x} {1000 * stages[x]:.0f}" for x in stages), flush=True
    )
    return Measured(wall_s, stages)


def settings(task: Task, directory: Path, staleness: int, steps: int) -> list[str]:
    """Overrides of the recipe."""
    return [
        f"model.path={directory / 'model'}",
        f"data.train_files=[{directory / 'train.jsonl'}]",
        "data.val_files=[]",
        "data.shuffle=false",
        f"data.prompts_per_step={task.prompts}",
        f"algorithm.group_size={task.samples}",
        f"generation.max_response_tokens={max(task.lengths)}",
        f"generation.max_running={task.slots}",
        "training.optimizer.lr=1e-6",
        f"reward.functions=[{Path(__file__).resolve()}:score_by_letters]",
        "reward.workers=1",
        f"trainer.run_dir={directory / 'run'}",
        f"trainer.steps={steps}",
        f"trainer.max_staleness={staleness}",
        "trainer.eval_every=0",
        *task.pools,
    ]


def known(rounds: int) -> Iterator[tuple[str, float]]:
    """Ratios to what is possible, for known times of generation and update."""
    for generate_s, train_s in ((0.4, 0.4), (0.4, 0.2), (0.2, 0.4)):
        task = Task([20], prompts=16, samples=2, slots=32, token_s=generate_s / 20, train_s=train_s)
        for staleness, bound in ((0, generate_s + train_s), (1, max(generate_s, train_s))):
            ratio = repeat(rounds, task, staleness, steps=16) / bound
            yield f"known, generate {generate_s} s, train {train_s} s, k={staleness}: time / {bound:g} s", ratio


def tails(rounds: int) -> Iterator[tuple[str, float]]:
    """Ratios to the law with long answers: with slots for all, with few slots, with few slots on two engines."""
    lengths = [40, *[5] * 15]
    for train_s, slots, pools in ((0.2, 256, SPLIT), (0.2, 16, SPLIT), (0.2, 8, SPLIT_TWO)):
        task = Task(lengths, prompts=16, samples=2, slots=slots, token_s=0.04, train_s=train_s, pools=pools)
        longest_s = max(lengths) * task.token_s
        law = max(train_s, task.generate_s, (longest_s + train_s) / 5)
        engines = 2 if pools is SPLIT_TWO else 1
        ratio = repeat(rounds, task, 4, steps=36) / law
        yield f"tails, {engines} x {slots} slots, k=4: time / {law:.3g} s of the law", ratio


def slots(rounds: int) -> Iterator[tuple[str, float]]:
    """The ratio to generation at full engines, where a group is half of an engine's slots."""
    task = Task([20], prompts=8, samples=8, slots=16, token_s=0.03, spread=0.8, train_s=0.1, pools=SPLIT_TWO)
    ratio = repeat(rounds, task, 4, steps=24) / task.generate_s
    yield f"slots, 2 x 16 slots, groups of 8, k=4: time / {task.generate_s:.3g} s at full engines", ratio


def real(rounds: int) -> Iterator[tuple[str, float]]:
    """What k = 1 saves of the shorter of generation and training, each on a core of its own."""
    task = Task([64], prompts=16, samples=8, slots=256)
    overlaps: list[float] = []
    for _ in range(rounds):
        alone, beside = (run(task, staleness, 40) for staleness in (0, 1))
        generate_s = alone.stages["generation"] + alone.stages["reward"]
        shorter_s = min(generate_s, alone.wall_s - generate_s)
        overlaps.append((alone.wall_s - beside.wall_s) / shorter_s)
    yield "real, overlap: share of the shorter one that is saved", median(overlaps)


def shared(rounds: int) -> Iterator[tuple[str, float]]:
    """One process, and one prompt in 16 with answers 16 times longer: k = 1 against k = 0."""
    task = Task([400, *[25] * 15], prompts=16, samples=2, slots=256, pools=())
    pairs = [[run(task, staleness, 20).wall_s for staleness in (0, 1)] for _ in range(rounds)]
    yield "shared, k=1: time / that of k=0", median(beside / alone for alone, beside in pairs)


def repeat(rounds: int, task: Task, staleness: int, steps: int) -> float:
    """Seconds from update to update, the median of so many runs."""
    return median(run(task, staleness, steps).wall_s for _ in range(rounds))


PARTS = {"known": known, "tails": tails, "slots": slots, "real": real, "shared": shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse_arguments(parser, only=["known"], rounds=1)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for part in arguments.only:
        for name, figure in PARTS[part](arguments.rounds):
            figures[name] = round(figure, 3)
            print(f"{name}: {figure:.3f}", flush=True)
    print(json.dumps({"benchmark": "overlap", "figures": figures, "baseline": "k=0, and the law"}))


if __name__ == "__main__":
    main()
