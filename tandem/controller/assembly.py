"""Configuration -> the roles of a run: which models and engines there are, and how weights get to the engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.algorithms import Algorithm
from tandem.algorithms.base import Need
from tandem.checkpoint.fork import CRITIC, POLICY, Fork
from tandem.config.algorithms import MayHaveCriticConfig
from tandem.config.generation import GenerationConfig, default_memory_share
from tandem.config.judging import JudgeConfig
from tandem.config.model import ModelConfig
from tandem.config.tree import EvalConfig, ModelsConfig, RolloutConfig, SftConfig, TrainConfig, pictures_directory
from tandem.controller.admission import RolloutRules
from tandem.controller.judge import Judge, JudgeRewards, LocalJudge, ServedJudge
from tandem.controller.placement import Placement
from tandem.controller.pools import Role
from tandem.controller.reward_model import ModelRewards, Rewards
from tandem.controller.reward_reader import RewardReader, make_reward_reader
from tandem.controller.roles import (
    Actor,
    Critic,
    Model,
    MovingReference,
    Policy,
    ReferencePolicy,
    Rollout,
    Teacher,
    Trained,
    ValueModel,
    WithoutAdapters,
)
from tandem.controller.rollouts import RolloutProducer, Sharing
from tandem.controller.teacher import ServedTeacher
from tandem.controller.timesharing import Devices, DeviceTurns, SleepPhase, TimeSharing
from tandem.errors import UserError
from tandem.pictures.vlm_config import sees_pictures
from tandem.training.base import TopTokens
from tandem.types import Prompt
from tandem.workers.rollout import TRAIN, Ask, RolloutSpec, RolloutWorker, seeded_request
from tandem.workers.training import TrainSpec, TrainWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class ExperienceRoles:
    """Who makes scored answers."""

    rollout: Rollout
    reward: Rewards
    devices: Devices


@dataclass(slots=True)
class Roles:
    """Who does the work of a step. The algorithm's needs decide which of the optional ones exist."""

    experience: ExperienceRoles
    actor: Actor
    reference: ReferencePolicy | None = None
    critic: Critic | None = None
    teacher: Teacher | None = None

    @property
    def trained(self) -> dict[str, Trained]:
        """What a checkpoint holds with an optimizer, by its directory there; a moving reference is beside them."""
        return {POLICY: self.actor} if self.critic is None else {POLICY: self.actor, CRITIC: self.critic}

    def publish(self, version: int) -> None:
        """Make the rollout serve the actor's present weights as `version`, larger than every version before."""
        self.experience.devices.publish(version)


def make_roles(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    algorithm: Algorithm,
    total_steps: int,
    placement: Placement,
    reward: Rewards,
    fork: Fork | None = None,
) -> Roles:
    """The roles that the algorithm needs; the rollout serves version 0.

    `fork`: the checkpoint that trained models start from, in the place of the configuration's directories.
    """
    of_critics = {
        "model.critic_path": config.model.critic_path,
        "model.critic_lora": config.model.critic_lora,
        "algorithm.critic_warmup_steps": config.critic_warmup_steps,
    }
    for key, given in of_critics.items():
        if given and Need.VALUES not in algorithm.needs:
            raise UserError(f"{key}: {config.algorithm.type} needs no values, and has no critic; leave it out")
    starts: Mapping[str, Path] = fork.weights if fork else {}
    teacher: Teacher | None = make_served_teacher(config, tokenizer, placement.watch)
    optimizer_steps = total_steps * config.algorithm.epochs * config.algorithm.minibatches
    policy = _model_at(config.model, starts.get(POLICY, config.model.path))
    own_steps = (
        max(1, total_steps - config.critic_warmup_steps) * config.algorithm.epochs * config.algorithm.minibatches
    )
    actor = placement.group(Role.Actor, Actor, TrainWorker, replace(actor_spec(config, own_steps), model=policy))
    models: dict[Role, Model] = {Role.Actor: actor}
    reference = critic = None
    if Need.REF_LOGPROBS in algorithm.needs:
        frozen = replace(actor_spec(config), optimizer=None)
        moves = config.algorithm.kl.refresh_steps > 0
        reference = make_reference(frozen, actor, placement, starts_elsewhere=POLICY in starts, moves=moves)
        if isinstance(reference, Policy):
            models[Role.RefPolicy] = reference
    if teacher is None and {Need.TEACHER_LOGPROBS, Need.TEACHER_TOP_LOGPROBS} & algorithm.needs:
        teacher = models[Role.Teacher] = _make_teacher(config, tokenizer, placement)
    if Need.VALUES in algorithm.needs:
        models[Role.Critic] = critic = _make_critic(config, optimizer_steps, placement, starts)
    if fork is not None:
        _load_states(fork, {POLICY: actor, CRITIC: critic})

    def make_engines(memory_share: float) -> tuple[Rollout, Callable[[int], None]]:
        # The engine loads what the actor does: with adapters, only what these change is published.
        rollout = make_rollout(config.model_copy(update={"model": policy}), tokenizer, placement, memory_share)
        delta = config.generation.type != "native" and config.generation.sync.delta
        return rollout, connect(actor, rollout, placement, delta)

    whole = config.training.type == "fsdp" and placement.size(Role.Actor) == 1
    reader = make_reward_reader(config.model, tokenizer)
    experience = _make_experience_roles(config, placement, models, make_engines, reward, reader, whole)
    return Roles(experience, actor, reference, critic, teacher)


