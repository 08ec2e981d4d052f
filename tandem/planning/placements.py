"""Of a configuration: how long its step takes, by stage, and how long with its roles on other GPUs."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from tandem.config import yaml12
from tandem.config.algorithms import CriticConfig
from tandem.config.generation import NativeGenerationConfig
from tandem.config.training import FsdpTrainingConfig, MegatronTrainingConfig
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.pictures.refusals import find_picture_mistakes
from tandem.planning.costs import (
    DEGREES,
    ClusterCosts,
    MemoryOf,
    Model,
    held_and_working,
    parallel_layouts,
    parallel_memory,
    training_of,
)
from tandem.planning.hardware import Machines
from tandem.planning.memory import phases, resident
from tandem.planning.model_shape import read_shape
from tandem.planning.roles import engine_of, given_rows, given_share, megatron_engine_of, model_paths
from tandem.planning.search import ROLLOUT, Plan, evaluate, search, why
from tandem.planning.time import Layout, Workload

SHOWN = 5
"""Placements of the ranked list."""


def time_report(
    config: TrainConfig, machines: Machines, response_tokens: float | None = None, run: Path | None = None
) -> Iterator[str]:
    """A line for the configuration as it is, then the placements, the fastest first.

    `response_tokens`: of an answer, on average; half of the most by default. `run`: a run directory of this
    configuration, whose measured stages scale the predicted ones.
    """
    stale = config.trainer.max_staleness > 0
    work = workload_of(config, response_tokens)
    here = evaluate(costs_of(config, machines, work, as_it_is=True), sets_of(config), stale=stale)
    scales: Mapping[str, float] = {}
    if run is not None:
        if here is None:
            raise UserError(
                f"--calibrate {run}: by these formulas the configuration does not fit, so nothing is scaled"
            )
        scales = measured_scales(run, here)
        scaled = costs_of(config, machines, work, as_it_is=True, scales=scales)
        here = evaluate(scaled, sets_of(config), stale=stale)
    yield f"step time, answers of {work.response_tokens:.0f} tokens (15 to 20% off where nobody has measured):"
    yield f"  as it is: {_line(here) if here else 'does not fit'}"
    roles = [*models_of(config), ROLLOUT]
    ranking = search(costs_of(config, machines, work, scales=scales), roles, machines.gpus, stale=stale)
    for rank, plan in enumerate(ranking.mappings[:SHOWN], 1):
        yield f"  {rank}. {_line(plan)}"
    yield f"the first wins, for {why(ranking)}; {ranking.evaluated} mappings compared"


def _line(plan: Plan) -> str:
    generation, preparation, update = plan.times
    sets = " | ".join(
        ", ".join(f"{role} on {how}" for role, how in zip(way.roles, way.how, strict=True)) for way in plan.sets
    )
    beside = "beside the rest" if plan.beside else "in turn"
    return (
        f"{plan.step_s:.1f} s: generation {generation:.1f} {beside}, preparation {preparation:.1f}, "
        f"update {update:.1f}, publish {plan.publish_s:.1f}; {sets}"
    )


def models_of(config: TrainConfig) -> dict[str, Model]:
    """The roles that train or score, with their shapes."""
    model, algorithm = config.model, config.algorithm
    actor = read_shape(model.path)
    found = {"actor": Model(actor, learns=True)}
    if algorithm.kl.place != "none":
        found["reference"] = Model(actor)
    if isinstance(algorithm, CriticConfig) and algorithm.type == "ppo":
        critic = read_shape(model.critic_path) if model.critic_path else actor
        found["critic"] = Model(critic, learns=True, value_head=True)
    if model.teacher_path is not None:
        found["teacher"] = Model(read_shape(model.teacher_path))
    if model.reward_model_path is not None:
        found["reward_model"] = Model(read_shape(model.reward_model_path), value_head=True)
    return found


def sets_of(config: TrainConfig) -> dict[tuple[str, ...], int]:
    """The roles of each pool, and its processes."""
    pools = config.placement.pools
    roles = [*models_of(config), ROLLOUT]
    if not pools:
        return {tuple(roles): config.cluster.ranks or 1}
    first = next(iter(pools))
    placed = {role: config.placement.roles.get(role, first) for role in roles}  # type: ignore[call-overload]
    sets = {name: tuple(role for role in roles if placed[role] == name) for name in pools}
    return {held: sum(pools[name]) for name, held in sets.items() if held}


def workload_of(config: TrainConfig, response_tokens: float | None) -> Workload:
    longest, algorithm = config.generation.max_response_tokens, config.algorithm
    return Workload(
        rows=config.data.prompts_per_step * algorithm.group_size,
        response_tokens=min(longest, response_tokens or longest / 2),
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
    *,
    as_it_is: bool = False,
    scales: Mapping[str, float] | None = None,
) -> ClusterCosts:
    """`as_it_is`: with the configuration's degrees alone."""
    generation = config.generation
    tensor, models_leave, share = [1], False, None
    if not isinstance(generation, NativeGenerationConfig):
        share = given_share(generation)
        tensor = [generation.tensor_parallel] if as_it_is else list(DEGREES[:4])
        models_leave = generation.sleep != "never"
    training = config.training
    costs = ClusterCosts(
        machines,
        models_of(config),
        work,
        parallel_layouts,
        parallel_memory(work),
        tensor_degrees=tensor,
        most_rows=given_rows(generation),
        engine_share=share,
        models_leave=models_leave,
        engine_is_trainer=isinstance(generation, NativeGenerationConfig),
        staleness=config.trainer.max_staleness,
        scales=scales or {},
    )
    if isinstance(training, FsdpTrainingConfig):
        degrees = [training.context_parallel] if as_it_is else _context_degrees(config)
        costs.memory_of = _fsdp_memory(config, training, as_it_is=as_it_is)
        heads = math.gcd(*(model.shape.heads for model in costs.models.values()))
        costs.layouts = lambda _, gpus: [
            Layout(gpus, context=degree, sharded=gpus > 1) for degree in degrees if gpus % degree == heads % degree == 0
        ]
        return costs
    costs.memory_of = _megatron_memory(config, training, as_it_is=as_it_is)
    if as_it_is:
        costs.layouts = lambda _, gpus: [
            Layout(
                gpus,
                training.tensor_parallel,
                training.context_parallel,
                training.expert_parallel,
                training.pipeline_parallel,
            )
        ]
    return costs


