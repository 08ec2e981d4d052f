"""What the placement search asks: memory and time of each role on so many GPUs, from the formulas of planning."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tandem.config.training import MegatronTrainingConfig
from tandem.planning import megatron_memory
from tandem.planning.decode_cost import DecodeCost, generation_s, steady_generation_s
from tandem.planning.hardware import Machines
from tandem.planning.model_shape import ModelShape
from tandem.planning.passes import IN_PLACE, HostTraffic, Passes
from tandem.planning.phases import CONTEXT_BYTES, NCCL_BYTES, SLACK
from tandem.planning.placement_search import ACTOR, Candidate, Generating
from tandem.planning.time import CONSTANTS, Constants, ParallelDims, StepTime, Workload

BESIDE_THE_ACTOR, TO_OTHER_GPUS = "publish beside the actor", "publish to other GPUs"
"""Stages that a run measures one of, which says nothing of the other."""
DEGREES = (1, 2, 4, 8, 16)
EXPERT_DEGREES = (2, 4, 8, 16, 32, 64)
OUTSIDE_BYTES = CONTEXT_BYTES + NCCL_BYTES
"""What a process takes of a GPU besides tensors, as in the table of `plan`."""


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """A role that trains or scores."""

    shape: ModelShape
    learns: bool = False
    value_head: bool = False
    adapters: bool = False
    """They learn in the place of its weights."""


MemoryOf = Callable[[str, PlannedRole, ParallelDims], tuple[int, int]]
"""Bytes on each GPU of a role's model that lies so: those that it always holds, and those more while it works."""
TrafficOf = Callable[[str, PlannedRole, ParallelDims], HostTraffic]
"""What such a model moves between host memory and each GPU."""
Asleep = Literal["nothing", "weights", "all"]
"""What an engine keeps on its GPUs while others work there."""


@dataclass(frozen=True, slots=True)
class Generators:
    """The engines that generate, vLLM or SGLang, whose rows take memory as they grow, unless `kept_rows` is given."""

    tensor_degrees: Sequence[int] = DEGREES[:4]
    most_rows: int | None = None
    """Those that an engine may run at once; None: as many as there is memory for."""
    share_of: Callable[[bool], float] = lambda _: 1.0
    """Of each GPU's memory, with models beside it or not, for an engine's weights and cache, where models leave it."""
    asleep: Asleep = "nothing"
    models_leave: bool = True
    """Models wait in host memory while answers are generated on their GPUs."""
    kept_rows: Callable[[int], int] | None = None
    """The native engine: for how many rows of the greatest length one of so many engines has room."""
    item_bytes: float = 2
    """Of a weight."""
    reads_trainer: bool = False
    """A native engine on one GPU may generate with the trainer's own parameters."""

    def of_trainer(self, gpus: int, models: Sequence[str]) -> bool:
        """It generates with the trainer's own parameters: nothing sleeps, wakes or is copied."""
        return self.reads_trainer and ACTOR in models and gpus == 1


