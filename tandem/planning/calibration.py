"""What a run measured, by which predicted times are scaled."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from tandem.config import yaml12
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.model_shape import read_shape
from tandem.planning.search import Plan


def check_same_model(run: Path, config: TrainConfig) -> None:
    """Raises UserError where the run in that directory trained another model, in another way, or without a GPU."""
    path = run / "config.yaml"
    try:
        theirs = yaml12.read(path.read_text(encoding="utf-8"))
        model, training = Path(theirs["model"]["path"]), theirs.get("training", {}).get("type", "fsdp")
    except (OSError, ValueError, TypeError, KeyError, yaml12.YAMLError) as error:
        raise UserError(f"--calibrate {run}: {path} cannot be read ({error}); give the directory of a run") from None
    if model != config.model.path and model.is_dir() and read_shape(model) != read_shape(config.model.path):
        raise UserError(
            f"--calibrate {run}: that run trained {model}, which is of another size than {config.model.path}; give a "
            "run of this model"
        )
    if training != config.training.type:
        raise UserError(
            f"--calibrate {run}: that run had training.type: {training}, this configuration has "
            f"{config.training.type}; give a run of the same engine"
        )
    if gpus_of(run) == "":
        raise UserError(f"--calibrate {run}: that run had no GPU, so its times say nothing of one; give a run on GPUs")


def gpus_of(run: Path) -> str | None:
    """The first GPU that the run's environment.json names, empty if there was none. None: it cannot be read."""
    try:
        gpus = json.loads((run / "environment.json").read_text(encoding="utf-8"))["gpus"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return str(gpus or "").partition(",")[0]


STAGES = {"generation": "time/generation_s", "preparation": "time/preparation_s", "update": "time/update_s"}
STAGES |= {"publish": "time/publish_s"}


def measured_scales(run: Path, predicted: Plan) -> dict[str, float]:
    """By stage, measured seconds in predicted ones: the median of the steps after the first, or the first.

    Raises UserError where `run` has no metrics.
    """
    path = run / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--calibrate {run}: {path} cannot be read ({error}); give the directory of a run") from None
    steps = [record for record in records if "time/step_s" in record]
    if not steps:
        raise UserError(f"--calibrate {run}: {path} has no step; give a run that has trained for one at least")
    seconds = dict(zip(STAGES, (*predicted.times, predicted.publish_s), strict=True))
    if predicted.beside:  # what is measured of generation there is the wait for it
        del seconds["generation"]
    found = {stage: [step[STAGES[stage]] for step in steps[1:] or steps if STAGES[stage] in step] for stage in seconds}
    return {stage: median(times) / seconds[stage] for stage, times in found.items() if times and seconds[stage] > 0}


def factors(scales: Mapping[str, float]) -> str:
    """In words: what was measured in predictions."""
    return ", ".join(f"{stage} {scale:.3g} times as long" for stage, scale in scales.items())
