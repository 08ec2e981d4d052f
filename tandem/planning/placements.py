"""Of a configuration: how long its step takes, by stage, and how long with its roles on other GPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Need
from tandem.config.generation import NativeGenerationConfig, VllmGenerationConfig
from tandem.config.ratio import TrainerPass, ratio_plan
from tandem.config.roles import model_roles
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.calibration import MeasuredRun, factors
from tandem.planning.costs import (
    BESIDE_THE_ACTOR,
    Asleep,
    ClusterCosts,
    Generators,
    MemoryOf,
    PlannedRole,
    TrafficOf,
    held_and_working,
)
from tandem.planning.fsdp_memory import FsdpSizes, phases, resident
from tandem.planning.generation_memory import asked_of_one, given_rows, share_of
from tandem.planning.hardware import Machines
from tandem.planning.model_shape import read_shape
from tandem.planning.offload import host_traffic
from tandem.planning.passes import IN_PLACE
from tandem.planning.phases import fsdp_sizes, megatron_sizes
from tandem.planning.placement_search import ROLLOUT, Plan, Ranking, evaluate, nothing_fits, search, why
from tandem.planning.planned import adapters_of, item_bytes, learning_roles
from tandem.planning.settings import Training, as_overrides, changes_for, fits, layouts_of, sets_of, trainings_of
from tandem.planning.time import CONSTANTS, ParallelDims, Workload

SHOWN = 5
"""Placements of the ranked list."""
ALLOCATIONS = 8
"""Of each placement and degrees so many are tried, as the memory that the search counts is less than a run's."""
MEASURED_PARAMETERS = 8e9
"""Of the smallest model whose change-over between generation and training is known."""

KEPT_ASLEEP: Mapping[str, Asleep] = {"weights": "nothing", "cache": "weights", "never": "all"}
"""By what leaves."""


def time_report(
    config: TrainConfig, machines: Machines, response_tokens: float | None = None, run: MeasuredRun | None = None
) -> Iterator[str]:
    """A line for the configuration as it is, then the placements, the fastest first, each with what to change.

    `response_tokens`: of an answer, on average; by default those of `run`, half of the most without one. `run`: its
    measured stages scale the predicted ones.
    """
    given = response_tokens or (run.response_tokens if run else None)
    work = workload_of(config, given and min(given, config.generation.max_response_tokens))
    scales = scales_of(run, machines) if run else {}
    here, has_room = as_it_is(config, machines, work, scales), fits(config, {}, machines.card.memory_bytes)
    yield f"step time, answers of {work.response_tokens:.0f} tokens (15 to 20% off where nobody has measured):"
    if run is not None:
        told = factors(scales) or "nothing, as its steps have no times"
        yield f"  scaled by {run.directory}: {told}{run.taken_for_granted}"
    line = _line(here) if here else "not timed (an engine's weights have no room, or it takes several GPUs of one rank)"
    yield f"  as it is: {line}" if has_room else f"  as it is: does not fit; if it did: {line}"
    ranking = ranked(config, machines, work, scales)
    for rank, plan in enumerate(ranking.mappings, 1):
        yield f"  {rank}. {_line(plan)}"
        yield f"     {as_overrides(changes_for(config, plan, machines)) or 'as it is'}"
    if not ranking.mappings and not has_room:
        raise nothing_fits(roles_of(config), machines.gpus)
    told = why(ranking) if ranking.mappings else f"no placement on all of {machines.gpus} GPUs fits"
    yield f"{told}; {ranking.evaluated} mappings compared, of which each set of pools is listed at its best"
    yield from _not_known(config, ranking, BESIDE_THE_ACTOR in scales)


def scales_of(run: MeasuredRun, machines: Machines) -> dict[str, float]:
    """By stage, what the run measured in what is predicted for it. Raises UserError where nothing can be."""
    try:
        predicted = as_it_is(run.config, machines, workload_of(run.config, run.response_tokens))
    except UserError as error:  # of a critic, a teacher or a reward model that is not there any more
        raise UserError(f"--calibrate {run.directory}: what that run had cannot be read: {error}") from None
    if predicted is None:
        raise UserError(f"--calibrate {run.directory}: a run with such engines is not timed; give another")
    return run.scales(predicted)


