"""How a configuration says a placement: degrees that all of its models share, pools, and keys to change."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from pydantic import ValidationError

from tandem.config import yaml12
from tandem.config.generation import NativeGenerationConfig
from tandem.config.rules import broken_rules
from tandem.config.rules.pictures import pictures_run_so
from tandem.config.rules.ranks import find_fsdp_mistakes, find_megatron_mistakes
from tandem.config.training import FsdpTrainingConfig, MegatronTrainingConfig
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.costs import DEGREES, EXPERT_DEGREES
from tandem.planning.hardware import Machines
from tandem.planning.mends import fullest
from tandem.planning.model_shape import ModelShape
from tandem.planning.phases import phase_peaks
from tandem.planning.placement_search import ACTOR, ROLLOUT, Plan, Way
from tandem.planning.time import ParallelDims

Training = FsdpTrainingConfig | MegatronTrainingConfig


def trainings_of(config: TrainConfig) -> Iterator[Training]:
    """The configuration's own degrees, then others, of which each is for all of its models."""
    own = config.training
    yield own
    if isinstance(own, FsdpTrainingConfig):
        others = (own.model_copy(update={"context_parallel": degree}) for degree in DEGREES[:4])
        yield from (
            one
            for one in others
            if one != own and not any(pictures_run_so(config.model_copy(update={"training": one})))
        )
        return
    degrees = product(DEGREES[:4], DEGREES[:4], (1, *EXPERT_DEGREES), sorted({1, own.context_parallel}))
    for tensor, pipeline, expert, context in degrees:
        one = with_degrees(own, ParallelDims(1, tensor, context, expert, pipeline))
        if one != own:
            yield one


def with_degrees(training: Training, layout: ParallelDims) -> Training:
    """The same, as that layout has it; sequence parallelism wherever there is tensor parallelism."""
    if isinstance(training, FsdpTrainingConfig):
        return training.model_copy(update={"context_parallel": layout.context})
    degrees = {
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "context_parallel": layout.context,
        "expert_parallel": layout.expert,
    }
    if all(getattr(training, name) == degree for name, degree in degrees.items()):
        return training
    same_stages = training.pipeline_parallel == layout.pipeline
    return training.model_copy(
        update=degrees
        | {
            "sequence_parallel": layout.tensor > 1,
            "virtual_pipeline": training.virtual_pipeline if same_stages else 1,
            "expert_tensor_parallel": None,
        }
    )


def layouts_of(training: Training, shape: ModelShape, gpus: int) -> list[ParallelDims]:
    """The one way in which a model lies on so many GPUs with these degrees, if they divide it and them."""
    if isinstance(training, FsdpTrainingConfig):
        free = training.model_copy(update={"shard_size": None})
        wrong = any(find_fsdp_mistakes(free, shape.heads, gpus))
        return [] if wrong else [ParallelDims(gpus, context=training.context_parallel, sharded=gpus > 1)]
    if any(find_megatron_mistakes(training, _described(shape), gpus)):
        return []
    degrees = training.tensor_parallel, training.context_parallel, training.expert_parallel, training.pipeline_parallel
    return [ParallelDims(gpus, *degrees)]


def _described(shape: ModelShape) -> dict[str, int]:
    """As a config.json says it."""
    return {
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.width,
        "moe_intermediate_size": shape.expert_width,
        "num_experts": shape.experts,
    }


def changes_for(config: TrainConfig, plan: Plan, machines: Machines) -> dict[str, Any]:
    """The keys, with their values, by which the configuration becomes that plan; none if it is so already."""
    layouts = {role: how for way in plan.sets for role, how in zip(way.roles, way.how, strict=True)}
    training = with_degrees(config.training, layouts[ACTOR])
    size = training.shard_size if isinstance(training, FsdpTrainingConfig) else None
    if size is not None and any(how.gpus % size for role, how in layouts.items() if role != ROLLOUT):
        training = training.model_copy(update={"shard_size": None})
    own = config.training.model_dump()
    wanted = {f"training.{key}": value for key, value in training.model_dump().items() if value != own[key]}
    generation = config.generation
    if not isinstance(generation, NativeGenerationConfig) and generation.tensor_parallel != layouts[ROLLOUT].tensor:
        wanted["generation.tensor_parallel"] = layouts[ROLLOUT].tensor
    return wanted | dict(_placement(config, plan, machines))