def make_reference(
    spec: TrainSpec, actor: Actor, placement: Placement, starts_elsewhere: bool, moves: bool = False
) -> ReferencePolicy:
    """The frozen model of `spec`: the actor without its adapters where these are all that tells the two apart.

    `starts_elsewhere`: the actor starts from other weights than the reference. `moves`: it follows the actor.
    """
    if moves:
        return placement.group(Role.RefPolicy, MovingReference, TrainWorker, spec)
    beside = placement.together(Role.Actor, Role.RefPolicy) and not placement.has_own_kind(Role.RefPolicy)
    if spec.model.lora is not None and beside and not starts_elsewhere:
        return WithoutAdapters(actor)
    return placement.group(Role.RefPolicy, Policy, TrainWorker, spec)


def make_experience_roles(
    config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, placement: Placement, reward: Rewards
) -> ExperienceRoles:
    """Scored answers of `model.path` as it is, without training."""

    def make_engines(memory_share: float) -> tuple[Rollout, Callable[[int], None]]:
        rollout = make_rollout(config, tokenizer, placement, memory_share)
        return rollout, lambda version: rollout.publish(version).get()

    reader = make_reward_reader(config.model, tokenizer)
    return _make_experience_roles(config, placement, {}, make_engines, reward, reader)


def _make_experience_roles(
    config: RolloutConfig,
    placement: Placement,
    models: Mapping[Role, Model],
    make_engines: Callable[[float], tuple[Rollout, Callable[[int], None]]],
    functions: Rewards,
    reader: RewardReader | None,
    whole_actor: bool = False,
) -> ExperienceRoles:
    """The engines with their rewards, on devices that they share with some of `models`; they serve version 0.

    `reader`: of a reward model with a tokenizer or chat template of its own.
    `whole_actor`: the actor is one model in one process, with which a native engine generates that is there, too.
    """
    sees = reader is None or reader.messages_by_ids
    reward_model, judge = make_reward_model(config, placement, sees), make_judge(config, placement)
    everyone = {**models, Role.RewardModel: reward_model} if reward_model is not None else models
    turns = turns_of(config.generation, placement, everyone, whole_actor)
    turns.make_room()
    rollout, fill = make_engines(default_memory_share(_beside_engines(placement, everyone), bool(turns.engine)))
    devices = TimeSharing(rollout, fill, turns)
    rewards, alone = functions, not config.reward.functions
    if judge is not None:
        assert isinstance(config, TrainConfig | EvalConfig), "other commands have no rewards"
        seed = config.seed if isinstance(config, EvalConfig) else config.trainer.seed
        rewards = JudgeRewards(judge, config.reward.judge or JudgeConfig(), rewards, alone=alone, seed=seed)
        alone = False
    if reward_model is not None:
        weight = config.reward.model_weight
        rewards = ModelRewards(reward_model, weight, rewards, devices, alone=alone, reader=reader)
    devices.publish(0)
    return ExperienceRoles(rollout, rewards, devices)


