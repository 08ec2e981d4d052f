"""The configurations of commands, made of sections, and what several sections must keep together.

Each rule reads of the sections what it needs and no more, for of a configuration with mistakes it runs on what is
sound: a section, or a value, that was refused is not there to be read (`valid_part.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from tandem.config.algorithms import AlgorithmConfig, CriticConfig, OwnAlgorithmConfig, PreferenceConfig
from tandem.config.base import MayChange, NonNegativeInt, Section, rule
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


_OF_TRAIN: Mapping[str, str] = {
    "critic_path": "trains no critic",
    "teacher_path": "learns from no teacher",
    "reward_model_path": "scores nothing with a reward model",
    "judge_path": "asks no judge",
}
"""Models of `tandem train` -> why a command that trains on rows reads none."""


class SftConfig(RunConfig):
    """`tandem sft`."""

    data: SftDataConfig

    @rule("model")
    def _has_one_model(self) -> Iterator[str]:
        if self.model.critic_lora:
            yield "critic_lora: this command trains no critic; leave it out (adapters of its model are model.lora)"
        for name, use in _OF_TRAIN.items():
            if getattr(self.model, name):
                yield f"{name}: this command {use}; leave it out, or take tandem train (its model is model.path)"

    @rule("trainer")
    def _generates_nothing(self) -> Iterator[str]:
        if stale := self.trainer.max_staleness:
            yield f"max_staleness: {stale}, but this command generates no answers that could be stale; leave it out"


class RewardModelConfig(SftConfig):
    """`tandem reward-model`."""


class DpoConfig(SftConfig):
    """`tandem dpo`."""

    preference: PreferenceConfig = PreferenceConfig()

    @rule("preference")
    def _rows_to_mismatch(self) -> Iterator[str]:
        if self.preference.loss == "kto" and self.data.rows_per_step < 2:
            yield (
                "loss: kto estimates the KL from prompts with other rows' answers of the same step; "
                "give data.rows_per_step of 2 or more"
            )


class RolloutConfig(ModelsConfig):
    """What every command has whose model answers prompts."""

    data: DataConfig
    generation: GenerationConfig = NativeGenerationConfig()
    conversation: ConversationConfig | None = None
    """Without it a prompt gets one answer."""
    reward: RewardConfig = RewardConfig()
    placement: MayChange[PlacementConfig] = Field(default=PlacementConfig(), validate_default=True)

    @rule("generation")
    def _has_room_for_validation(self) -> Iterator[str]:
        most = self.generation.max_response_tokens
        for name, one in self.data.val_sets.items():
            if one.max_response_tokens is not None and one.max_response_tokens > most:
                yield (
                    f"max_response_tokens: {most:,}, for which engines have room, is less than "
                    f"data.val_sets.{name}.max_response_tokens: {one.max_response_tokens:,}; raise it"
                )

    @rule("placement")
    def _counts_processes_once(self) -> Iterator[str]:
        if self.placement.pools and self.cluster.ranks is not None:
            yield f"pools: say how many processes there are, so leave out cluster.ranks: {self.cluster.ranks}"

    @rule("placement")
    def _has_as_many_nodes(self) -> Iterator[str]:
        several = any(len(nodes) > 1 for nodes in self.placement.pools.values())
        if several and self.cluster.type == "local":
            yield "pools: cluster.type: local is one node; give each pool one number, or use ray"

    @rule("reward")
    def _has_one_judge(self) -> Iterator[str]:
        if self.reward.judge is None:
            return
        if self.reward.judge.url is not None and self.model.judge_path is not None:
            yield f"judge.url: {self.reward.judge.url}, but model.judge_path is a judge, too; give one of them"
        if self.reward.judge.url is None and self.model.judge_path is None:
            yield "judge: there is none; give its directory as model.judge_path, or a url"

    @rule("placement")
    def _judge_has_room(self) -> Iterator[str]:
        """Engines in processes of their own take a share of each device that nobody else has counted."""
        engine = self.reward.judge.generation.type if self.reward.judge else "native"
        shares = any(not self.placement.apart("judge", role) for role in ("actor", "rollout"))
        if self.model.judge_path and engine != "native" and shares:
            yield (
                f"roles: reward.judge.generation.type: {engine} takes devices of its own; give judge a pool in "
                "placement.roles, or use native"
            )

    @rule("placement")
    def _engine_keeps_its_weights(self) -> Iterator[str]:
        """While a reward model scores on the engine's devices the engine sleeps, and may have to answer again after."""
        drops_weights = self.generation.type != "native" and self.generation.sleep == "weights"
        if drops_weights and self.model.reward_model_path and not self.placement.apart("reward_model", "rollout"):
            yield (
                "roles: model.reward_model_path scores on the engine's devices, which must keep its weights meanwhile; "
                "set generation.sleep: cache, or place reward_model on a pool of its own"
            )

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

    @rule("algorithm")
    def _has_a_critic(self) -> Iterator[str]:
        if isinstance(self.algorithm, CriticConfig):
            return
        if self.model.critic_path:
            yield f"{self.algorithm.type} has no critic; remove model.critic_path or use algorithm.type: ppo"
        if self.model.critic_lora:
            yield f"{self.algorithm.type} has no critic; remove model.critic_lora or use algorithm.type: ppo"

    @rule("algorithm")
    def _shares_prompts(self) -> Iterator[str]:
        if self.data.prompts_per_step < self.algorithm.minibatches:
            prompts = f"data.prompts_per_step: {self.data.prompts_per_step}"
            yield f"minibatches: {self.algorithm.minibatches} cannot share {prompts}; lower it"

    @rule("algorithm")
    def _leaves_the_policy_steps(self) -> Iterator[str]:
        if isinstance(self.algorithm, CriticConfig) and self.trainer.steps:
            warmup, steps = self.algorithm.critic_warmup_steps, self.trainer.steps
            if warmup >= steps:
                yield f"critic_warmup_steps: {warmup} leaves the policy none of trainer.steps: {steps}"

    @rule("algorithm")
    def _has_a_reference_of_its_own(self) -> Iterator[str]:
        if self.algorithm.kl.refresh_steps and self.model.lora:
            refused = "with model.lora the reference is the policy without adapters, which nothing changes"
            yield f"kl.refresh_steps: {refused}, or leave it out"

    @rule("algorithm")
    def _copies_weights(self) -> Iterator[str]:
        if self.algorithm.kl.refresh_steps and self.training.type != "fsdp":
            refused = f"training.type: {self.training.type} cannot copy weights from the policy; use fsdp"
            yield f"kl.refresh_steps: {refused}, or leave it out"

    @rule("algorithm")
    def _has_its_reference_near(self) -> Iterator[str]:
        if self.algorithm.kl.refresh_steps and self.placement.apart("actor", "reference"):
            refused = "actor and reference are in different pools; place them in one"
            yield f"kl.refresh_steps: {refused}, or leave it out"

    @rule("algorithm")
    def _has_its_teacher(self) -> Iterator[str]:
        if isinstance(self.algorithm, OwnAlgorithmConfig):
            return
        served = self.algorithm.served_teacher
        if self.algorithm.has_teacher and served is None and self.model.teacher_path is None:
            yield (
                f"{self.algorithm.type} learns from a teacher; give its directory as model.teacher_path, or the "
                "section algorithm.teacher of a served one"
            )
        if served is not None and self.model.teacher_path:
            yield "teacher: model.teacher_path is another one; give one of them"
        if not self.algorithm.has_teacher and self.model.teacher_path:
            mend = "remove model.teacher_path or use algorithm.type: on_policy_distillation"
            yield f"{self.algorithm.type} has no teacher; {mend}"

    @rule("algorithm")
    def _asks_its_teacher_at_1(self) -> Iterator[str]:
        if self.algorithm.served_teacher is not None and self.generation.temperature != 1:
            yield (
                "teacher: servers tell log-probs at temperature 1, and the student's would be at "
                f"generation.temperature: {self.generation.temperature:g}; give 1, or a model.teacher_path"
            )

    @rule("algorithm")
    def _compares_distributions(self) -> Iterator[str]:
        if self.algorithm.top_tokens and self.training.type != "fsdp":
            yield f"top_k: training.type: {self.training.type} tells no distributions yet; use fsdp, or top_k: 0"

    @rule("algorithm")
    def _corrects_for_staleness(self) -> Iterator[str]:
        yield from self.algorithm.find_stale_mistakes(self.trainer.max_staleness)

    def needs_reward(self, key: str) -> bool:
        return super().needs_reward(key) and (key.startswith("data.val_") or self.algorithm.reads_rewards)

    @property
    def critic_warmup_steps(self) -> int:
        """Steps at the beginning in which the policy stays as it is."""
        return self.algorithm.critic_warmup_steps if isinstance(self.algorithm, CriticConfig) else 0


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
