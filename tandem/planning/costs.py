"""What the placement search asks: memory and time of each role on so many GPUs, from the formulas of planning."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.planning.decoding import Decoder, generation_s, steady_generation_s
from tandem.planning.hardware import Machines
from tandem.planning.model_shape import ModelShape
from tandem.planning.passes import Passes
from tandem.planning.search import ACTOR, Choice, Generating
from tandem.planning.time import CONSTANTS, Constants, Layout, StepTime, Workload

DEGREES = (1, 2, 4, 8, 16)
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
    layouts: Callable[[int], Sequence[Layout]]
    """The ways in which a model may lie on so many GPUs."""
    memory_of: MemoryOf
    tensor_degrees: Sequence[int] = DEGREES[:4]
    """Of generation."""
    models_leave: bool = True
    """Models wait in host memory while answers are generated on their GPUs."""
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
        for layout in self.layouts(gpus):
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
            room = self.memory_bytes - held - 2 * shape.parameters // tensor
            decoder = Decoder(shape, self.machines.card, tensor)
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
        constants = self.constants
        speed = constants.own_refit_bytes_per_s if shared else constants.sent_refit_bytes_per_s
        seconds = 2 * self.models[ACTOR].shape.parameters / speed + (constants.switch_s if shared else 0.0)
        return seconds * self.scales.get("publish", 1.0)


def parallel_layouts(gpus: int) -> list[Layout]:
    """Megatron-Core's: tensor parallelism inside a node, pipelines of up to eight stages."""
    return [
        Layout(gpus, tensor=tensor, pipeline=pipeline)
        for tensor in DEGREES[:4]
        for pipeline in DEGREES[:4]
        if gpus % (tensor * pipeline) == 0
    ]


def parallel_memory(workload: Workload) -> MemoryOf:
    """Of Megatron-Core: bfloat16 weights and float32 gradients over the ranks of a replica, Adam's state over all, and
    of each layer its input, which is what recomputation keeps. A rough formula: nothing here has been held to a run."""

    def memory_of(_: str, model: Model, layout: Layout) -> tuple[int, int]:
        shape, shared = model.shape, layout.tensor * layout.pipeline
        held = 2 * shape.parameters // shared
        if model.learns:
            held += 4 * shape.parameters // shared + 12 * shape.parameters // layout.gpus
        tokens = max(workload.micro_batch_tokens, workload.row_tokens) / layout.context
        hidden = int(tokens * shape.hidden * 2)
        kept = hidden * (shape.layers if model.learns else 1) // layout.tensor  # a stage's, for as many micro-batches
        logits = 0 if model.value_head else int(tokens * shape.vocabulary * 10) // layout.tensor
        return held, kept + 16 * hidden // layout.tensor + min(logits, 3 * 2**30)

    return memory_of