def _context_degrees(config: TrainConfig) -> list[int]:
    """Those that a run takes of the model."""
    training = (config.training.model_copy(update={"context_parallel": degree}) for degree in DEGREES[:4])
    tried = (config.model_copy(update={"training": one}) for one in training)
    return [degree for degree, one in zip(DEGREES, tried, strict=False) if not any(find_picture_mistakes(one))]


def _fsdp_memory(config: TrainConfig, training: FsdpTrainingConfig, *, as_it_is: bool) -> MemoryOf:
    """What `roles.py` says of a role, with other degrees and other numbers of GPUs."""
    own_models = model_paths(config)

    def memory_of(role: str, model: Model, layout: Layout) -> tuple[int, int]:
        size = training.shard_size
        degrees = {
            "context_parallel": layout.context,
            "shard_size": size if size is None or layout.gpus % size == 0 else None,
        }
        engine = engine_of(config, training.model_copy(update=degrees), role, model.shape, layout.gpus)
        held = resident(engine).total
        working = max(memory.total for memory in phases(engine).values()) - held
        return 0 if as_it_is and role not in own_models else held, working

    return memory_of


def _megatron_memory(config: TrainConfig, training: MegatronTrainingConfig, *, as_it_is: bool) -> MemoryOf:
    """The same of Megatron-Core; its search has sequence parallelism wherever there is tensor parallelism."""

    def memory_of(role: str, model: Model, layout: Layout) -> tuple[int, int]:
        other = training_of(layout, activation_checkpointing=training.activation_checkpointing)
        chosen = training if as_it_is else other
        return held_and_working(megatron_engine_of(config, chosen, role, model.shape, layout.gpus))

    return memory_of


def check_same_model(run: Path, config: TrainConfig) -> None:
    """Raises UserError where the run in that directory trained another model, or in another way."""
    path = run / "config.yaml"
    try:
        theirs = yaml12.read(path.read_text(encoding="utf-8"))
        model, training = Path(theirs["model"]["path"]), theirs.get("training", {}).get("type", "fsdp")
    except (OSError, ValueError, TypeError, KeyError, yaml12.YAMLError) as error:
        raise UserError(f"--calibrate {run}: {path} cannot be read ({error}); give the directory of a run") from None
    if model != config.model.path and model.is_dir() and read_shape(model) != read_shape(config.model.path):
        raise UserError(
            f"--calibrate {run}: that run trained {model}, which is of another size than {config.model.path}; give a "
            "run of this model"
        )
    if training != config.training.type:
        raise UserError(
            f"--calibrate {run}: that run had training.type: {training}, this configuration has "
            f"{config.training.type}; give a run of the same engine"
        )


STAGES = {"generation": "time/generation_s", "preparation": "time/preparation_s", "update": "time/update_s"}
STAGES |= {"publish": "time/publish_s"}


def measured_scales(run: Path, predicted: Plan) -> dict[str, float]:
    """By stage, measured seconds in predicted ones: the median of the steps after the first, or the first.

    Raises UserError where `run` has no metrics.
    """
    path = run / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--calibrate {run}: {path} cannot be read ({error}); give the directory of a run") from None
    steps = [record for record in records if "time/step_s" in record]
    if not steps:
        raise UserError(f"--calibrate {run}: {path} has no step; give a run that has trained for one at least")
    seconds = dict(zip(STAGES, (*predicted.times, predicted.publish_s), strict=True))
    if predicted.beside:  # what is measured of generation there is the wait for it
        del seconds["generation"]
    found = {stage: [step[STAGES[stage]] for step in steps[1:] or steps if STAGES[stage] in step] for stage in seconds}
    return {stage: median(times) / seconds[stage] for stage, times in found.items() if times and seconds[stage] > 0}
