"""The speeds and lengths of a run, from what it has recorded of itself.

    RUN/trajectories  --how long which answers took--> EngineSpeed, lengths of whole groups
    RUN/metrics.jsonl --time/*_s of the steps------->  training, publishing, scoring, the controller

The time of a group on an engine is linear in the engine's speeds, for which rows decode side by side does not depend on
them: least squares finds them, where what was under way is known. That is so with `trainer.max_staleness: 0`, where all
answers of a step begin together, an even share on each engine.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.config.generation import GenerationConfig, NativeGenerationConfig
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.simulation.continuous_batching import Decoding, SimulatedAnswers
from tandem.simulation.lengths import GroupLengths
from tandem.simulation.speeds import DEFAULT_MAX_RUNNING, EngineSpeed, Speeds
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import files_by_step, read_trajectories, reading_trajectories

Values = np.ndarray[Any, Any]
_FILES = 50
"""Steps that are read, the last ones."""
_TRAINING = ("time/preparation_s", "time/advantages_s", "time/update_s")
_WAITING = ("time/generation_s", "time/reward_s")
_NEEDED = (*_TRAINING, *_WAITING, "time/step_s", "time/publish_s", "perf/tokens")
"""Of each step that is read."""
_UNITS = (EngineSpeed(1.0), EngineSpeed(0.0, 1.0), EngineSpeed(0.0, 0.0, 1.0), EngineSpeed(0.0, 0.0, 0.0, 1.0))


class Measured(NamedTuple):
    """What a run shows."""

    speeds: Speeds
    groups: list[GroupLengths]
    """All that were read."""
    training_ranks: int
    steps: int
    """How many were read."""
    config: TrainConfig
    step_s: float
    """How long they took, the median."""
    rows: int
    """The most that an engine may have decoded side by side."""


class _Step(NamedTuple):
    groups: list[GroupLengths]
    """In the order of the prompts."""
    seconds: list[float]
    """Until the last answer of each was complete."""


def measure(run: Path, max_running: int = DEFAULT_MAX_RUNNING) -> Measured:
    """Raises UserError where the run does not show its speeds."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"--from {run}: there is no run (no config.yaml)")
    config = load_config(TrainConfig, run / "config.yaml")
    if config.trainer.max_staleness:
        raise UserError(
            f"--from {run}: it has trainer.max_staleness: {config.trainer.max_staleness}; speeds are seen in a run "
            "with 0, where what an engine has under way is known"
        )
    if config.conversation is not None:
        raise UserError(
            f"--from {run}: its answers are conversations, whose waits for tools, users and worlds would be taken for "
            "time of the engine's; give a run without the section `conversation`, or --iteration-ms, --train-s and "
            "--response-tokens"
        )
    records = {record["step"]: record for record in read_metrics(run / "metrics.jsonl") if _is_timed(record)}
    files = files_by_step(run / "trajectories")
    steps = _steps_to_read(run, records, files)
    read = [_read(files[step]) for step in steps]
    taken = [records[step] for step in steps]
    generation = config.generation
    places = generation.max_running if isinstance(generation, NativeGenerationConfig) else max_running
    engines = engines_on(generation, sum(config.nodes_of("rollout")))
    speeds = Speeds(
        _engine_speed(read, engines, places, padded=isinstance(generation, NativeGenerationConfig)),
        *_training_speed(taken),
        publish_s=_median(record["time/publish_s"] for record in taken),
        reward_s=_median(
            max(0.0, sum(record[name] for name in _WAITING) - max(step.seconds))
            for step, record in zip(read, taken, strict=True)
        ),
        controller_s=_median(max(0.0, _unaccounted(record)) for record in taken),
    )
    groups = [group for step in read for group in step.groups]
    asked = -(-config.data.prompts_per_step // engines) * config.algorithm.group_size
    step_s = _median(record["time/step_s"] for record in taken)
    return Measured(speeds, groups, sum(config.nodes_of("actor")), len(steps), config, step_s, rows=min(asked, places))


def _is_timed(record: Mapping[str, float]) -> bool:
    return all(math.isfinite(record.get(name, math.nan)) for name in _NEEDED)


def _steps_to_read(run: Path, records: Mapping[int, dict[str, Any]], files: Iterable[int]) -> list[int]:
    """The last ones in which all answers began together, so without those of dynamic sampling's further rounds."""
    recorded = [step for step in files if step in records and step > 1]  # the first warms up
    if len(recorded) < 3:
        raise UserError(
            f"--from {run}: {len(recorded)} steps after the first have metrics and a file of trajectories; at least 3 "
            "are needed (trainer.trajectories_every: 1)"
        )
    steps = [step for step in recorded if not records[step].get("rollout/resample/replaced")]
    if len(steps) < 3:
        raise UserError(
            f"--from {run}: dynamic sampling replaced groups in all but {len(steps)} of {len(recorded)} steps, and "
            "speeds are seen in steps whose answers begin together; give a run with algorithm.resample_rounds: 0"
        )
    return steps[-_FILES:]


def engines_on(generation: GenerationConfig, ranks: int) -> int:
    """Engines of a pool; several devices may share one."""
    return ranks if isinstance(generation, NativeGenerationConfig) else max(1, ranks // generation.tensor_parallel)


def _read(path: Path) -> _Step:
    """Raises UserError where it is no file of trajectories, or one of an earlier version."""
    with reading_trajectories(path):
        table = read_trajectories(path, ["group", "branch", "response_ids", "prompt_ids", "generation_s"])
        if "branch" not in table.column_names:
            raise UserError(f"--from: {path} is of an earlier version of tandem; give a run of this one")
        return _step_of(table)


def _step_of(table: Any) -> _Step:
    firsts = np.flatnonzero(table["branch"].to_numpy() == 0)
    if not len(firsts):
        raise ValueError("it holds no trajectory")
    responses, prompts = (np.array([len(ids) for ids in table[name]]) for name in ("response_ids", "prompt_ids"))
    numbers, prompts, seconds = (
        table["group"].to_numpy()[firsts],
        prompts[firsts],
        table["generation_s"].to_numpy()[firsts],
    )
    responses = np.add.reduceat(responses, firsts)
    rows_of_groups = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
    return _Step(
        [(np.maximum(responses[rows], 1.0).tolist(), int(prompts[rows[0]])) for rows in rows_of_groups],
        [float(seconds[rows].max()) for rows in rows_of_groups],
    )


def _engine_speed(steps: Sequence[_Step], engines: int, max_running: int, padded: bool) -> EngineSpeed:
    """From the times between one group's end and the next one's: what slows an engine down once is in one of them."""
    units: list[Values] = []
    seconds: list[Values] = []
    for step in steps:
        for share in np.array_split(np.arange(len(step.groups)), engines):
            done = _units([step.groups[number] for number in share.tolist()], max_running, padded)
            order = np.argsort(done[:, 0], kind="stable")
            units.append(np.diff(done[order], axis=0, prepend=0.0))
            seconds.append(np.diff(np.array(step.seconds)[share][order], prepend=0.0))
    return EngineSpeed(*_least_squares(np.concatenate(units), np.concatenate(seconds)).tolist())


def _units(groups: Sequence[GroupLengths], max_running: int, padded: bool) -> Values:
    """`[groups, speeds]`: what the engine had done, until the group was complete, that each speed is a time of."""
    ends: list[list[float]] = []
    for unit in _UNITS:
        decoding = Decoding(unit, max_running, padded)
        answers = [SimulatedAnswers(number, tokens, lengths) for number, (lengths, tokens) in enumerate(groups)]
        for one in answers:
            decoding.add(one)
        decoding.run(np.inf)
        ends.append([one.ended_at for one in answers])
    return np.transpose(ends)


def _training_speed(records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Seconds a step, and a token."""
    tokens = np.array([record["perf/tokens"] for record in records])
    seconds = np.array([sum(record[name] for name in _TRAINING) for record in records])
    step_s, token_s = _least_squares(np.stack([np.ones_like(tokens), tokens], axis=1), seconds).tolist()
    return step_s, token_s


def _unaccounted(record: dict[str, Any]) -> float:
    return record["time/step_s"] - sum(record[name] for name in (*_TRAINING, *_WAITING, "time/publish_s"))


def _median(values: Any) -> float:
    return float(np.median(list(values)))


def _least_squares(columns: Values, wanted: Values) -> Values:
    """Factors, none negative, of the columns; again without what is far off, as a step is that was disturbed."""
    factors = _not_negative(columns, wanted)
    off = np.abs(columns @ factors - wanted)
    near = off <= 4 * np.median(off)
    return _not_negative(columns[near], wanted[near])


def _not_negative(columns: Values, wanted: Values) -> Values:
    """The best of all choices of columns whose factors are not negative."""
    count, best, least = columns.shape[1], np.zeros(columns.shape[1]), np.inf
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            found = np.linalg.lstsq(columns[:, chosen] / scale[chosen], wanted, rcond=None)[0]
            error = float(np.square(columns[:, chosen] / scale[chosen] @ found - wanted).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                least, best = error, np.zeros(count)
                best[chosen] = found / scale[chosen]
    return best


def on_other_ranks(speeds: Speeds, measured: int, ranks: int) -> Speeds:
    """Training a token takes as much less as there are more ranks."""
    return replace(speeds, train_token_s=speeds.train_token_s * measured / ranks)
