"""A configuration -> what each process holds in each phase of a step: roles by pool, and whose turn the devices are.

Who shares a process with whom is `controller/placement.py`'s, who is where in which phase
`controller/timesharing.py`'s.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tandem.config.algorithms import MayHaveCriticConfig
from tandem.config.cluster import RoleName
from tandem.config.generation import NativeGenerationConfig
from tandem.config.optimizer import OptimizerConfig
from tandem.config.roles import model_roles
from tandem.config.training import FsdpTrainingConfig, MegatronTrainingConfig
from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.errors import UserError
from tandem.planning import fsdp_memory, megatron_memory
from tandem.planning.fsdp_memory import (
    FsdpSizes,
    Memory,
    ModelPhase,
    copied_for_checkpoint,
    features_on_host,
    kept_on_host,
    pixels_on_host,
)
from tandem.planning.generation_memory import judge_memory, native_memory, replica_memory
from tandem.planning.megatron_memory import MegatronSizes
from tandem.planning.model_shape import ModelShape, read_shape
from tandem.planning.planned import Planned, adapters_of, item_bytes, learning_roles, longest_row

CONTEXT_BYTES = 2**30
"""Of a process's CUDA context and its libraries' workspaces: an allowance, for nobody has measured it here."""
NCCL_BYTES = 2**29
"""The same of its process groups, where it has several ranks."""
SLACK = 0.05
"""Share of all tensors that an allocator needs besides, for gaps between blocks."""

LoopPhase = Literal["generation", "scoring", "preparation", "update", "publish"]
"""Of a step, as `controller/timesharing.py` has them."""
_LOOP_PHASE_OF: Mapping[ModelPhase, LoopPhase] = {
    "forward": "preparation",
    "backward": "update",
    "step": "update",
    "publish": "publish",
}
_ELSEWHERE: Mapping[RoleName, tuple[LoopPhase, ...]] = {
    "actor": ("generation", "scoring"),
    "critic": ("generation", "scoring", "publish"),
    "reference": ("generation", "scoring", "update", "publish"),
    "teacher": ("generation", "scoring", "update", "publish"),
    "reward_model": ("generation", "preparation", "update", "publish"),
}
"""Phases of the loop in which a role that takes turns is in host memory."""


ModelSizes = FsdpSizes | MegatronSizes
"""Of either backend."""
_Models = Mapping[RoleName, ModelSizes]


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """What a process of a pool holds at most, in one phase of a role."""

    pool: str
    processes: int
    role: str
    phase: ModelPhase
    memory: Memory
    """Of all roles of the process together."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What a process of a pool keeps in host memory beside the program itself; bytes."""

    pool: str
    processes: int
    """On one node, at most, as far as the configuration says it."""
    models: int
    """What waits for its turn on the devices, at most, and what `cpu_offload` and `optimizer_offload` keep there."""
    copies: int
    """Of what learns, for checkpoints."""
    pictures: int
    """What vision towers take of the pictures that they saw last: a role's tower, and that of a native engine."""

    @property
    def total(self) -> int:
        return self.models + self.copies + self.pictures


@dataclass(frozen=True, slots=True)
class _Pool:
    name: str
    ranks: int
    models: _Models
    """Roles that train or score, in the order in which they are made."""
    generates: bool
    judge: ModelShape | None = None
    """Of the language model that judges answers here."""


def phase_peaks(config: Planned, card_bytes: int) -> list[PhasePeak]:
    """The phases of a step, pool by pool. UserError where planning does not know a model."""
    if mistakes := list(find_shape_mistakes(config)):
        raise UserError("; ".join(mistakes))
    shapes: dict[RoleName, ModelShape] = {role: read_shape(path) for role, path in model_roles(config)}
    policy = next(iter(shapes.values()))
    return [peak for pool in _pools(config, shapes) for peak in _of_pool(config, pool, policy, card_bytes)]