def sets_of(config: TrainConfig, roles: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The roles of each pool that has any; without pools that of all is `main`."""
    pools = config.placement.pools
    if not pools:
        return {"main": tuple(roles)}
    first = next(iter(pools))
    placed = {role: config.placement.roles.get(role, first) for role in roles}  # type: ignore[call-overload]
    sets = {name: tuple(role for role in roles if placed[role] == name) for name in pools}
    return {name: held for name, held in sets.items() if held}


def _placement(config: TrainConfig, plan: Plan, machines: Machines) -> Iterator[tuple[str, Any]]:
    if machines.nodes > 1 and config.cluster.type == "local":
        yield "cluster.type", "ray"
    one_node = len(plan.sets) == 1 and plan.sets[0].gpus <= machines.per_node
    if one_node and not config.placement.pools:
        if (config.cluster.ranks or 1) != plan.sets[0].gpus:
            yield "cluster.ranks", plan.sets[0].gpus
        return
    nodes = dealt(plan.sets, machines)
    now = sets_of(config, [role for way in plan.sets for role in way.roles])
    names = {frozenset(roles): name for name, roles in now.items()}
    same_sets = set(names) == {frozenset(way.roles) for way in plan.sets}
    with_actor_first = sorted(plan.sets, key=lambda way: ACTOR not in way.roles)
    if same_sets:
        counts = {names[frozenset(way.roles)]: nodes[way.roles] for way in plan.sets}
        pools = {name: counts[name] for name in now}  # roles without a pool of their own are in the first
    else:
        pools = {_name(way.roles): nodes[way.roles] for way in with_actor_first}
    if list(config.placement.pools.items()) != list(pools.items()):
        yield from [("cluster.ranks", None)] if config.cluster.ranks is not None else []
        yield "placement.pools", pools
    if not same_sets:
        yield "placement.roles", {role: _name(way.roles) for way in with_actor_first[1:] for role in way.roles}


def _name(roles: tuple[str, ...]) -> str:
    return "train" if ACTOR in roles else "serve" if ROLLOUT in roles else roles[0]


def dealt(sets: Sequence[Way], machines: Machines) -> dict[tuple[str, ...], list[int]]:
    """Of each set the GPUs on each of its nodes: whole nodes, the rest on one node if any has room for it."""
    free = [machines.per_node] * machines.nodes
    rest = {way.roles: way.gpus for way in sets}
    counts: dict[tuple[str, ...], list[int]] = {way.roles: [] for way in sets}

    def give(roles: tuple[str, ...], node: int) -> None:
        count = min(free[node], rest[roles])
        free[node] -= count
        rest[roles] -= count
        counts[roles].append(count)

    for roles in rest:
        while rest[roles] >= machines.per_node:
            give(roles, free.index(machines.per_node))
    for roles in sorted(rest, key=lambda roles: -rest[roles]):
        while rest[roles]:
            fitting = [node for node, room in enumerate(free) if room >= rest[roles]]
            give(roles, min(fitting, key=lambda node: free[node]) if fitting else free.index(max(free)))
    return counts


def fits(config: TrainConfig, changes: Mapping[str, Any], card_bytes: int) -> bool:
    """Whether the configuration with these changes is sound as far as planning knows, and fits as `plan` prints it."""
    tree = config.model_dump(mode="json")
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    try:
        changed = TrainConfig.model_validate(tree)
        return not broken_rules(changed) and fullest(phase_peaks(changed, card_bytes)).memory.total <= card_bytes
    except (ValidationError, UserError):
        return False


def as_overrides(changes: Mapping[str, Any]) -> str:
    """As they are written behind a configuration in a shell."""
    return " ".join(shlex.quote(f"{key}={_yaml(value)}") for key, value in changes.items())


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_yaml(key)}: {_yaml(held)}" for key, held in value.items()) + "}"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w-]*", value) and yaml12.read(value) == value:
        return value
    return json.dumps(value)
