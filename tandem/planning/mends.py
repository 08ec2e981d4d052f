"""What would not fit on a card, and the smallest change of a configuration that makes it fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tandem.config.generation import NativeGenerationConfig
from tandem.config.judging import JudgeConfig
from tandem.config.load import load_config
from tandem.config.training import FsdpTrainingConfig, MegatronTrainingConfig
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.generation_memory import given_share
from tandem.planning.model_shape import read_shape
from tandem.planning.phases import PhasePeak, phase_peaks
from tandem.planning.planned import Planned, longest_row

FREE = ("training.reduce_once=", "generation.sleep=", "training.tokens_per_micro_batch=", "training.shard_size=")
"""Keys whose changes cost next to no time."""


@dataclass(frozen=True, slots=True)
class Mend:
    """Overrides that make a configuration fit."""

    overrides: tuple[str, ...]
    most: PhasePeak
    """The highest peak that is left."""


def fullest(found: Sequence[PhasePeak]) -> PhasePeak:
    return max(found, key=lambda peak: peak.memory.total)


def find_mend(
    kind: type[Planned],
    path: Path,
    overrides: Sequence[str],
    card_bytes: int,
    processes: int | None = None,
    per_node: int | None = None,
    given: bool = False,
) -> Mend | None:
    """The first single change that is enough, in the order of what it costs; else the fewest of them together.

    None where all of them are not enough. `processes`: how many GPUs there are, if more may be used than now, and
    `per_node` of them on each node. `given`: the user says that there are: using them all costs less than what makes a
    step slower.
    """

    def tried(overrides: Sequence[str]) -> _Tried | None:
        """None where the configuration refuses a change."""
        try:
            found = phase_peaks(load_config(kind, path, overrides), card_bytes)
        except UserError:
            return None
        return _Tried(sum(max(0, peak.memory.total - card_bytes) for peak in found), fullest(found))

    config = load_config(kind, path, overrides)
    changes = list(_changes(config))
    more = list(_more_processes(config, processes, per_node or processes or 0))
    if given:
        free = [change for change in changes if _is_free(change)]
        changes = [*free, *more, *(change for change in changes if change not in free)]
    else:
        changes += more
    for change in changes:
        if (one := tried([*overrides, *change])) and not one.missing:
            return Mend(tuple(change), one.most)
    return _together(tried, overrides, changes)


class _Tried(NamedTuple):
    """A configuration: the less is missing, the better, then the lower its highest peak is."""

    missing: int
    """Bytes, of all moments that do not fit."""
    most: PhasePeak

    def is_better_than(self, other: "_Tried") -> bool:
        return (self.missing, self.most.memory.total) < (other.missing, other.most.memory.total)


def _together(
    tried: Callable[[Sequence[str]], _Tried | None], overrides: Sequence[str], changes: Sequence[Sequence[str]]
) -> Mend | None:
    """Change after change, those that help are kept, round after round, as some make others possible; when all fits,
    those that are not needed are dropped again."""
    taken: list[Sequence[str]] = []
    best = tried(overrides)
    before: list[Sequence[str]] | None = None
    while best is not None and best.missing and taken != before:
        before = taken
        for change in changes:
            kept = [one for one in taken if one is not change and not (_other_engine(change) and _of_engine(one))]
            found = tried(_flat(overrides, [*kept, change]))
            if found is not None and found.is_better_than(best):
                taken, best = [*kept, change], found
            if not best.missing:
                break
    if best is None or best.missing:
        return None
    for change in list(taken):
        fewer = [kept for kept in taken if kept is not change]
        found = tried(_flat(overrides, fewer))
        if found is not None and not found.missing:
            taken, best = fewer, found
    return Mend(tuple(_flat((), taken)), best.most)


def _other_engine(change: Sequence[str]) -> bool:
    return any(override.startswith("generation.type=") for override in change)


def _of_engine(change: Sequence[str]) -> bool:
    return any(override.startswith("generation.") for override in change)


def _flat(overrides: Sequence[str], changes: Sequence[Sequence[str]]) -> list[str]:
    return [*overrides, *(override for change in changes for override in change)]


def _changes(config: Planned) -> Iterator[list[str]]:
    """Those that cost no time first, then those that cost some."""
    training = config.training
    if not isinstance(training, FsdpTrainingConfig):
        yield from _of_megatron(config, training)
        return
    generation = config.generation if isinstance(config, TrainConfig) else NativeGenerationConfig()
    if training.reduce_once is not False:
        yield ["training.reduce_once=false"]
    if not isinstance(generation, NativeGenerationConfig) and generation.sleep != "weights":
        yield ["generation.sleep=weights"]
    yield from _smaller_micro_batches(config)
    if training.shard_size is not None:
        yield ["training.shard_size=null"]
    yield from _of_judge(config)
    if training.activation_checkpointing is not True:
        yield ["training.activation_checkpointing=true"]
    if isinstance(config, TrainConfig):
        yield from _of_generation(config)
    yield from _slower(training)


def _is_free(change: Sequence[str]) -> bool:
    return all(override.startswith(FREE) for override in change)


def _smaller_micro_batches(config: Planned) -> Iterator[list[str]]:
    tokens, longest = config.training.tokens_per_micro_batch, longest_row(config)
    while tokens > longest:
        tokens = max(longest, tokens // 2)
        yield [f"training.tokens_per_micro_batch={tokens}"]


def _of_megatron(config: Planned, training: MegatronTrainingConfig) -> Iterator[list[str]]:
    """In the order of docs/megatron.md; degrees that do not divide are no changes."""
    yield from _smaller_micro_batches(config)
    yield from _of_judge(config)
    if training.tensor_parallel > 1 and not training.sequence_parallel:
        yield ["training.sequence_parallel=true"]
    if not training.activation_checkpointing:
        yield ["training.activation_checkpointing=true"]
    if isinstance(config, TrainConfig):
        yield from _of_generation(config)
    for degree in (2, 4, 8):
        if degree > training.tensor_parallel:
            yield [f"training.tensor_parallel={degree}", "training.sequence_parallel=true"]
    for name, now in (("expert", training.expert_parallel), ("pipeline", training.pipeline_parallel)):
        yield from ([f"training.{name}_parallel={degree}"] for degree in (2, 4, 8, 16) if degree > now)
    yield from ([f"training.context_parallel={degree}"] for degree in (2, 4, 8) if degree > training.context_parallel)


def _slower(training: FsdpTrainingConfig) -> Iterator[list[str]]:
    if not (training.optimizer_offload or training.cpu_offload):
        yield ["training.optimizer_offload=true"]
    yield from ([f"training.context_parallel={degree}"] for degree in (2, 4, 8) if degree > training.context_parallel)
    if not training.cpu_offload:
        yield [
            "training.cpu_offload=true",
            *(["training.optimizer_offload=false"] if training.optimizer_offload else []),
        ]


def _of_judge(config: Planned) -> Iterator[list[str]]:
    if not isinstance(config, TrainConfig) or config.model.judge_path is None:
        return
    settings, key = (config.reward.judge or JudgeConfig()).generation, "reward.judge.generation"
    if not isinstance(settings, NativeGenerationConfig):
        yield from ([f"{key}.memory_share={share}"] for share in (0.7, 0.5, 0.3) if given_share(settings) is None)
        return
    rows = settings.max_running // 2
    while rows:
        yield [f"{key}.max_running={rows}"]
        rows //= 2


def _of_generation(config: TrainConfig) -> Iterator[list[str]]:
    generation, ranks = config.generation, sum(config.nodes_of("rollout"))
    if isinstance(generation, NativeGenerationConfig):
        sleep = "always" if config.trainer.max_staleness else "idle"
        if generation.sleep not in (sleep, "always"):
            yield [f"generation.sleep={sleep}"]
        rows = generation.max_running // 2
        while rows:
            yield [f"generation.max_running={rows}"]
            rows //= 2
        if ranks == 1:
            return
        for degree in (1, 2, 4, 8):
            if ranks % degree == 0:
                yield [
                    "generation.type=vllm",
                    f"generation.tensor_parallel={degree}",
                    "generation.sleep=weights",
                    "generation.memory_share=0.5",
                ]
        return
    names = ("gpu_memory_utilization", "mem_fraction_static")
    given = next((f"engine_args.{name}" for name in names if name in generation.engine_args), "memory_share")
    yield from ([f"generation.{given}={share}"] for share in (0.7, 0.5, 0.3))
    heads = read_shape(config.model.path).kv_heads
    degree = generation.tensor_parallel * 2
    while degree <= min(8, heads) and ranks % degree == 0:
        yield [f"generation.tensor_parallel={degree}"]
        degree *= 2


def _more_processes(config: Planned, processes: int | None, per_node: int) -> Iterator[list[str]]:
    """Of one pool: `cluster.ranks` are of one machine, more of them are pools with nodes."""
    if processes is None or (isinstance(config, TrainConfig) and config.placement.pools):
        return
    ranks, most = config.cluster.ranks or 1, min(processes, per_node)
    while ranks < most:
        ranks = min(2 * ranks, most)
        yield [f"cluster.ranks={ranks}"]
    for nodes in range(2, processes // per_node + 1) if isinstance(config, TrainConfig) else ():
        if nodes * per_node > (config.cluster.ranks or 1):
            pools = f"placement.pools.main={[per_node] * nodes}"
            ray = ["cluster.type=ray"] if config.cluster.type == "local" else []
            yield [*ray, "cluster.ranks=null", pools]