def turns_of(
    generation: GenerationConfig, placement: Placement, models: Mapping[Role, Model], whole_actor: bool = False
) -> DeviceTurns:
    """Who takes turns on devices, by who shares them. `whole_actor` as in `_make_experience_roles`."""
    beside = [role for role in models if placement.together(role, Role.Rollout)]
    phases: list[SleepPhase] = [_phase_of(role) for role in beside if generation.sleep != "never"]
    engine = frozenset(phases)
    stays = generation.type == "native" and whole_actor

    def from_engine(role: Role) -> Model | None:
        """The model, where it shares an engine's devices that takes turns."""
        return models.get(role) if engine and role in beside else None

    def from_anyone(role: Role) -> Model | None:
        if role not in models:  # nor, perhaps, in any pool
            return None
        shared = any(other != role and placement.together(role, other) for other in models)
        return models.get(role) if shared else from_engine(role)

    return DeviceTurns(
        engine,
        actor=None if stays else from_engine(Role.Actor),
        critic=from_engine(Role.Critic),
        reference=from_anyone(Role.RefPolicy),
        teacher=from_anyone(Role.Teacher),
        reward_model=from_anyone(Role.RewardModel),
    )


def _phase_of(role: Role) -> SleepPhase:
    """In which it computes."""
    return "scoring" if role is Role.RewardModel else "training"


def _beside_engines(placement: Placement, models: Iterable[Role]) -> bool:
    """Some of the models share the engines' devices."""
    return any(placement.together(role, Role.Rollout) for role in models)


def make_producer(
    config: TrainConfig,
    experience: ExperienceRoles,
    placement: Placement,
    prompt_of: Callable[[int], Prompt],
    total_steps: int,
    needs: frozenset[Need] = frozenset(),
    now: Callable[[], float] = time.perf_counter,
) -> RolloutProducer:
    """Scored groups for `total_steps` steps; `prompt_of`: the prompt of each draw. The engines serve version 0."""
    algorithm, size, with_greedy = config.algorithm, config.data.prompts_per_step, Need.GREEDY_REWARDS in needs

    def ask(draw: int) -> Ask:
        step, place = divmod(draw, size)
        seed = (config.trainer.seed, TRAIN, step + 1, place)
        return Ask(seeded_request(prompt_of(draw), algorithm.group_size, *seed), with_greedy)

    rules = RolloutRules(
        groups_per_step=size,
        samples_per_ask=algorithm.group_size + with_greedy,
        total_steps=total_steps,
        max_staleness=config.trainer.max_staleness,
        partial_rollouts=config.generation.partial_rollouts,
        balanced=config.generation.balanced,
        max_replaced=algorithm.resample_rounds * size,
        mask_truncated=algorithm.mask_truncated,
    )
    in_models = config.generation.type == "native" and placement.together(Role.Actor, Role.Rollout)
    return RolloutProducer(
        rules,
        experience.rollout,
        experience.reward,
        experience.devices,
        placement.watch,
        ask,
        sharing=Sharing.STANDS_STILL if in_models or experience.devices.engine_sleeps("training") else Sharing.GO_ON,
        timeout_s=config.cluster.timeout_s,
        now=now,
    )


def actor_spec(config: TrainConfig, optimizer_steps: int = 1) -> TrainSpec:
    """The policy in training, at the temperature that it is sampled at."""
    return TrainSpec(
        config.model,
        config.training,
        config.training.optimizer,
        total_steps=optimizer_steps,
        temperature=config.generation.temperature,
        pictures=pictures_of(config),
    )


def pictures_of(config: ModelsConfig, model: Path | None = None) -> Path | None:
    """Where the pictures of rows are stored, where the policy sees any, and so does `model`, if that is another one."""
    assert isinstance(config, TrainConfig | EvalConfig | SftConfig), "other commands have no rows"
    seen = sees_pictures(config.model.path) and (model is None or sees_pictures(model))
    return pictures_directory(config) if seen else None


def make_rollout(
    config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, placement: Placement, memory_share: float
) -> Rollout:
    """The generation engines; they serve nothing until a first `publish`. `memory_share` as in RolloutSpec."""
    spec = RolloutSpec(
        config.model,
        config.generation,
        tokenizer,
        config.conversation,
        memory_share,
        pictures_of(config),
        config.data.images,
    )
    return placement.group(Role.Rollout, Rollout, RolloutWorker, spec)


