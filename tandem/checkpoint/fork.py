"""A new run that starts from another run's checkpoint: `trainer.branch_from`.

Models go by their directory in a checkpoint: "." is the model that the command trains, "critic" is PPO's critic.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tandem.checkpoint.progress import Progress
from tandem.checkpoint.store import check_sound
from tandem.config.algorithms import MayHaveCriticConfig
from tandem.config.tree import RewardModelConfig, SftConfig, TrainConfig
from tandem.errors import UserError
from tandem.stored import DamagedFile, read_json

POLICY, CRITIC = ".", "critic"
_NAMES = {POLICY: "the model", CRITIC: "the critic"}


@dataclass(frozen=True, slots=True)
class Fork:
    """What the new run takes over. Steps, data, learning-rate schedules and the algorithm's own state start anew."""

    checkpoint: Path
    states: Mapping[str, Path]
    """The models whose weights and optimizers go on as `save` left them in these directories."""
    weights: Mapping[str, Path]
    """The models that start from these model directories with a new optimizer."""

    def describe(self, trained: Iterable[str]) -> str:
        """What becomes of the models that the new run trains."""
        parts: list[str] = []
        for name in trained:
            source = "weights of the configuration" if name == POLICY else "as model.critic_path says"
            source = "weights and optimizer" if name in self.states else source
            source = "weights, with a new optimizer" if name in self.weights else source
            parts.append(f"{_NAMES[name]}: {source}")
        return f"starting from {self.checkpoint} ({'; '.join(parts)})"

    def check_sound(self) -> None:
        """UserError when the checkpoint's files are not what was written; reads all of them."""
        check_sound(self.checkpoint, "give another checkpoint to trainer.branch_from")


def fork_of(config: TrainConfig | SftConfig) -> Fork | None:
    """What `trainer.branch_from` names; UserError when it is no checkpoint.

    Another `training.type` or type of optimizer cannot read the state, nor can whole training that of adapters, and the
    other way round, nor a reward model that of a policy: then the weights alone are taken over. A policy cannot
    begin as a reward model.
    """
    checkpoint = config.trainer.branch_from
    if checkpoint is None:
        return None
    try:
        saved = Progress.read(checkpoint)
    except UserError as error:
        mend = "give a run directory that has a checkpoint, or one of its checkpoints"
        raise UserError(f"trainer.branch_from: {error}; {mend}") from None
    holds_policy, trains_policy = _is_policy(checkpoint), not isinstance(config, RewardModelConfig)
    if trains_policy and not holds_policy:
        raise UserError(f"trainer.branch_from: {checkpoint} holds a reward model; give the checkpoint of a policy")
    adapters = {POLICY: config.model.lora, CRITIC: config.model.critic_lora}
    found = [name for name in (POLICY, CRITIC) if (checkpoint / name / "model").is_dir()]
    optimizers, same_kind = special_optimizers(config), saved.training == config.training.type
    states = {
        name: checkpoint / name
        for name in found
        if same_kind
        and holds_policy == trains_policy
        and (checkpoint / name / "adapter").is_dir() == (adapters[name] is not None)
        and saved.optimizers.get(name) == optimizers.get(name)
    }
    return Fork(checkpoint, states, {name: checkpoint / name / "model" for name in found if name not in states})


def special_optimizers(config: TrainConfig | SftConfig) -> dict[str, str]:
    """`Progress.optimizers` of a run."""
    chosen = {POLICY: config.training.optimizer}
    if isinstance(config, TrainConfig) and isinstance(config.algorithm, MayHaveCriticConfig):
        chosen[CRITIC] = config.algorithm.critic_optimizer
    return {name: optimizer.type for name, optimizer in chosen.items() if optimizer.type != "adamw"}


def _is_policy(checkpoint: Path) -> bool:
    """By its model's config.json: it has no head that scores."""
    try:
        described = read_json(checkpoint / "model" / "config.json", dict[str, Any])
    except DamagedFile:
        return True  # `check_sound` tells what is wrong with it
    names = described.get("architectures")
    return not (isinstance(names, list) and any("TokenClassification" in str(name) for name in cast(list[Any], names)))
