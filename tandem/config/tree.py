"""The configurations of commands, made of sections; what several sections must keep together is in `rules/`."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from tandem.config.algorithms import AlgorithmConfig, MayHaveCriticConfig, PreferenceConfig
from tandem.config.base import MayChange, NonNegativeInt, Section
from tandem.config.cluster import ClusterConfig, LocalClusterConfig, PlacementConfig, RoleName
from tandem.config.conversation import ConversationConfig
from tandem.config.data import DataConfig, SftDataConfig
from tandem.config.generation import GenerationConfig, NativeGenerationConfig
from tandem.config.model import ModelConfig
from tandem.config.reward import RewardConfig
from tandem.config.tracking import TrackingConfig
from tandem.config.trainer import TrainerConfig
from tandem.config.training import FsdpTrainingConfig, TrainingConfig


class Tree(Section):
    """A whole configuration: that of one command."""

    NOT_READ: ClassVar[tuple[str, ...]] = ()
    """Sections that are left out where the configuration file has them."""
    WITHOUT_USE: ClassVar[tuple[str, ...]] = ()
    """Keys of its sections that the command would not read, and refuses therefore."""


class ServeConfig(Tree):
    """`tandem serve`: how requests are answered that say nothing of it, and by what."""

    WITHOUT_USE: ClassVar[tuple[str, ...]] = (
        "model.critic_path",
        "model.teacher_path",
        "model.reward_model_path",
        "model.judge_path",
        "model.lora",
        "model.critic_lora",
        "generation.eval",
        "generation.partial_rollouts",
        "generation.sleep",
        "generation.sync",
    )
    model: ModelConfig
    generation: GenerationConfig = NativeGenerationConfig()


class ModelsConfig(Tree):
    """What every command has that trains or evaluates models."""

    model: ModelConfig
    training: TrainingConfig = FsdpTrainingConfig()
    cluster: MayChange[ClusterConfig] = Field(default=LocalClusterConfig(), validate_default=True)

    def nodes_of(self, role: RoleName) -> list[int]:
        """Processes on each node of the role's pool."""
        return [self.cluster.ranks or 1]


class RunConfig(ModelsConfig):
    """What every training has."""

    trainer: TrainerConfig
    tracking: MayChange[TrackingConfig] = TrackingConfig()


class SftConfig(RunConfig):
    """`tandem sft`."""

    data: SftDataConfig


class RewardModelConfig(SftConfig):
    """`tandem reward-model`."""


class DpoConfig(SftConfig):
    """`tandem dpo`."""

    preference: PreferenceConfig = PreferenceConfig()


class RolloutConfig(ModelsConfig):
    """What every command has whose model answers prompts."""

    data: DataConfig
    generation: GenerationConfig = NativeGenerationConfig()
    conversation: ConversationConfig | None = None
    """Without it a prompt gets one answer."""
    reward: RewardConfig = RewardConfig()
    placement: MayChange[PlacementConfig] = Field(default=PlacementConfig(), validate_default=True)

    @property
    def judged_elsewhere(self) -> bool:
        """Something else than reward functions gives rewards."""
        model = self.model
        judged = self.reward.judge is not None or model.judge_path is not None
        return judged or model.reward_model_path is not None or self.conversation is not None

    def needs_reward(self, key: str) -> bool:
        """Whether a reward function must be there for the rows of a key of files, as `data.train_files`."""
        return not self.judged_elsewhere

    def nodes_of(self, role: RoleName) -> list[int]:
        pools = self.placement.pools
        if not pools:
            return super().nodes_of(role)
        return pools[self.placement.roles.get(role, next(iter(pools)))]


class EvalConfig(RolloutConfig):
    """`tandem eval`, which takes a configuration of `tandem train`, too."""

    NOT_READ: ClassVar[tuple[str, ...]] = ("algorithm", "trainer", "tracking")
    seed: NonNegativeInt = 0
    """Draws the answers, where `generation.eval.temperature` is not 0."""


class TrainConfig(RolloutConfig, RunConfig):
    """`tandem train` and `tandem check`."""

    algorithm: AlgorithmConfig = Field(default={"type": "grpo"}, validate_default=True)

    def needs_reward(self, key: str) -> bool:
        return super().needs_reward(key) and (key.startswith("data.val_") or self.algorithm.reads_rewards)

    @property
    def critic_warmup_steps(self) -> int:
        """Steps at the beginning in which the policy stays as it is."""
        return self.algorithm.critic_warmup_steps if isinstance(self.algorithm, MayHaveCriticConfig) else 0


def pictures_directory(config: TrainConfig | EvalConfig | SftConfig) -> Path:
    """Where the pictures of a run's rows are stored."""
    if config.data.images.directory is not None:
        return config.data.images.directory
    if isinstance(config, EvalConfig):
        return Path("~/.cache/tandem/pictures").expanduser()
    return config.trainer.run_dir / "pictures"