def not_counted(config: Planned) -> Iterator[str]:
    """What the numbers do not have in them, a line each."""
    if isinstance(config, TrainConfig) and config.model.reward_model_path is not None:
        yield (
            "not counted: tokens that a reward model with a tokenizer or chat template of its own reads beyond those "
            "of the policy, whose rows it is taken to score"
        )
    if config.data.images.max_image_tokens is None and any(read_shape(path).tower for _, path in model_roles(config)):
        yield (
            "not counted: what pictures take while the vision tower sees them, for nobody says how many tokens they "
            "take of a row; give data.images.max_image_tokens (`tandem data show CONFIG` prints what a row takes)"
        )


def hosts(config: Planned) -> list[HostMemory]:
    """Host memory by pool, of those that keep models there."""
    shapes: dict[RoleName, ModelShape] = {role: read_shape(path) for role, path in model_roles(config)}
    return [_host(config, pool) for pool in _pools(config, shapes) if pool.models]


def _host(config: Planned, pool: _Pool) -> HostMemory:
    away: dict[RoleName, int] = {role: _waiting(pool.models[role]) for role in _leaving(config, pool)}
    loop_phases: tuple[LoopPhase, ...] = get_args(LoopPhase)
    waiting = (sum(size for role, size in away.items() if phase in _ELSEWHERE[role]) for phase in loop_phases)
    of_fsdp = [sizes for sizes in pool.models.values() if isinstance(sizes, FsdpSizes)]  # Megatron-Core keeps nothing
    copies = sum(map(copied_for_checkpoint, of_fsdp))
    if isinstance(config, TrainConfig) and config.algorithm.kl.refresh_steps and "reference" in pool.models:
        copies += resident(pool.models["reference"]).weights
    nodes = config.placement.pools.get(pool.name, [pool.ranks]) if isinstance(config, TrainConfig) else [pool.ranks]
    pixels = [pixels_on_host(sizes) for sizes in of_fsdp]
    if pool.generates and isinstance(config, TrainConfig) and isinstance(config.generation, NativeGenerationConfig):
        pixels.append(max(pixels, default=0))
    return HostMemory(pool.name, max(nodes), max(waiting) + sum(map(kept_on_host, of_fsdp)), copies, sum(pixels))


def _waiting(sizes: ModelSizes) -> int:
    """Bytes of host memory that a model takes while others have the devices; Megatron-Core lets gradients go."""
    held = resident(sizes)
    return held.total - held.gradients if isinstance(sizes, MegatronSizes) else held.total + features_on_host(sizes)


def resident(sizes: ModelSizes) -> Memory:
    """Between phases, on the device; of a pipeline, on that of the fullest stage."""
    if isinstance(sizes, MegatronSizes):
        return megatron_memory.resident(sizes, megatron_memory.fullest_stage(sizes))
    return fsdp_memory.resident(sizes)


def phases(sizes: ModelSizes) -> dict[ModelPhase, Memory]:
    """The peak of each phase of one model."""
    return megatron_memory.phases(sizes) if isinstance(sizes, MegatronSizes) else fsdp_memory.phases(sizes)


def find_shape_mistakes(config: Planned) -> Iterator[str]:
    """Models that planning does not know."""
    judge = config.model.judge_path if isinstance(config, TrainConfig) else None
    paths = [path for _, path in model_roles(config)] + ([] if judge is None else [judge])
    for path in dict.fromkeys(paths):
        try:
            read_shape(path)
        except UserError as error:
            yield str(error)


