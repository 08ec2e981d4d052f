"""What the placement search asks: memory and time of each role on so many GPUs, from the formulas of planning."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.config.training import MegatronTrainingConfig
from tandem.planning import megatron_memory
from tandem.planning.decoding import Decoder, generation_s, steady_generation_s
from tandem.planning.hardware import Machines
from tandem.planning.model_shape import ModelShape
from tandem.planning.passes import Passes
from tandem.planning.search import ACTOR, Choice, Generating
from tandem.planning.time import CONSTANTS, Constants, Layout, StepTime, Workload

DEGREES = (1, 2, 4, 8, 16)
EXPERT_DEGREES = (2, 4, 8, 16, 32, 64)
CONTEXT_BYTES = 3 * 2**29
"""Of CUDA, NCCL and kernels' workspaces: an allowance."""
SLACK = 0.05
"""The share of a device that its allocator cannot fill: an allowance."""
ASLEEP_BYTES = 0
"""Of a generation engine while others work: with `generation.sleep: weights` all of it leaves."""


@dataclass(frozen=True, slots=True)
class Model:
    """A role that trains or scores."""

    shape: ModelShape
    learns: bool = False
    value_head: bool = False


MemoryOf = Callable[[str, Model, Layout], tuple[int, int]]
"""Bytes on each GPU of a role's model that lies so: those that it always holds, and those more while it works."""


@dataclass
class ClusterCosts:
    """Costs on machines of one kind."""

    machines: Machines
    models: Mapping[str, Model]
    workload: Workload
    layouts: Callable[[ModelShape, int], Sequence[Layout]]
    """The ways in which a model may lie on so many GPUs."""
    memory_of: MemoryOf
    tensor_degrees: Sequence[int] = DEGREES[:4]
    """Of generation."""
    most_rows: int | None = None
    """Those that an engine may run at once; None: as many as there is memory for."""
    engine_share: float | None = None
    """Of each GPU's memory, for an engine's weights and cache; None: what others leave."""
    models_leave: bool = True
    """Models wait in host memory while answers are generated on their GPUs."""
    engine_is_trainer: bool = False
    """Where both share GPUs generation reads the trainer's own parameters: nothing sleeps, wakes or is copied."""
    staleness: int = 0
    constants: Constants = CONSTANTS
    scales: Mapping[str, float] = field(default_factory=dict)
    """By stage, what a run's steps took, in predictions."""
    _known: dict[tuple[str, int], list[Choice]] = field(default_factory=dict)
    _generated: dict[tuple[int, int, int], float] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        return int(self.machines.card.memory_bytes * (1 - SLACK)) - CONTEXT_BYTES

    def choices(self, role: str, gpus: int) -> Sequence[Choice]:
        if (role, gpus) not in self._known:
            self._known[role, gpus] = list(self._choices(role, gpus))
        return self._known[role, gpus]

    def _choices(self, role: str, gpus: int) -> Iterator[Choice]:
        model = self.models[role]
        for layout in self.layouts(model.shape, gpus):
            held, working = self.memory_of(role, model, layout)
            if held + working <= self.memory_bytes:
                stages = self.of_role(role, layout)
                yield Choice(str(layout), held, working, stages.preparation, stages.update)

    def of_role(self, role: str, layout: Layout) -> StepTime:
        """The stages of a step that a role takes part in; a reward model's scores count as the reference's."""
        model = self.models[role]
        passes = Passes(model.shape, self.machines.card, layout, self.workload, self.constants)
        forward_s = passes.forward_s()
        stage = {ACTOR: "log_probs", "critic": "critic"}.get(role, "reference")
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

    def generation(self, gpus: int, held_bytes: int) -> Sequence[Generating]:
        """The fastest degree; what engines hold leaves the GPUs before others work."""
        shape = self.models[ACTOR].shape
        held = 0 if self.models_leave else held_bytes
        ways: list[Generating] = []
        for tensor in self.tensor_degrees:
            room = self.memory_bytes - held
            if self.engine_share is not None:
                room = min(room, int(self.machines.card.memory_bytes * self.engine_share))
            room -= 2 * shape.parameters // tensor
            decoder = Decoder(shape, self.machines.card, tensor, most_rows=self.most_rows)
            if gpus % tensor == 0 and decoder.fits(room, self.workload):
                ways.append(
                    Generating(f"{gpus} GPUs TP{tensor}", ASLEEP_BYTES, self._generation_s(decoder, gpus, room))
                )
        return [min(ways, key=lambda way: way.seconds)] if ways else []

    def _generation_s(self, decoder: Decoder, gpus: int, room: float) -> float:
        """Of a step's rows; with staleness answers of several steps run side by side."""
        rows = -(-self.workload.rows * max(1, self.staleness) // max(1, gpus // decoder.tensor))
        key = (gpus, decoder.tensor, min(rows, decoder.room(room, self.workload)))
        if key not in self._generated:
            self._generated[key] = self._fresh_generation_s(decoder, gpus, room)
        return self._generated[key]

    def _fresh_generation_s(self, decoder: Decoder, gpus: int, room: float) -> float:
        alone = generation_s(decoder, self.workload, gpus, room, self.constants)
        if self.staleness > 1:
            steady = steady_generation_s(decoder, self.workload, gpus, room, self.staleness, self.constants)
            alone = steady + max(0.0, alone - steady) / self.staleness
        return alone * self.scales.get("generation", 1.0)

    def publish_s(self, *, shared: bool) -> float:
        if shared and self.engine_is_trainer:
            return 0.0
        constants = self.constants
        speed = constants.own_refit_bytes_per_s if shared else constants.sent_refit_bytes_per_s
        seconds = 2 * self.models[ACTOR].shape.parameters / speed + (constants.switch_s if shared else 0.0)
        return seconds * self.scales.get("publish", 1.0)


def parallel_layouts(shape: ModelShape, gpus: int) -> list[Layout]:
    """Megatron-Core's: tensor parallelism inside a node, up to eight stages, experts over up to 64 ranks."""
    experts = [1, *(degree for degree in EXPERT_DEGREES if shape.experts and shape.experts % degree == 0)]
    return [
        Layout(gpus, tensor=tensor, pipeline=pipeline, expert=expert)
        for tensor in DEGREES[:4]
        for pipeline in DEGREES[:4]
        for expert in experts
        if gpus % (tensor * pipeline) == gpus % (expert * pipeline) == 0
        and shape.heads % tensor == shape.kv_heads % tensor == shape.layers % pipeline == 0
    ]


def parallel_memory(workload: Workload) -> MemoryOf:
    """Of Megatron-Core, with sequence parallelism."""
    tokens = int(max(workload.micro_batch_tokens, workload.row_tokens))

    def memory_of(_: str, model: Model, layout: Layout) -> tuple[int, int]:
        training = training_of(layout, activation_checkpointing=workload.recompute)
        engine = megatron_memory.MegatronEngine(
            model.shape, training, layout.gpus, learns=model.learns, value_head=model.value_head, tokens=tokens
        )
        return held_and_working(engine)

    return memory_of


def training_of(layout: Layout, **options: Any) -> MegatronTrainingConfig:
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


def held_and_working(engine: megatron_memory.MegatronEngine) -> tuple[int, int]:
    """Bytes of the fullest stage: those that it always holds, and those more in the phase that takes the most."""
    held = megatron_memory.resident(engine, megatron_memory.fullest_stage(engine)).total
    return held, max(0, max(memory.total for memory in megatron_memory.phases(engine).values()) - held)