def _not_known(config: TrainConfig, ranking: Ranking, change_over_is_measured: bool) -> Iterator[str]:
    """Times that stand on less than the others."""
    shape = read_shape(config.model.path)
    if isinstance(config.generation, NativeGenerationConfig):
        yield "the native engine is timed as vLLM is: nobody has measured it on a GPU"
    elif change_over_is_measured:
        pass
    elif shape.parameters < MEASURED_PARAMETERS and any(plan.shares_actor for plan in ranking.mappings):
        yield (
            f"publish has {CONSTANTS.switch_s:.0f} s of change-over where generation shares the actor's GPUs, as "
            f"measured with models of 8B and more; this one of {shape.parameters / 1e9:.1f}B takes less: calibrate "
            "before you part them for it"
        )
    elif ranking.mappings != sorted(ranking.mappings, key=_without_change_over):
        yield (
            f"the order hangs on the {CONSTANTS.switch_s:.0f} s of change-over that publish has where generation "
            "shares the actor's GPUs: calibrate before you part them for it"
        )
    if config.algorithm.resample_rounds:
        yield "groups that are drawn again (algorithm.resample_rounds) are in no time above"
    if config.reward.judge is not None:
        yield "what a judge takes to reply (reward.judge) is in no time above"
    training = config.training
    if isinstance(training, FsdpTrainingConfig) and training.cpu_offload:
        yield "cpu_offload: the optimizer's time is that of host memory at 40 GB/s for each GPU, which is an estimate"


def _without_change_over(plan: Plan) -> float:
    return plan.step_s - (CONSTANTS.switch_s if plan.shares_actor else 0.0)


def as_it_is(
    config: TrainConfig, machines: Machines, work: Workload, scales: Mapping[str, float] | None = None
) -> Plan | None:
    """The configuration's own sets and degrees, whether models have room there or not. None: engines have none."""
    costs = costs_of(config, machines, work, config.training, scales)
    costs.memory_of = lambda *_: (0, 0)
    kept = costs.generators.kept_rows and (lambda _: 0)
    costs.generators = replace(costs.generators, kept_rows=kept, models_leave=True)
    if not isinstance(config.generation, NativeGenerationConfig):
        costs.generators = replace(costs.generators, tensor_degrees=[config.generation.tensor_parallel])
    sets = {roles: sum(config.nodes_of(roles[0])) for roles in sets_of(config, roles_of(config)).values()}  # type: ignore[arg-type]
    return evaluate(costs, sets, stale=config.trainer.max_staleness > 0)


def ranked(config: TrainConfig, machines: Machines, work: Workload, scales: Mapping[str, float]) -> Ranking:
    """The fastest placements that one configuration can say and that fit as `plan` counts, at most SHOWN."""
    stale = config.trainer.max_staleness > 0
    found: list[Plan] = []
    evaluated = 0
    for training in trainings_of(config):
        costs = costs_of(config, machines, work, training, scales)
        try:
            ranking = search(costs, roles_of(config), machines.gpus, stale=stale, allocations=ALLOCATIONS)
        except UserError:  # nothing fits with these degrees
            continue
        found += ranking.mappings
        evaluated += ranking.evaluated
    if (here := as_it_is(config, machines, work, scales)) and sum(way.gpus for way in here.sets) == machines.gpus:
        found.insert(0, here)
    best: dict[frozenset[frozenset[str]], Plan] = {}
    for plan in sorted(found, key=lambda plan: plan.step_s):
        sets = frozenset(frozenset(way.roles) for way in plan.sets)
        if sets not in best and fits(config, changes_for(config, plan, machines), machines.card.memory_bytes):
            best[sets] = plan
            if len(best) == SHOWN:
                break
    return Ranking(list(best.values()), evaluated)


def _line(plan: Plan) -> str:
    generation, preparation, update = map(_seconds, plan.times)
    sets = " | ".join(
        ", ".join(f"{role} on {how}" for role, how in zip(way.roles, way.how, strict=True)) for way in plan.sets
    )
    beside = "beside the rest" if plan.beside else "in turn"
    return (
        f"{_seconds(plan.step_s)} s: generation {generation} {beside}, preparation {preparation}, "
        f"update {update}, publish {_seconds(plan.publish_s)}; {sets}"
    )


def _seconds(time: float) -> str:
    return f"{time:.1f}" if time >= 1 or time == 0 else f"{time:.2g}"


def roles_of(config: TrainConfig) -> list[str]:
    return [*models_of(config), ROLLOUT]


def models_of(config: TrainConfig) -> dict[str, PlannedRole]:
    """The roles that train or score, with their shapes; the reference also where it is the policy without adapters."""
    paths: dict[str, Path] = dict(model_roles(config))
    if config.algorithm.kl.place != "none":
        paths.setdefault("reference", config.model.path)
    return {
        role: PlannedRole(
            read_shape(path),
            learns=role in learning_roles(config),
            value_head=role in ("critic", "reward_model"),
            adapters=adapters_of(config, role) is not None,
        )
        for role, path in paths.items()
    }