def _pools(config: Planned, shapes: Mapping[RoleName, ModelShape]) -> Iterator[_Pool]:
    if isinstance(config, SftConfig):
        ranks = config.cluster.ranks or 1
        in_all: _Models = {role: sizes_of(config, role, shape, ranks) for role, shape in shapes.items()}
        yield _Pool("main", ranks, in_all, generates=False)
        return
    names = list(config.placement.pools) or ["main"]
    placed = {role: config.placement.roles.get(role, names[0]) for role in get_args(RoleName)}
    for name in names:
        roles: list[RoleName] = [role for role in shapes if placed[role] == name]
        ranks = sum(config.placement.pools.get(name, [config.cluster.ranks or 1]))
        models: _Models = {role: sizes_of(config, role, shapes[role], ranks) for role in roles}
        judges = config.model.judge_path if placed["judge"] == name else None
        yield _Pool(name, ranks, models, placed["rollout"] == name, None if judges is None else read_shape(judges))


def sizes_of(config: Planned, role: str, shape: ModelShape, ranks: int) -> ModelSizes:
    """A role in the training engine of the configuration."""
    training = config.training
    if isinstance(training, FsdpTrainingConfig):
        return fsdp_sizes(config, training, role, shape, ranks)
    return megatron_sizes(config, training, role, shape, ranks)


def megatron_sizes(
    config: Planned, training: MegatronTrainingConfig, role: str, shape: ModelShape, ranks: int
) -> MegatronSizes:
    """A role in Megatron-Core, with the longest rows that there can be."""
    return MegatronSizes(
        shape,
        training,
        ranks,
        item_bytes=item_bytes(config),
        learns=role in learning_roles(config),
        value_head=role in ("critic", "reward_model"),
        tokens=max(training.tokens_per_micro_batch, longest_row(config)),
    )


def fsdp_sizes(config: Planned, training: FsdpTrainingConfig, role: str, shape: ModelShape, ranks: int) -> FsdpSizes:
    """A role in the PyTorch engine, with the longest rows that there can be."""
    learns = role in learning_roles(config)
    lora = adapters_of(config, role)
    tokens = max(training.tokens_per_micro_batch, longest_row(config))
    siblings = config.algorithm.group_size if isinstance(config, TrainConfig) else 1
    pairs = isinstance(config, (DpoConfig, RewardModelConfig))
    sizes = FsdpSizes(
        shape=shape,
        ranks=ranks,
        item_bytes=item_bytes(config),
        learns=learns,
        value_head=role in ("critic", "reward_model"),
        tokens=tokens,
        shared_prompts=siblings > 1 or pairs,
        shard_size=training.shard_size,
        cpu_offload=training.cpu_offload,
        optimizer_offload=training.optimizer_offload,
        optimizer=_optimizer(config, role),
        checkpointing=training.activation_checkpointing is not False,
        keeps_attention=training.activation_checkpointing == "selective",
        context_parallel=training.context_parallel,
        lora_rank=lora.rank if lora else 0,
        tower_learns=config.model.vision_tower == "train",
        picture_tokens=min(tokens, picture_tokens(config, tokens)) if shape.tower else 0,
    )
    return replace(sizes, reduce_once=training.sums_gradients_once(sizes.learning))


def _optimizer(config: Planned, role: str) -> OptimizerConfig:
    if role == "critic" and isinstance(config, TrainConfig) and isinstance(config.algorithm, MayHaveCriticConfig):
        return config.algorithm.critic_optimizer
    return config.training.optimizer


