"""What a run measured, by which predicted times are scaled."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.costs import BESIDE_THE_ACTOR, TO_OTHER_GPUS
from tandem.planning.hardware import CARDS
from tandem.planning.model_shape import read_shape
from tandem.planning.placement_search import Plan
from tandem.stored import read_json
from tandem.tracking.jsonl import read_metrics

STAGES: Sequence[str] = ("generation", "preparation", "update")
_LENGTH = "response_length/mean"
MEMORY_APART = 0.2
"""Cards of one name whose memory differs by a larger share are two."""


class _Environment(BaseModel):
    """What is read of a run's environment.json."""

    model_config = ConfigDict(strict=True, defer_build=True)

    gpus: str | None
    """A line a GPU, as nvidia-smi tells name and memory."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run whose steps measured each stage."""

    directory: Path
    config: TrainConfig
    """Its own, which its times are predicted for."""
    steps: Sequence[Mapping[str, Any]]
    taken_for_granted: str = ""

    @property
    def response_tokens(self) -> float | None:
        """Of an answer, on average. None: its metrics do not say."""
        found = self._measured(_LENGTH)
        return median(found) if found else None

    def scales(self, predicted: Plan) -> dict[str, float]:
        """By stage, measured seconds in predicted ones, of this very run: medians."""
        seconds: dict[str, float] = dict(zip(STAGES, predicted.times, strict=True))
        if predicted.beside:  # what is measured of generation there is the wait for it
            del seconds["generation"]
        measured = {stage: self._measured(f"time/{stage}_s") for stage in seconds}
        publish = BESIDE_THE_ACTOR if predicted.shares_actor else TO_OTHER_GPUS
        seconds[publish], measured[publish] = predicted.publish_s, self._measured("time/publish_s")
        return {
            stage: median(times) / seconds[stage] for stage, times in measured.items() if times and seconds[stage] > 0
        }

    def _measured(self, name: str) -> list[float]:
        return [step[name] for step in self.steps if isfinite(step.get(name, nan))]


def read_run(run: Path, config: TrainConfig, card: str) -> MeasuredRun:
    """Raises UserError where the run in that directory has no step, trained a model of another size, with other
    engines, or on something else than GPUs of that kind."""
    try:
        theirs = load_config(TrainConfig, _file(run, "config.yaml"))
    except UserError as error:
        raise UserError(f"--calibrate {run}: not a run of tandem train that this version knows: {error}") from None
    path = theirs.model.path
    if path != config.model.path and path.is_dir() and read_shape(path) != read_shape(config.model.path):
        raise UserError(
            f"--calibrate {run}: that run trained {path}, which is of another size than {config.model.path}; give a "
            "run of this model"
        )
    for key, there, here in (
        ("training.type", theirs.training.type, config.training.type),
        ("generation.type", theirs.generation.type, config.generation.type),
    ):
        if there != here:
            raise UserError(
                f"--calibrate {run}: that run had {key}: {there}, this configuration has {here}; give a run of the "
                "same engine"
            )
    _check_card(run, card)
    gone = "" if path.is_dir() else f"; its model {path} is not here, and is taken for one of this size"
    own = theirs.model.model_copy(update={"path": config.model.path})
    steps = [record for record in read_metrics(_file(run, "metrics.jsonl")) if "time/step_s" in record]
    if not steps:
        raise UserError(f"--calibrate {run}: its metrics.jsonl has no step; give a run that has trained for one")
    return MeasuredRun(run, theirs.model_copy(update={"model": own}), steps[1:] or steps, gone)


def factors(scales: Mapping[str, float]) -> str:
    """In words: what was measured in predictions."""
    return ", ".join(f"{stage} {scale:.3g} times as long" for stage, scale in scales.items())


def _file(run: Path, name: str) -> Path:
    if not (run / name).is_file():
        raise UserError(f"--calibrate {run}: it has no {name}; give the directory of a run")
    return run / name


def _check_card(run: Path, card: str) -> None:
    """By the first GPU that the run's environment.json names, where it has one."""
    if not (run / "environment.json").exists():
        return
    gpus = read_json(run / "environment.json", _Environment).gpus
    if not gpus:
        raise UserError(f"--calibrate {run}: that run had no GPU, so its times say nothing of one; give a run on GPUs")
    named, _, memory = gpus.splitlines()[0].partition(",")
    mib = re.match(r"\s*(\d+) MiB", memory)
    known = CARDS[card].memory_gib * 1024
    other_memory = mib is not None and abs(int(mib[1]) / known - 1) > MEMORY_APART
    if other_memory or not re.search(rf"\b{card.partition('-')[0]}\b", named.replace("RTX ", "RTX")):
        raise UserError(f"--calibrate {run}: that run had {named}, this is planned for {card}; give --gpus of its kind")