def workload_of(config: TrainConfig, response_tokens: float | None) -> Workload:
    longest, algorithm = config.generation.max_response_tokens, config.algorithm
    return Workload(
        rows=config.data.prompts_per_step * algorithm.group_size,
        response_tokens=response_tokens or longest / 2,
        max_response_tokens=longest,
        prompt_tokens=config.data.max_prompt_tokens / 2,
        siblings=algorithm.group_size,
        optimizer_steps=algorithm.minibatches,
        epochs=algorithm.epochs,
        micro_batch_tokens=config.training.tokens_per_micro_batch,
        recompute=bool(config.training.activation_checkpointing),
        picture_tokens=min(config.data.max_prompt_tokens, config.data.images.max_image_tokens or 0) / 2,
        tower_learns=config.model.vision_tower == "train" and config.model.lora is None,
    )


def costs_of(
    config: TrainConfig,
    machines: Machines,
    work: Workload,
    training: Training,
    scales: Mapping[str, float] | None = None,
) -> ClusterCosts:
    """With these degrees for all models, whatever the configuration has."""
    return ClusterCosts(
        machines,
        models_of(config),
        work,
        lambda shape, gpus: layouts_of(training, shape, gpus),
        _memory_of(config, training),
        generators=_generators(config),
        traffic_of=_traffic_of(config, training),
        staleness=config.trainer.max_staleness,
        old_logprobs=_scores_before_learning(config),
        scales=scales or {},
    )


def _scores_before_learning(config: TrainConfig) -> bool:
    needs = make_algorithm(config.algorithm, config.generation.max_response_tokens).needs
    staleness, reads_old_logprobs = config.trainer.max_staleness, Need.OLD_LOGPROBS in needs
    plan = ratio_plan(config.algorithm, staleness, reads_old_logprobs=reads_old_logprobs)
    return plan.trainer_pass is TrainerPass.BEFORE_UPDATE


def _generators(config: TrainConfig) -> Generators:
    generation, rows = config.generation, given_rows(config.generation)
    leave = generation.sleep != "never"
    if isinstance(generation, NativeGenerationConfig):
        busy = generation.sleep == "idle" and config.trainer.max_staleness > 0
        return Generators(
            [1],
            rows,
            asleep="all" if busy or not leave else "weights",
            models_leave=leave,
            kept_rows=lambda engines: min(generation.max_running, asked_of_one(config, generation, engines)),
            item_bytes=item_bytes(config),
            reads_trainer=isinstance(config.training, FsdpTrainingConfig),
        )
    quantized = isinstance(generation, VllmGenerationConfig) and generation.quantization is not None
    return Generators(
        most_rows=rows,
        share_of=lambda beside: share_of(generation, beside),
        asleep=KEPT_ASLEEP[generation.sleep],
        models_leave=leave,
        item_bytes=1 if quantized else item_bytes(config),
    )


def _memory_of(config: TrainConfig, training: Training) -> MemoryOf:
    """What `phases.py` says of a role, on other numbers of GPUs, or less: what is listed is counted by `phases.py`."""

    def memory_of(role: str, model: PlannedRole, layout: ParallelDims) -> tuple[int, int]:
        if not isinstance(training, FsdpTrainingConfig):
            both = held_and_working(megatron_sizes(config, training, role, model.shape, layout.gpus))
            return both if model.learns else (0, sum(both))
        sizes = _sizes_of(config, training, role, model, layout)
        held = resident(sizes).total if model.learns else 0  # others wait in host memory for their turn
        return held, max(memory.total for memory in phases(sizes).values()) - held

    return memory_of


def _traffic_of(config: TrainConfig, training: Training) -> TrafficOf:
    if not isinstance(training, FsdpTrainingConfig):
        return lambda *_: IN_PLACE
    return lambda role, model, layout: host_traffic(_sizes_of(config, training, role, model, layout))


def _sizes_of(
    config: TrainConfig, training: FsdpTrainingConfig, role: str, model: PlannedRole, layout: ParallelDims
) -> FsdpSizes:
    """One copy of the model is shared by as many ranks as the configuration says, if that divides the GPUs."""
    size = training.shard_size
    divides = size is not None and layout.gpus % size == 0
    fitted = training.model_copy(update={"shard_size": size if divides else None})
    return fsdp_sizes(config, fitted, role, model.shape, layout.gpus)