def picture_tokens(config: Planned, tokens: int) -> int:
    """Of a micro-batch of so many tokens, in rows of the greatest length; siblings show the same pictures."""
    if isinstance(config, SftConfig):
        rows = -(-tokens // longest_row(config))
    else:
        siblings = config.algorithm.group_size * config.generation.max_response_tokens
        rows = -(-tokens // (config.data.max_prompt_tokens + siblings))
    return rows * (config.data.images.max_image_tokens or 0)


def _of_pool(config: Planned, pool: _Pool, policy: ModelShape, card_bytes: int) -> Iterator[PhasePeak]:
    held = {role: resident(sizes) for role, sizes in pool.models.items()}
    is_rl = isinstance(config, TrainConfig)
    generating = _generating(config, pool, policy, card_bytes) if is_rl and pool.generates else {}
    leaving = _leaving(config, pool)
    judging, judge = _judging(config, pool, card_bytes)

    def beside(when: LoopPhase, role: RoleName | None = None) -> Memory:
        """What the engine and the other roles hold meanwhile."""
        others = [name for name in held if name != role and not (name in leaving and when in _ELSEWHERE[name])]
        return sum((held[name] for name in others), start=generating.get(when, Memory()) + judge)

    if pool.generates:
        yield _phase_peak(config, pool, "rollout", "generation", beside("generation"))
    if pool.judge is not None:
        yield _phase_peak(config, pool, "judge", "generation", beside("generation") + Memory(logits=judging.logits))
    for role, sizes in pool.models.items():
        for phase, memory in phases(sizes).items():
            if phase == "offloaded" or (phase == "publish" and not (role == "actor" and is_rl)):
                continue
            when: LoopPhase = "scoring" if role == "reward_model" and is_rl else _LOOP_PHASE_OF[phase]
            yield _phase_peak(config, pool, role, phase, memory + beside(when, role))


def _judging(config: Planned, pool: _Pool, card_bytes: int) -> tuple[Memory, Memory]:
    """What a judge's engine holds of a device while it judges, and at all other times."""
    if pool.judge is None or not isinstance(config, TrainConfig):
        return Memory(), Memory()
    return judge_memory(config, pool.judge, pool.ranks, card_bytes)


def _leaving(config: Planned, pool: _Pool) -> set[RoleName]:
    """The roles that take turns on the pool's devices."""
    if isinstance(config, SftConfig):
        return set()
    leaving: set[RoleName] = set()
    if len(pool.models) > 1:
        leaving |= {"reference", "teacher", "reward_model"}
    if pool.generates and config.generation.sleep != "never":
        leaving |= {"critic", "reference", "teacher", "reward_model"}
        if not _computes_with_the_actors(config, pool):
            leaving.add("actor")
    return {role for role in pool.models if role in leaving}


def _computes_with_the_actors(config: TrainConfig, pool: _Pool) -> bool:
    """One rank's native engine has no weights of its own; Megatron-Core's lie otherwise than it wants them."""
    alone = isinstance(config.generation, NativeGenerationConfig) and pool.ranks == 1 and "actor" in pool.models
    return alone and isinstance(config.training, FsdpTrainingConfig)


def _phase_peak(config: Planned, pool: _Pool, role: str, phase: ModelPhase, memory: Memory) -> PhasePeak:
    processes = 1
    if pool.generates and isinstance(config, TrainConfig) and not isinstance(config.generation, NativeGenerationConfig):
        processes = config.generation.replicas + bool(pool.models)
    if pool.judge is not None and isinstance(config, TrainConfig) and config.reward.judge is not None:
        judges = config.reward.judge.generation
        processes += 0 if isinstance(judges, NativeGenerationConfig) else judges.replicas
    context = processes * CONTEXT_BYTES + (NCCL_BYTES if pool.ranks > 1 else 0)
    tensors = memory.total - memory.cache
    allowed = Memory(context=context, slack=int(SLACK * tensors))
    return PhasePeak(pool.name, pool.ranks, role, phase, memory + allowed)


def _generating(config: TrainConfig, pool: _Pool, shape: ModelShape, card_bytes: int) -> Mapping[LoopPhase, Memory]:
    """What the generation engine holds of a device in each phase of the loop."""
    if isinstance(config.generation, NativeGenerationConfig):
        own_weights = not _computes_with_the_actors(config, pool)
        awake, asleep = native_memory(config, config.generation, shape, pool.ranks, own_weights)
        filled = asleep
    else:
        awake, asleep = replica_memory(config, config.generation, shape, bool(pool.models), card_bytes)
        filled = replace(awake, cache=asleep.cache)
    if not pool.models:
        asleep = filled = awake
    return {"generation": awake, "scoring": asleep, "preparation": asleep, "update": asleep, "publish": filled}
