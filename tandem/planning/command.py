"""What `tandem plan` prints: what a configuration needs, before anything is loaded."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tandem.config.generation import NativeGenerationConfig
from tandem.config.job import Job
from tandem.config.load import load_config, read_config, refuse, split_arguments, written_tree
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import SftConfig, TrainConfig
from tandem.config.valid_part import found_by
from tandem.errors import UserError
from tandem.planning.calibration import read_run
from tandem.planning.hardware import Machines, parse_machines
from tandem.planning.mends import find_mend, fullest
from tandem.planning.phases import HostMemory, PhasePeak, find_shape_mistakes, hosts, not_counted, phase_peaks
from tandem.planning.placements import time_report
from tandem.planning.planned import Planned
from tandem.planning.planned_jobs import KINDS, jobs_of

GIB = 2**30
CARD = "H100"
"""Where nobody says which."""


def print_plan(
    arguments: Sequence[str] | None,
    gpus: str | None,
    job: Job | None,
    trace: bool,
    search: bool,
    response_tokens: float | None,
    calibrate: Path | None,
) -> bool:
    """As the options of `tandem plan` say; whether everything fits. Raises UserError for what is wrong with them."""
    path, overrides = _configuration(arguments)
    if (response_tokens or calibrate) and not search:
        raise UserError("--response-tokens and --calibrate are for --search")
    job = job or jobs_of(written_tree(path, overrides))[0]
    kind = KINDS[job]
    config = _load(kind, path, overrides)
    check_options(config, job, trace, search)
    check_response_tokens(config, response_tokens)
    machines = machines_for(config, gpus)
    run = read_run(calibrate, config, machines.name) if calibrate and isinstance(config, TrainConfig) else None
    found = phase_peaks(config, machines.card.memory_bytes)
    print("\n".join([*before_the_table(config, kind, machines, bool(gpus)), *table(found)]))
    if trace:
        from tandem.planning.trace.trace_report import traced

        print("\n".join(traced(config)))
    fits = fullest(found).memory.total <= machines.card.memory_bytes
    print("\n".join(verdict(found, machines.card.memory_bytes, machines.name)))
    print("\n".join([*(of_host(host, machines.per_node) for host in hosts(config)), *not_counted(config)]))
    if not fits:
        print("\n".join(mend_of(kind, path, overrides, machines, bool(gpus))))
    if search and isinstance(config, TrainConfig):
        print("\n".join(time_report(config, machines, response_tokens, run)))
    return fits


def _configuration(arguments: Sequence[str] | None) -> tuple[Path, list[str]]:
    """A file or that of a run directory, and the overrides."""
    path, overrides = split_arguments(arguments)
    if path is None:
        raise UserError("no configuration given; write tandem plan CONFIG.yaml [key=value …] [--gpus 8xH100]")
    return path / "config.yaml" if path.is_dir() else path, overrides


def _load(kind: type[Planned], path: Path, overrides: Sequence[str]) -> Planned:
    """Raises UserError with every mistake of the configuration, what planning does not know among them."""
    read = read_config(kind, path, overrides)
    refuse(path, [*read.problems, *found_by(partial(find_shape_mistakes, read.config), whole=not read.problems)])
    return read.config


def machines_for(config: Planned, gpus: str | None) -> Machines:
    """Those of `--gpus`, or one node of the usual card. Raises UserError where they are fewer than processes."""
    processes = processes_of(config)
    machines = parse_machines(gpus or f"{max(8, processes)}x{CARD}")
    if machines.gpus < processes:
        raise UserError(
            f"--gpus {machines}: the configuration has {processes} processes, and each takes a GPU of its own; give as "
            "many GPUs, or lower cluster.ranks or placement.pools"
        )
    generation = config.generation if isinstance(config, TrainConfig) else NativeGenerationConfig()
    degree = 1 if isinstance(generation, NativeGenerationConfig) else generation.tensor_parallel
    if degree > machines.gpus:
        raise UserError(
            f"--gpus {machines}: generation.tensor_parallel is {degree}, and an engine takes as many GPUs; give them, "
            "or lower it"
        )
    return machines


def before_the_table(config: Planned, kind: type[Planned], machines: Machines, given: bool) -> Iterator[str]:
    """What was taken for granted. `given`: `--gpus` says which machines."""
    processes = processes_of(config)
    if not given:
        yield f"taken for {machines}, as there is no --gpus"
    elif machines.gpus > processes:
        yield f"{processes} of {machines.gpus} GPUs: cluster.ranks or placement.pools would have to ask for the others"
    if not (isinstance(config, TrainConfig) and config.placement.pools) and processes > machines.per_node:
        more = "; more are pools, as placement.pools.main=[8, 8]" if isinstance(config, TrainConfig) else ""
        yield f"cluster.ranks: {processes} are of one machine, and one has {machines.per_node} GPUs here{more}"
    if kind is SftConfig:
        yield "planned as tandem sft; a configuration of a reward model looks alike: --job reward-model"


def check_options(config: Planned, job: Job, trace: bool, search: bool) -> None:
    """Raises UserError where no fake step can be run, and where nothing can be placed."""
    if search and not isinstance(config, TrainConfig):
        raise UserError(f"--search places the roles of tandem train; tandem {job} has one pool")
    if search and config.model.judge_path is not None:
        raise UserError("--search: how long a judge (model.judge_path) takes is not known; leave --search out")
    if trace and not isinstance(config.training, FsdpTrainingConfig):
        raise UserError("--trace: the fake step is of training.type: fsdp; for Megatron-Core leave it out")


def check_response_tokens(config: Planned, tokens: float | None) -> None:
    """Raises UserError where answers would be longer on average than they may be."""
    longest = config.generation.max_response_tokens if isinstance(config, TrainConfig) else None
    if tokens and longest and tokens > longest:
        raise UserError(
            f"--response-tokens {tokens:g}: an answer has generation.max_response_tokens = {longest} at most; give the "
            "mean, or raise that"
        )


def processes_of(config: Planned) -> int:
    pools = config.placement.pools if isinstance(config, TrainConfig) else {}
    return sum(map(sum, pools.values())) or config.cluster.ranks or 1


def table(found: Sequence[PhasePeak]) -> Iterator[str]:
    """A line a peak, a column for each cause that any of them has; GiB."""
    causes = [cause for cause in found[0].memory.causes() if any(peak.memory.causes()[cause] for peak in found)]
    rows = [["pool", "role", "phase", *causes, "total GiB"]]
    for peak in found:
        sizes = peak.memory.causes()
        numbers = [f"{sizes[cause] / GIB:.1f}" if sizes[cause] else "" for cause in causes]
        pool = f"{peak.pool} x {peak.processes}"
        rows.append([pool, peak.role, peak.phase, *numbers, f"{peak.memory.total / GIB:.1f}"])
    yield from _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(w) if at < 3 else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def verdict(found: Sequence[PhasePeak], room: int, card: str) -> Iterator[str]:
    """One line a pool. `room`: bytes of the card."""
    for pool in dict.fromkeys(peak.pool for peak in found):
        most = fullest([peak for peak in found if peak.pool == pool])
        total, missing = most.memory.total, most.memory.total - room
        says = "fits" if missing <= 0 else f"does NOT fit, {missing / GIB:.1f} GiB too much"
        yield (
            f"{pool}: {says}: {total / GIB:.1f} of {room / GIB:.1f} GiB of the {card}, "
            f"{most.role} in {most.phase}; most of it {_largest_causes(most)}"
        )


def _largest_causes(peak: PhasePeak) -> str:
    sizes = peak.memory.causes()
    largest = sorted(sizes, key=lambda cause: -sizes[cause])[:3]
    return ", ".join(f"{cause} {sizes[cause] / GIB:.1f}" for cause in largest)


def of_host(host: HostMemory, per_node: int) -> str:
    """What a pool keeps in host memory."""
    processes = min(host.processes, per_node)
    pictures = f", pictures {host.pictures / GIB:.1f}" if host.pictures else ""
    return (
        f"{host.pool}: {host.total / GIB:.1f} GiB of host memory a process beside the program: models that wait or are "
        f"offloaded {host.models / GIB:.1f}, copies for checkpoints {host.copies / GIB:.1f}{pictures}; "
        f"{processes * host.total / GIB:.1f} GiB on a node, for {processes} process{'es' * (processes > 1)}"
    )


def mend_of(
    kind: type[Planned], path: Path, overrides: Sequence[str], machines: Machines, given: bool
) -> Iterator[str]:
    """The change, and the host memory that it takes, or that there is none. `given`: `--gpus` says which machines."""
    mend = find_mend(kind, path, overrides, machines.card.memory_bytes, machines.gpus, machines.per_node, given)
    if mend is None:
        yield (
            "no change that plan knows makes it fit in the pools that it has: take more GPUs, larger ones, or a "
            "smaller model; --search tries other pools"
        )
        return
    total = mend.most.memory.total / GIB
    yield f"the smallest change that fits ({total:.1f} GiB): {_joined(mend.overrides)}"
    mended = hosts(load_config(kind, path, [*overrides, *mend.overrides]))
    yield from (f"then {of_host(host, machines.per_node)}" for host in mended)


def _joined(overrides: Iterable[str]) -> str:
    """As they are written in a shell."""
    return " ".join(map(shlex.quote, overrides))
