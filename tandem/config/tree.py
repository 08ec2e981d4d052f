"""The configurations of commands, made of sections; validators raise, and rewrite paths alone."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from tandem.config.algorithms import AlgorithmConfig, CriticConfig, OwnAlgorithmConfig, PreferenceConfig
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

    @field_validator("trainer")
    @classmethod
    def _generates_nothing(cls, trainer: TrainerConfig) -> TrainerConfig:
        if trainer.max_staleness:
            raise ValueError(
                f"max_staleness: {trainer.max_staleness}, but this command generates no answers that could be stale; "
                "leave it out"
            )
        return trainer


class RewardModelConfig(SftConfig):
    """`tandem reward-model`."""


class DpoConfig(SftConfig):
    """`tandem dpo`."""

    preference: PreferenceConfig = PreferenceConfig()

    @field_validator("preference")
    @classmethod
    def _rows_to_mismatch(cls, preference: PreferenceConfig, info: ValidationInfo) -> PreferenceConfig:
        data = info.data.get("data")  # None where unsound
        if preference.loss == "kto" and data is not None and data.rows_per_step < 2:
            raise ValueError(
                "loss: kto estimates the KL from prompts with other rows' answers of the same step; "
                "give data.rows_per_step of 2 or more"
            )
        return preference


class RolloutConfig(ModelsConfig):
    """What every command has whose model answers prompts."""

    data: DataConfig
    generation: GenerationConfig = NativeGenerationConfig()
    conversation: ConversationConfig | None = None
    """Without it a prompt gets one answer."""
    reward: RewardConfig = RewardConfig()
    placement: MayChange[PlacementConfig] = Field(default=PlacementConfig(), validate_default=True)

    @field_validator("generation")
    @classmethod
    def _has_room_for_validation(cls, generation: GenerationConfig, info: ValidationInfo) -> GenerationConfig:
        data: DataConfig | None = info.data.get("data")  # None where unsound
        most = generation.max_response_tokens
        for name, one in (data.val_sets if data else {}).items():
            if one.max_response_tokens is not None and one.max_response_tokens > most:
                raise ValueError(
                    f"max_response_tokens: {most:,}, for which engines have room, is less than "
                    f"data.val_sets.{name}.max_response_tokens: {one.max_response_tokens:,}; raise it"
                )
        return generation

    @field_validator("placement")
    @classmethod
    def _fits_cluster(cls, placement: PlacementConfig, info: ValidationInfo) -> PlacementConfig:
        cluster = info.data.get("cluster")  # None where unsound
        if cluster and placement.pools:
            if cluster.ranks is not None:
                raise ValueError(
                    f"pools: say how many processes there are, so leave out cluster.ranks: {cluster.ranks}"
                )
            if cluster.type == "local" and any(len(nodes) > 1 for nodes in placement.pools.values()):
                raise ValueError("pools: cluster.type: local is one node; give each pool one number, or use ray")
        return placement

    @field_validator("reward")
    @classmethod
    def _has_one_judge(cls, reward: RewardConfig, info: ValidationInfo) -> RewardConfig:
        model = info.data.get("model")  # None where unsound
        if model is None or reward.judge is None:
            return reward
        if model.judge_path and reward.judge.url:
            raise ValueError(f"judge.url: {reward.judge.url}, but model.judge_path is a judge, too; give one of them")
        if not model.judge_path and not reward.judge.url:
            raise ValueError("judge: there is none; give its directory as model.judge_path, or a url")
        return reward

    @field_validator("placement")
    @classmethod
    def _judge_has_room(cls, placement: PlacementConfig, info: ValidationInfo) -> PlacementConfig:
        """Engines in processes of their own take a share of each device that nobody else has counted."""
        model, reward = info.data.get("model"), info.data.get("reward")  # None where unsound
        engine = reward.judge.generation.type if reward and reward.judge else "native"
        first = next(iter(placement.pools), "")
        roles: tuple[RoleName, ...] = ("actor", "rollout")
        shares = placement.roles.get("judge", first) in {placement.roles.get(role, first) for role in roles}
        if model and model.judge_path and engine != "native" and shares:
            raise ValueError(
                f"roles: reward.judge.generation.type: {engine} takes devices of its own; give judge a pool in "
                "placement.roles, or use native"
            )
        return placement

    @property
    def judged_elsewhere(self) -> bool:
        """Something else than reward functions gives rewards."""
        model = self.model
        judged = self.reward.judge is not None or model.judge_path is not None
        return judged or model.reward_model_path is not None or self.conversation is not None

    @field_validator("placement")
    @classmethod
    def _engine_keeps_its_weights(cls, placement: PlacementConfig, info: ValidationInfo) -> PlacementConfig:
        """While a reward model scores on the engine's devices the engine sleeps, and may have to answer again after."""
        model, generation = info.data.get("model"), info.data.get("generation")  # None where unsound
        drops_weights = generation and generation.type != "native" and generation.sleep == "weights"
        first_pool = next(iter(placement.pools), "")
        shared = placement.roles.get("reward_model", first_pool) == placement.roles.get("rollout", first_pool)
        if model and model.reward_model_path and drops_weights and shared:
            raise ValueError(
                "roles: model.reward_model_path scores on the engine's devices, which must keep its weights meanwhile; "
                "set generation.sleep: cache, or place reward_model on a pool of its own"
            )
        return placement

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

    @field_validator("algorithm")
    @classmethod
    def _fits(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        model, data = info.data.get("model"), info.data.get("data")  # None where unsound
        if model and model.critic_path and not isinstance(algorithm, CriticConfig):
            raise ValueError(f"{algorithm.type} has no critic; remove model.critic_path or use algorithm.type: ppo")
        if data and data.prompts_per_step < algorithm.minibatches:
            prompts = f"data.prompts_per_step: {data.prompts_per_step}"
            raise ValueError(f"minibatches: {algorithm.minibatches} cannot share {prompts}; lower it")
        trainer = info.data.get("trainer")
        if isinstance(algorithm, CriticConfig) and trainer and trainer.steps:
            warmup, steps = algorithm.critic_warmup_steps, trainer.steps
            if warmup >= steps:
                raise ValueError(f"critic_warmup_steps: {warmup} leaves the policy none of trainer.steps: {steps}")
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _can_refresh_its_reference(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        if not algorithm.kl.refresh_steps:
            return algorithm
        model, training, placement = (info.data.get(key) for key in ("model", "training", "placement"))
        refused = None  # sections are None where unsound
        if model and model.lora:
            refused = "with model.lora the reference is the policy without adapters, which nothing changes"
        elif training and training.type != "fsdp":
            refused = f"training.type: {training.type} cannot copy weights from the policy; use fsdp"
        elif placement and placement.apart("actor", "reference"):
            refused = "actor and reference are in different pools; place them in one"
        if refused:
            raise ValueError(f"kl.refresh_steps: {refused}, or leave it out")
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _has_its_teacher(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        model = info.data.get("model")  # None where unsound
        if model is None or isinstance(algorithm, OwnAlgorithmConfig):
            return algorithm
        served = algorithm.served_teacher
        if algorithm.has_teacher and model.teacher_path is None and served is None:
            raise ValueError(
                f"{algorithm.type} learns from a teacher; give its directory as model.teacher_path, or the section "
                "algorithm.teacher of a served one"
            )
        if served is not None and model.teacher_path:
            raise ValueError("teacher: model.teacher_path is another one; give one of them")
        if model.teacher_path and not algorithm.has_teacher:
            mend = "remove model.teacher_path or use algorithm.type: on_policy_distillation"
            raise ValueError(f"{algorithm.type} has no teacher; {mend}")
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _can_ask_its_teacher(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        generation, training = info.data.get("generation"), info.data.get("training")  # None where unsound
        if algorithm.served_teacher is not None and generation and generation.temperature != 1:
            raise ValueError(
                "teacher: servers tell log-probs at temperature 1, and the student's would be at "
                f"generation.temperature: {generation.temperature:g}; give 1, or a model.teacher_path"
            )
        if algorithm.top_tokens and training and training.type != "fsdp":
            raise ValueError(f"top_k: training.type: {training.type} tells no distributions yet; use fsdp, or top_k: 0")
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _corrects_for_staleness(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        if trainer := info.data.get("trainer"):  # None where unsound
            algorithm.check_staleness(trainer.max_staleness)
        return algorithm

    @property
    def critic_warmup_steps(self) -> int:
        """Steps at the beginning in which the policy stays as it is."""
        return self.algorithm.critic_warmup_steps if isinstance(self.algorithm, CriticConfig) else 0

    @property
    def takes_engine_logprobs(self) -> bool:
        """The generation engine's log-probs stand in for those of the old policy, so that the ratio of the loss is to
        the policy that drew each token, whatever its version."""
        return self.algorithm.rollout_correction.takes_engine_logprobs(self.trainer.max_staleness)


def pictures_directory(config: TrainConfig | EvalConfig | SftConfig) -> Path:
    """Where the pictures of a run's rows are stored."""
    if config.data.images.directory is not None:
        return config.data.images.directory
    if isinstance(config, EvalConfig):
        return Path("~/.cache/tandem/pictures").expanduser()
    return config.trainer.run_dir / "pictures"


def has_critic(config: Any) -> bool:
    """As far as a configuration shows it: what an algorithm of the user's own needs is known when its class is."""
    if not isinstance(config, TrainConfig):
        return False
    return isinstance(config.algorithm, CriticConfig) and not isinstance(config.algorithm, OwnAlgorithmConfig)
