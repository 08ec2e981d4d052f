"""How many bytes a rank of Megatron-Core holds of one model, phase by phase and by cause: formulas, no torch.

    stages     each holds the layers of its part; the first has the embedding, the last the final norm and the output
               layer, with tied embeddings in a pipeline a copy of the embedding
    weights    and float32 gradients in buffers, over tensor, expert and pipeline ranks
    optimizer  float32 masters and two moments, over all ranks that hold the same weights
    in flight  a stage keeps the activations of as many micro-batches as there are stages from it on (1F1B: Narayanan et
               al. 2021, arXiv:2104.04473), with virtual stages of some more

Activations are those of Megatron-Core's local layers (Korthikanti et al. 2022, arXiv:2205.05198, without dropout and
scores); TransformerEngine's keep no more. tests/megatron/test_planned_memory.py holds all of it to real engines.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.config.training import MegatronTrainingConfig
from tandem.planning.fsdp_memory import Memory, ModelPhase
from tandem.planning.model_shape import ModelShape

_LOGITS = 2**25
"""`tandem/training/megatron/engine.py`: logits that exist at once on a rank."""


@dataclass(frozen=True, slots=True)
class MegatronSizes:
    """A model in the Megatron-Core engine, on `ranks` ranks."""

    shape: ModelShape
    training: MegatronTrainingConfig
    ranks: int = 1
    item_bytes: int = 2
    """Of a number in forward and backward passes: `model.dtype`."""
    learns: bool = True
    value_head: bool = False
    tokens: int = 16_384
    """Of the largest micro-batch, each row with its prompt."""
    predicted: int | None = None
    """Its tokens whose log-probs are wanted. Default: all."""

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights: data-parallel and context-parallel ones."""
        return max(1, self.ranks // (self.training.tensor_parallel * self.training.pipeline_parallel))

    @property
    def expert_replicas(self) -> int:
        training = self.training
        shared = training.expert_parallel * training.expert_ranks * training.pipeline_parallel
        return max(1, self.ranks // shared)

    @property
    def own_tokens(self) -> int:
        return -(-self.tokens // self.training.context_parallel)

    @property
    def cut_tokens(self) -> int:
        """Of what lies between matrices."""
        training = self.training
        return -(-self.own_tokens // (training.tensor_parallel if training.sequence_parallel else 1))

    def layers(self, stage: int) -> Mapping[bool, int]:
        """How many a stage's rank holds, with virtual stages in several runs, by whether they are mixtures."""
        parts = self.training.pipeline_parallel * self.training.virtual_pipeline
        size = -(-self.shape.layers // parts)
        runs = [
            self.shape.mixtures[part * size : (part + 1) * size]
            for part in range(stage, parts, self.training.pipeline_parallel)
        ]
        mixtures = sum(map(sum, runs))
        counts = {False: sum(map(len, runs)) - mixtures, True: mixtures}
        return {mixture: count for mixture, count in counts.items() if count}

    def dense(self, stage: int) -> int:
        """Parameters of a rank of a stage that no expert owns."""
        shape, tensor, stages = self.shape, self.training.tensor_parallel, self.training.pipeline_parallel
        vocabulary = -(-shape.vocabulary // tensor) * shape.hidden
        first, last = stage == 0, stage == stages - 1
        found = sum(count * self._dense_layer(mixture) for mixture, count in self.layers(stage).items())
        found += vocabulary if first else 0
        if last and self.value_head:
            return found + 2 * shape.hidden + 1
        if last:
            shared = shape.tied and stages == 1
            found += shape.hidden + (0 if shared else vocabulary)
        return found

    def _dense_layer(self, mixture: bool) -> int:
        """Norms and routers are whole on every tensor rank."""
        shape, tensor = self.shape, self.training.tensor_parallel
        normed = 2 * shape.head_dim if shape.attention.normed else 0
        found = shape.norms + normed + (shape.attention.parameters - normed) // tensor
        if mixture:
            return found + shape.mixture_parameters - shape.experts * 3 * shape.hidden * shape.expert_width
        return found + shape.dense_parameters // tensor

    def experts(self, stage: int) -> int:
        """Parameters of a rank's experts."""
        shape, training = self.shape, self.training
        own = shape.experts // training.expert_parallel * 3 * shape.hidden * shape.expert_width
        return self.layers(stage).get(True, 0) * own // training.expert_ranks

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a stage keeps at most, of all its layers; there are enough of them."""
        stages, virtual = self.training.pipeline_parallel, self.training.virtual_pipeline
        if virtual == 1:
            return stages - stage
        chunks = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
        return chunks / virtual


def resident(sizes: MegatronSizes, stage: int = 0) -> Memory:
    """Between phases, on the device."""
    dense, experts = sizes.dense(stage), sizes.experts(stage)
    item, held = sizes.item_bytes, dense + experts
    if not sizes.learns:
        return Memory(weights=item * held)
    state = 12 if item != 4 else 8
    optimizer = state * dense // sizes.replicas + state * experts // sizes.expert_replicas
    return Memory(weights=item * held, gradients=4 * held, optimizer=optimizer)


def phases(sizes: MegatronSizes) -> dict[ModelPhase, Memory]:
    """Of the stage that holds the most in each phase."""
    stages = _extreme_stages(sizes)
    found: dict[ModelPhase, Memory] = {"forward": _largest(resident(sizes, at) + _forward(sizes, at) for at in stages)}
    found["offloaded"] = Memory()
    if sizes.learns:
        found["backward"] = _largest(at_stage(sizes, at) for at in stages)
        found["step"] = _largest(resident(sizes, at) for at in stages)
        found["publish"] = _largest(resident(sizes, at) + _publish(sizes) for at in stages)
    return found


def at_stage(sizes: MegatronSizes, stage: int) -> Memory:
    """Of one stage in the backward phase."""
    return resident(sizes, stage) + _backward(sizes, stage)


def fullest_stage(sizes: MegatronSizes) -> int:
    """Whose rank keeps the most between phases."""
    return max(_extreme_stages(sizes), key=lambda stage: resident(sizes, stage).total)


def _extreme_stages(sizes: MegatronSizes) -> Sequence[int]:
    """The first keeps the most in flight, the last has the output layer; those between have less of both."""
    return sorted({0, sizes.training.pipeline_parallel - 1})


def _largest(instants: Iterator[Memory]) -> Memory:
    return max(instants, key=lambda memory: memory.total)


def _forward(sizes: MegatronSizes, stage: int) -> Memory:
    hidden = sizes.item_bytes * sizes.shape.hidden * sizes.cut_tokens
    layer = max(max(_attending(sizes), _feeding(sizes, at)) for at in sizes.layers(stage) or [False])
    inside = Memory(activations=2 * hidden + layer)
    return max(inside, _head(sizes, stage, hidden), key=lambda memory: memory.total)


def _backward(sizes: MegatronSizes, stage: int) -> Memory:
    """At the end of the last warm-up pass: everything in flight is kept; or inside a layer that is computed again."""
    hidden = sizes.item_bytes * sizes.shape.hidden * sizes.cut_tokens
    kept = int(
        sizes.in_flight(stage) * sum(count * _kept(sizes, mixture) for mixture, count in sizes.layers(stage).items())
    )
    virtual = sizes.training.virtual_pipeline
    if stage < sizes.training.pipeline_parallel - 1 or virtual > 1:
        kept += int(sizes.in_flight(stage) * virtual * hidden)  # what is sent on: the backward pass starts from it
    layer = max(_returning(sizes, at) for at in sizes.layers(stage) or [False])
    inside = Memory(activations=kept + hidden + layer)
    head = Memory(activations=kept) + _head(sizes, stage, hidden)
    return max(inside, head, key=lambda memory: memory.total)


def _head(sizes: MegatronSizes, stage: int, hidden: int) -> Memory:
    """The last stage's output layer on the tokens that are predicted: one chunk's logits, and what is made of them."""
    if stage < sizes.training.pipeline_parallel - 1:
        return Memory()
    shape, training, item = sizes.shape, sizes.training, sizes.item_bytes
    predicted = sizes.tokens if sizes.predicted is None else sizes.predicted
    predicted = -(-predicted // training.context_parallel)
    whole = item * shape.hidden * (predicted + (sizes.own_tokens if training.sequence_parallel else 0))
    if sizes.value_head:
        return Memory(activations=2 * hidden + whole)
    chunk = min(predicted * -(-shape.vocabulary // training.tensor_parallel), _LOGITS)
    return Memory(activations=2 * hidden + whole, logits=16 * chunk)


def _saved(sizes: MegatronSizes, mixture: bool) -> int:
    """Bytes that autograd keeps of a layer without checkpointing; of each norm input and output."""
    between = sizes.cut_tokens * sizes.item_bytes * 4 * sizes.shape.hidden
    return between + _attending(sizes) + _feeding(sizes, mixture)


def _attending(sizes: MegatronSizes) -> int:
    """Bytes of queries, keys and values before and after they are rotated, and of what attention makes of them."""
    shape, attention, item = sizes.shape, sizes.shape.attention, sizes.item_bytes
    numbers = 3 * attention.query + 2 * attention.key + attention.value
    own = sizes.own_tokens * (item * numbers + 4 * shape.heads) // sizes.training.tensor_parallel
    return own + sizes.own_tokens * item * 4 * shape.head_dim


def _feeding(sizes: MegatronSizes, mixture: bool) -> int:
    """Bytes inside a feed-forward layer."""
    if mixture:
        return _saved_in_mixture(sizes)
    return sizes.own_tokens * sizes.item_bytes * 5 * sizes.shape.width // sizes.training.tensor_parallel


def _saved_in_mixture(sizes: MegatronSizes) -> int:
    """Tokens by the experts that they are sent to, which are busy alike."""
    shape, item = sizes.shape, sizes.item_bytes
    a_choice = shape.hidden + 6 * shape.expert_width // sizes.training.expert_ranks
    router = 4 * 4 * shape.experts
    return sizes.cut_tokens * (item * shape.active_experts * a_choice + router)


def _kept(sizes: MegatronSizes, mixture: bool) -> int:
    """Bytes of a layer that wait for its backward pass: with checkpointing its input."""
    if sizes.training.activation_checkpointing:
        return sizes.item_bytes * sizes.shape.hidden * sizes.cut_tokens
    return _saved(sizes, mixture)


def _returning(sizes: MegatronSizes, mixture: bool) -> int:
    """Bytes more inside a layer's backward pass: gradients of its widest part, and what is computed again."""
    shape, item, training = sizes.shape, sizes.item_bytes, sizes.training
    if mixture:
        wide = sizes.cut_tokens * item * shape.active_experts * 2 * shape.expert_width // training.expert_ranks
    else:
        wide = sizes.own_tokens * item * 2 * shape.width // training.tensor_parallel
    return wide + (_saved(sizes, mixture) if training.activation_checkpointing else 0)


def _publish(sizes: MegatronSizes) -> Memory:
    """One tensor at a time, gathered and whole."""
    shape = sizes.shape
    experts = 3 * shape.hidden * shape.expert_width * shape.experts
    largest = max(shape.embedding, 2 * shape.hidden * shape.width, experts)
    return Memory(buffers=2 * sizes.item_bytes * largest)
