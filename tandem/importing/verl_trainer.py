"""The sections `trainer` and `tracking`, which all programs of verl have."""

from typing import Any

from tandem.config.counterparts import listed
from tandem.importing.outcome import Keys


def trainer_of(keys: Keys, epochs: int) -> dict[str, Any]:
    """Where the run is, and its length: `epochs`, where nothing is said."""
    name, directory = keys.take("trainer.experiment_name", "imported"), keys.take("trainer.default_local_dir")
    steps, epochs = keys.take("trainer.total_training_steps"), keys.take("trainer.total_epochs", epochs)
    return {"run_dir": directory or f"runs/{name}", **({"steps": steps} if steps else {"epochs": epochs})}


def tracked(keys: Keys) -> dict[str, Any]:
    """Of the loggers those that are there are known here."""
    from tandem.config.tracking import TrackingConfig

    wanted = listed(keys.take("trainer.logger", []))
    known: dict[str, Any] = {name: True for name in wanted if name in TrackingConfig.model_fields}
    if "wandb" in known and (project := keys.take("trainer.project_name")):
        known["wandb"] = {"project": project}
    return {"tracking": known} if known else {}