@dataclass
class ClusterCosts:
    """Costs on machines of one kind."""

    machines: Machines
    models: Mapping[str, PlannedRole]
    workload: Workload
    layouts: Callable[[ModelShape, int], Sequence[ParallelDims]]
    """The ways in which a model may lie on so many GPUs."""
    memory_of: MemoryOf
    generators: Generators = Generators()
    traffic_of: TrafficOf = lambda *_: IN_PLACE
    staleness: int = 0
    old_logprobs: bool = True
    """The actor scores a step's answers before it learns from them."""
    constants: Constants = CONSTANTS
    scales: Mapping[str, float] = field(default_factory=dict)
    """By stage, what a run's steps took, in predictions."""
    _known: dict[tuple[str, int], list[Candidate]] = field(default_factory=dict)
    _generated: dict[tuple[int, int, int], float] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        return int((self.machines.card.memory_bytes - OUTSIDE_BYTES) / (1 + SLACK))

    def choices(self, role: str, gpus: int) -> Sequence[Candidate]:
        if (role, gpus) not in self._known:
            self._known[role, gpus] = list(self._choices(role, gpus))
        return self._known[role, gpus]

    def _choices(self, role: str, gpus: int) -> Iterator[Candidate]:
        model = self.models[role]
        for layout in self.layouts(model.shape, gpus):
            held, working = self.memory_of(role, model, layout)
            if held + working <= self.memory_bytes:
                stages = self.of_role(role, layout)
                yield Candidate(layout, held, working, stages.preparation, stages.update)

    def of_role(self, role: str, layout: ParallelDims) -> StepTime:
        """The stages of a step that a role takes part in; a reward model's scores count as the reference's."""
        model = self.models[role]
        host = self.traffic_of(role, model, layout)
        card, constants = self.machines.card, self.constants
        passes = Passes(model.shape, card, layout, self.workload, constants, host, adapters=model.adapters)
        forward_s = passes.forward_s()
        stage = {ACTOR: "log_probs", "critic": "critic"}.get(role, "reference")
        if role == ACTOR and not self.old_logprobs:
            forward_s = 0.0
        times = StepTime(**{stage: forward_s}, update=passes.update_s() if model.learns else 0.0)
        return self._scaled(times)

    def _scaled(self, times: StepTime) -> StepTime:
        preparation = self.scales.get("preparation", 1.0)
        return replace(
            times,
            log_probs=times.log_probs * preparation,
            reference=times.reference * preparation,
            critic=times.critic * preparation,
            update=times.update * self.scales.get("update", 1.0),
        )

    def generation(self, gpus: int, held_bytes: int, models: Sequence[str]) -> Sequence[Generating]:
        """The fastest degree."""
        shape, generators, card = self.models[ACTOR].shape, self.generators, self.machines.card
        if generators.of_trainer(gpus, models):
            staying = self.choices(ACTOR, gpus)[0].held_bytes
        else:
            staying = 0 if generators.models_leave else held_bytes
        # keys and values are made in one piece, without gaps
        free = card.memory_bytes - OUTSIDE_BYTES - int((1 + SLACK) * staying)
        ways: list[Generating] = []
        for tensor in generators.tensor_degrees:
            own_weights = not generators.of_trainer(gpus, models)
            weights = int(own_weights * generators.item_bytes * shape.parameters / tensor)
            room = min(
                free - int((1 + SLACK) * weights), int(card.memory_bytes * generators.share_of(bool(models))) - weights
            )
            decoder = DecodeCost(shape, card, tensor, generators.item_bytes, generators.most_rows)
            rows = generators.kept_rows(max(1, gpus // tensor)) if generators.kept_rows else 1
            if gpus % tensor == 0 and decoder.fits(room, self.workload, rows):
                cache = decoder.cache_bytes(self.workload, rows) if generators.kept_rows else room
                held = {"nothing": 0, "weights": weights, "all": weights + int(cache / (1 + SLACK))}[generators.asleep]
                seconds = self._generation_s(decoder, gpus, room)
                ways.append(Generating(ParallelDims(gpus, tensor), held, seconds))
        return [min(ways, key=lambda way: way.seconds)] if ways else []

    def _generation_s(self, decoder: DecodeCost, gpus: int, room: float) -> float:
        """Of a step's rows; with staleness answers of several steps run side by side."""
        rows = -(-self.workload.rows * max(1, self.staleness) // max(1, gpus // decoder.tensor))
        key = (gpus, decoder.tensor, min(rows, decoder.room(room, self.workload)))
        if key not in self._generated:
            self._generated[key] = self._fresh_generation_s(decoder, gpus, room)
        return self._generated[key]

    def _fresh_generation_s(self, decoder: DecodeCost, gpus: int, room: float) -> float:
        alone = generation_s(decoder, self.workload, gpus, room, self.constants)
        if self.staleness > 1:
            steady = steady_generation_s(decoder, self.workload, gpus, room, self.staleness, self.constants)
            alone = steady + max(0.0, alone - steady) / self.staleness
        return alone * self.scales.get("generation", 1.0)

    def publish_s(self, gpus: int, *, shared: bool) -> float:
        if shared and self.generators.of_trainer(gpus, [ACTOR]):
            return 0.0
        constants = self.constants
        speed = constants.own_refit_bytes_per_s if shared else constants.sent_refit_bytes_per_s
        changes_over = shared and self.generators.kept_rows is None
        seconds = 2 * self.models[ACTOR].shape.parameters / speed + (constants.switch_s if changes_over else 0.0)
        return seconds * self.scales.get(BESIDE_THE_ACTOR if shared else TO_OTHER_GPUS, 1.0)


def parallel_layouts(shape: ModelShape, gpus: int) -> list[ParallelDims]:
    """Megatron-Core's: tensor parallelism inside a node, up to eight stages, experts over up to 64 ranks."""
    experts = [1, *(degree for degree in EXPERT_DEGREES if shape.experts and shape.experts % degree == 0)]
    return [
        ParallelDims(gpus, tensor=tensor, pipeline=pipeline, expert=expert)
        for tensor in DEGREES[:4]
        for pipeline in DEGREES[:4]
        for expert in experts
        if gpus % (tensor * pipeline) == gpus % (expert * pipeline) == 0
        and shape.heads % tensor == shape.kv_heads % tensor == shape.layers % pipeline == 0
    ]


def parallel_memory(workload: Workload) -> MemoryOf:
    """Of Megatron-Core, with sequence parallelism."""
    tokens = int(max(workload.micro_batch_tokens, workload.row_tokens))

    def memory_of(_: str, model: PlannedRole, layout: ParallelDims) -> tuple[int, int]:
        training = training_of(layout, activation_checkpointing=workload.recompute)
        sizes = megatron_memory.MegatronSizes(
            model.shape, training, layout.gpus, learns=model.learns, value_head=model.value_head, tokens=tokens
        )
        return held_and_working(sizes)

    return memory_of


def training_of(layout: ParallelDims, **options: Any) -> MegatronTrainingConfig:
    """A layout as a configuration says it."""
    return MegatronTrainingConfig(
        type="megatron",
        tensor_parallel=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_parallel=layout.pipeline,
        context_parallel=layout.context,
        expert_parallel=layout.expert,
        **options,
    )


def held_and_working(sizes: megatron_memory.MegatronSizes) -> tuple[int, int]:
    """Bytes of the fullest stage: those that it always holds, and those more in the phase that takes the most."""
    held = megatron_memory.resident(sizes, megatron_memory.fullest_stage(sizes)).total
    return held, max(0, max(memory.total for memory in megatron_memory.phases(sizes).values()) - held)
