"""The sections `trainer` and `tracking`, which all programs of verl have."""

from typing import Any

from tandem.importing.outcome import Keys, listed, parsed, put, whole


def trainer_of(keys: Keys, epochs: int) -> dict[str, Any]:
    """`epochs`: how many there are where nothing is said."""
    name = keys.take("trainer.experiment_name", "trainer.run_dir", "imported")
    directory = keys.take("trainer.default_local_dir", "trainer.run_dir", None)
    trainer: dict[str, Any] = {"run_dir": directory or f"runs/{name}"}
    steps = keys.take("trainer.total_training_steps", "trainer.steps")
    epochs = keys.take("trainer.total_epochs", "trainer.epochs", epochs)
    trainer |= {"steps": steps} if steps else {"epochs": epochs}
    for key, ours, default in (("save_freq", "save_every", -1), ("test_freq", "eval_every", -1)):
        every = keys.take(f"trainer.{key}", f"trainer.{ours}", default)
        put(trainer, ours, every if whole(every) > 0 else 0, default=0)
    kept = keys.take("trainer.max_ckpt_to_keep", "trainer.keep_last")
    put(trainer, "keep_last", keys.take("trainer.max_actor_ckpt_to_keep", "trainer.keep_last", kept), default=None)
    seed = keys.take("trainer.seed", "trainer.seed")
    put(trainer, "seed", keys.take("data.seed", "trainer.seed", seed), default=None)
    return trainer


def list_of(given: Any) -> Any:
    """A list, which scripts also give as a text between quotes."""
    return parsed(given) if isinstance(given, str) else given


def tracked(keys: Keys) -> dict[str, Any]:
    """Of the loggers those that are there are known here."""
    from tandem.config.tracking import TrackingConfig

    wanted = listed(keys.take("trainer.logger", "tracking", []))
    known: dict[str, Any] = {name: True for name in wanted if name in TrackingConfig.model_fields}
    if "wandb" in known and (project := keys.take("trainer.project_name", "tracking.wandb.project")):
        known["wandb"] = {"project": project}
    return {"tracking": known} if known else {}