def make_reward_model(config: RolloutConfig, placement: Placement, sees: bool) -> ValueModel | None:
    """The frozen model of `model.reward_model_path`, if there is one. `sees`: it is shown the pictures of rows."""
    path = config.model.reward_model_path
    if path is None:
        return None
    spec = TrainSpec(
        _model_at(config.model, path),
        config.training,
        value_head=True,
        pictures=pictures_of(config, path) if sees else None,
        processor=config.model.path,
    )
    return placement.group(Role.RewardModel, ValueModel, TrainWorker, spec)


def make_judge(config: RolloutConfig, placement: Placement) -> Judge | None:
    """The judge of `model.judge_path` on engines of its own, or the one that is served, if there is one."""
    path, settings = config.model.judge_path, config.reward.judge or JudgeConfig()
    if settings.url is not None:
        return ServedJudge(settings, config.reward.timeout_s)
    if path is None:
        return None
    model = config.model.model_copy(update={"path": path, "lora": None, "chat_template": None})
    from tandem.models.loading import load_tokenizer

    spec = RolloutSpec(model, settings.generation, load_tokenizer(model), frozen=True)
    return LocalJudge(placement.group(Role.Judge, Rollout, RolloutWorker, spec), spec)


def connect(actor: Actor, rollout: Rollout, placement: Placement, delta: bool = False) -> Callable[[int], None]:
    """How the actor's weights get to the rollout: `publish(version)`. Between different pools they travel over a
    bridge; with `delta` it carries only what changed."""
    if placement.together(Role.Actor, Role.Rollout):
        return lambda version: rollout.publish(version).get()
    address = actor.open_bridge(placement.size(Role.Rollout), delta).get()
    joining = actor.join_bridge(address)
    rollout.join_bridge(address).get()
    joining.get()

    def publish(version: int) -> None:
        sending = actor.send_weights()
        rollout.publish(version).get()
        sending.get()

    return publish


def _make_critic(config: TrainConfig, optimizer_steps: int, placement: Placement, starts: Mapping[str, Path]) -> Critic:
    assert isinstance(config.algorithm, MayHaveCriticConfig)
    path = starts.get(CRITIC, config.model.critic_path or config.model.path)
    spec = TrainSpec(
        config.model.model_copy(update={"path": path, "lora": config.model.critic_lora}),
        config.training,
        config.algorithm.critic_optimizer,
        total_steps=optimizer_steps,
        value_head=True,
        pictures=pictures_of(config, path),
        processor=config.model.path,
    )
    return placement.group(Role.Critic, Critic, TrainWorker, spec)


def make_served_teacher(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, watch: Callable[[float], None]
) -> ServedTeacher | None:
    """The teacher of `algorithm.teacher`, if there is one. Raises UserError where it is none for this policy."""
    served = config.algorithm.served_teacher
    longest = config.data.max_prompt_tokens + config.generation.max_response_tokens
    return served and ServedTeacher(served, tokenizer, watch, config.algorithm.top_tokens, longest)


def _make_teacher(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, placement: Placement) -> Policy:
    """The frozen model of `model.teacher_path`, at the temperature that the student is sampled at."""
    path = config.model.teacher_path
    if path is None:
        raise UserError(f"{config.algorithm.type} learns from a teacher; give its directory as model.teacher_path")
    model = config.model.model_copy(update={"path": path, "lora": None})
    count = config.algorithm.top_tokens
    from tandem.models.loading import tokens_with_rows

    top = TopTokens(count, tokens_with_rows(config.model, tokenizer)) if count else None
    if top is not None and count > top.vocabulary:
        raise UserError(f"algorithm.top_k: {count}, but the tokenizer has {top.vocabulary} tokens; give fewer")
    spec = replace(
        actor_spec(config),
        model=model,
        optimizer=None,
        pictures=pictures_of(config, path),
        processor=config.model.path,
        top=top,
    )
    return placement.group(Role.Teacher, Policy, TrainWorker, spec)


def _load_states(fork: Fork, models: Mapping[str, Trained | None]) -> None:
    """Weights and optimizers of the models that the checkpoint has, before the first publish."""
    for name, model in models.items():
        if model is not None and name in fork.states:
            model.load(fork.states[name], new_schedule=True).get()


def _model_at(model: ModelConfig, path: Path) -> ModelConfig:
    return model.model_copy(update={"path": path})
