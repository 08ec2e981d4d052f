"""What a run measured, by which predicted times are scaled."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.model_shape import read_shape
from tandem.planning.search import Plan

STAGES = {"generation": "time/generation_s", "preparation": "time/preparation_s", "update": "time/update_s"}
STAGES |= {"publish": "time/publish_s"}
_LENGTH = "response_length/mean"


@dataclass(frozen=True)
class MeasuredRun:
    """A run whose steps measured each stage."""

    directory: Path
    config: TrainConfig
    """Its own, which its times are predicted for."""
    steps: Sequence[Mapping[str, float]]

    @property
    def response_tokens(self) -> float | None:
        """Of an answer, on average. None: its metrics do not say."""
        found = [step[_LENGTH] for step in self.steps if _LENGTH in step]
        return median(found) if found else None

    def scales(self, predicted: Plan) -> dict[str, float]:
        """By stage, measured seconds in predicted ones, of this very run: medians."""
        seconds = dict(zip(STAGES, (*predicted.times, predicted.publish_s), strict=True))
        if predicted.beside:  # what is measured of generation there is the wait for it
            del seconds["generation"]
        found = {stage: [step[STAGES[stage]] for step in self.steps if STAGES[stage] in step] for stage in seconds}
        return {stage: median(times) / seconds[stage] for stage, times in found.items() if times and seconds[stage] > 0}


def read_run(run: Path, config: TrainConfig, card: str) -> MeasuredRun:
    """Raises UserError where the run in that directory has no step, trained a model of another size, with other
    engines, or on something else than GPUs of that kind."""
    theirs = load_config(TrainConfig, _file(run, "config.yaml"))
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
    own = theirs.model.model_copy(update={"path": config.model.path})
    steps = _steps(_file(run, "metrics.jsonl"))
    if not steps:
        raise UserError(f"--calibrate {run}: its metrics.jsonl has no step; give a run that has trained for one")
    return MeasuredRun(run, theirs.model_copy(update={"model": own}), steps[1:] or steps)


def factors(scales: Mapping[str, float]) -> str:
    """In words: what was measured in predictions."""
    return ", ".join(f"{stage} {scale:.3g} times as long" for stage, scale in scales.items())


def _file(run: Path, name: str) -> Path:
    if not (run / name).is_file():
        raise UserError(f"--calibrate {run}: it has no {name}; give the directory of a run")
    return run / name


def _check_card(run: Path, card: str) -> None:
    """By the first GPU that the run's environment.json names."""
    try:
        gpus = json.loads((run / "environment.json").read_text(encoding="utf-8"))["gpus"]
    except (OSError, ValueError, TypeError, KeyError):
        return
    if not gpus:
        raise UserError(f"--calibrate {run}: that run had no GPU, so its times say nothing of one; give a run on GPUs")
    named = str(gpus).partition(",")[0]
    if card.partition("-")[0] not in named.replace(" ", "").upper():
        raise UserError(f"--calibrate {run}: that run had {named}, this is planned for {card}; give --gpus of its kind")


def _steps(path: Path) -> list[Mapping[str, Any]]:
    """Those of a run that went back to an earlier one are lost."""
    steps: list[Mapping[str, Any]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            number = record["step"]
            while steps and steps[-1]["step"] >= number:
                steps.pop()
            steps += [record] if "time/step_s" in record else []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not the metrics of a run ({error}); give another to --calibrate") from None
    return steps
