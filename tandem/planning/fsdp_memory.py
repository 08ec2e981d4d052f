"""How many bytes a rank holds of one model, phase by phase and by cause: formulas, no torch, microseconds.

They follow what the engine of `tandem/training/fsdp.py` does on a GPU; tests/unit/test_planning_trace.py holds them to
a fake step of that engine. What grows with the model is exact, what grows with the tokens follows the tensors that
autograd keeps. Peaks are those of single moments: the head's, a layer's.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from tandem.config.optimizer import OptimizerConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.planning.model_shape import ModelShape
from tandem.planning.tower_memory import KEPT_FEATURES, KEPT_PIXELS, TowerPass

Phase = Literal["forward", "backward", "step", "publish", "generation", "offloaded"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device at the moment when it holds the most, by cause."""

    weights: int = 0
    """A rank's own parameters."""
    optimizer: int = 0
    """Masters, where they are not the weights, and moments."""
    gradients: int = 0
    gathered: int = 0
    """Whole weights of what is being computed."""
    activations: int = 0
    logits: int = 0
    cache: int = 0
    """Keys and values of rows that are being generated."""
    buffers: int = 0
    """What travels."""
    context: int = 0
    """Of the CUDA context, NCCL and kernels' workspaces: an allowance."""
    slack: int = 0
    """Of the allocator, which cannot fill every gap: an allowance."""

    @property
    def total(self) -> int:
        return sum(getattr(self, cause) for cause in _CAUSES)

    def causes(self) -> dict[str, int]:
        return {cause: getattr(self, cause) for cause in _CAUSES}

    def __add__(self, other: "Memory") -> "Memory":
        others = other.causes()
        return Memory(**{cause: size + others[cause] for cause, size in self.causes().items()})


_CAUSES = tuple(cause.name for cause in fields(Memory))


@dataclass(frozen=True, slots=True)
class FsdpSizes:
    """A model in the PyTorch engine, on `ranks` ranks of GPUs."""

    shape: ModelShape
    ranks: int = 1
    item_bytes: int = 2
    """Of a number in forward and backward passes: `model.dtype`."""
    learns: bool = True
    value_head: bool = False
    """One number a token in the place of logits."""
    tokens: int = 16_384
    """Of the largest micro-batch."""
    scored: int | None = None
    """Its tokens whose log-probs are wanted: those of answers. Default: all."""
    shared_prompts: bool = True
    """Answers continue prompts that are computed once for several of them."""
    shard_size: int | None = None
    cpu_offload: bool = False
    optimizer_offload: bool = False
    optimizer: OptimizerConfig = field(default_factory=lambda: FsdpTrainingConfig().optimizer)
    reduce_once: bool = False
    checkpointing: bool = False
    keeps_attention: bool = False
    """With `checkpointing`: `activation_checkpointing: selective`."""
    context_parallel: int = 1
    lora_rank: int = 0
    """Adapters beside all linear layers learn, alone, or with a value head."""
    tower_learns: bool = True
    """Of a model that sees pictures; with adapters its tower never does."""
    picture_tokens: int = 0
    """That the pictures of the largest micro-batch take of its tokens."""

    @property
    def sharded(self) -> bool:
        return self.ranks > 1

    @property
    def shards(self) -> int:
        return self.shard_size or self.ranks

    @property
    def own_tokens(self) -> int:
        return -(-self.tokens // self.context_parallel)

    @property
    def own_scored(self) -> int:
        scored = self.tokens if self.scored is None else self.scored
        return -(-scored // self.context_parallel)

    @property
    def head(self) -> int:
        """Parameters outside the body: the output layer's."""
        return self.shape.hidden + 1 if self.value_head else self.shape.embedding

    @property
    def rest(self) -> int:
        """Parameters of the body that are in no layer."""
        return self.shape.hidden + (self.shape.embedding if self.value_head or not self.shape.tied else 0)

    @property
    def adapters(self) -> int:
        """Parameters of the adapters of one layer."""
        return self.lora_rank * adapted_edges(self.shape)

    @property
    def layer(self) -> int:
        """Parameters of the largest layer."""
        return self.shape.largest_layer + self.adapters

    @property
    def body(self) -> int:
        return self.shape.all_layers + self.shape.layers * self.adapters + self.rest + self.shape.tower_parameters

    @property
    def learning(self) -> int:
        if not self.learns:
            return 0
        if self.lora_rank:
            return self.shape.layers * self.adapters + (self.head if self.value_head else 0)
        return self.body + self.head - self.idle_tower

    @property
    def moments(self) -> int:
        """Bytes that the optimizer keeps of what learns besides masters, over all ranks."""
        return self.optimizer.state_bytes(self.learning, self.matrices)

    @property
    def matrices(self) -> int:
        """Parameters of layers' matrices that learn: neither embeddings, output layers nor experts; norms, which are
        counted, are too few to matter."""
        if self.lora_rank:
            return self.shape.layers * self.adapters if self.learns else 0
        return max(0, self.learning - self.head - self.rest - self.shape.expert_parameters)

    @property
    def trains_tower(self) -> bool:
        return self.shape.tower is not None and self.tower_learns and self.all_learns

    @property
    def idle_tower(self) -> int:
        """Parameters of a tower that does not learn, which every rank has whole."""
        return 0 if self.trains_tower else self.shape.tower_parameters

    @property
    def tower(self) -> TowerPass | None:
        """The pass of the largest micro-batch's pictures."""
        if self.shape.tower is None or not self.picture_tokens:
            return None
        return TowerPass(self.shape.tower, self.picture_tokens, self.item_bytes, self.checkpointing)

    @property
    def all_learns(self) -> bool:
        return self.learns and not self.lora_rank

    @property
    def head_learns(self) -> bool:
        return self.all_learns or (self.learns and self.value_head)


LEAN = ("llama", "qwen2", "qwen3")
"""Families whose layers `tandem/models/lean.py` computes; the others' norms keep float32 copies."""
_TILE = 8192
"""`tandem/training/tiled_head.py`: tokens and words of the vocabulary whose logits exist at once on a GPU."""

_VISITING = 2**26
"""`tandem/training/optimizer.py`: parameters whose state visits the device together."""


def adapted_edges(shape: ModelShape) -> int:
    """Inputs and outputs of the linear layers of a layer that get an adapter: all but routers and experts."""
    attention, hidden = shape.attention, shape.hidden
    edges = 4 * hidden + 2 * attention.query + attention.key + attention.value
    width = shape.shared_width if any(shape.mixtures) else shape.width
    return edges + 3 * (hidden + width) if width else edges


def phases(engine: FsdpSizes) -> dict[Phase, Memory]:
    """The peak of each phase of one model; what other models of the process hold is not in it."""
    found: dict[Phase, Memory] = {"forward": _forward(engine), "offloaded": Memory()}
    if engine.learns:
        found |= {"backward": _backward(engine), "step": _step(engine), "publish": _publish(engine)}
    return found


def resident(engine: FsdpSizes) -> Memory:
    """Between phases, on the device."""
    learning, tower = engine.learning, engine.item_bytes * engine.idle_tower
    master, frozen = 4 * learning, engine.item_bytes * (engine.body + engine.head - learning)
    if engine.sharded:
        if engine.cpu_offload:
            return Memory(weights=tower)
        moments = 0 if engine.optimizer_offload else engine.moments
        shards = (master + frozen - tower) // engine.shards
        return Memory(weights=shards + tower, optimizer=moments // engine.shards)
    masters = master if engine.item_bytes != 4 else 0
    on_host = engine.cpu_offload or engine.optimizer_offload
    return Memory(weights=engine.item_bytes * learning + frozen, optimizer=0 if on_host else masters + engine.moments)


def kept_on_host(engine: FsdpSizes) -> int:
    """Bytes of host memory that `cpu_offload` or `optimizer_offload` takes at all times, for it or on its way."""
    learning = engine.learning
    if engine.sharded:
        frozen = engine.item_bytes * (engine.body + engine.head - learning - engine.idle_tower)
        whole = engine.moments + (4 * learning + frozen if engine.cpu_offload else 0)
        return whole // engine.shards if engine.cpu_offload or engine.optimizer_offload else 0
    masters = 4 if engine.cpu_offload or engine.item_bytes != 4 else 0
    return engine.moments + masters * learning if engine.cpu_offload or engine.optimizer_offload else 0


def features_on_host(engine: FsdpSizes) -> int:
    """Bytes of host memory that a frozen tower's features take while the model waits there."""
    return _seen(engine).total


def pixels_on_host(engine: FsdpSizes) -> int:
    """Bytes of host memory that a tower keeps of pictures at all times."""
    return KEPT_PIXELS if engine.tower else 0


def copied_for_checkpoint(engine: FsdpSizes) -> int:
    """Bytes of host memory that a rank keeps from the first checkpoint on: copies, from which it is written while
    training goes on (`tandem/training/copies.py`). Of the weights that the rank writes, masters, and moments."""
    shape = engine.shape
    if not engine.learns:
        return 0
    head = [engine.head] if engine.value_head or not shape.tied else []
    parts = [shape.embedding, *(shape.layer(index) for index in range(shape.layers)), shape.hidden, *head]
    adapters = engine.learning if engine.lora_rank else 0
    weights = engine.item_bytes * (_largest_file(parts, engine.ranks) + adapters)
    return weights + (4 * engine.learning + engine.moments) // engine.shards


def _largest_file(parts: Sequence[int], ranks: int) -> int:
    """Parameters of the rank that writes the most: as `tandem/models/directory.py` deals out layers."""
    written, before = [0] * ranks, 0
    for size in parts:
        written[min(ranks - 1, before * ranks // sum(parts))] += size
        before += size
    return max(written)


def _largest(moments: Iterable[Memory]) -> Memory:
    return max(moments, key=lambda memory: memory.total)


def _forward(engine: FsdpSizes) -> Memory:
    tower = engine.tower
    if tower is None:
        return resident(engine) + _largest(_forward_moments(engine))
    hidden = engine.own_tokens * engine.item_bytes * engine.shape.hidden
    read = Memory(activations=2 * tower.features() + hidden * (2 if tower.shape.deeper else 1))
    seeing = Memory(gathered=_of_tower(engine), activations=tower.passing())
    return (
        resident(engine) + _seen(engine) + _largest((seeing, *(moment + read for moment in _forward_moments(engine))))
    )


def _seen(engine: FsdpSizes) -> Memory:
    """Features that stay from pass to pass, where the tower does."""
    return Memory(buffers=KEPT_FEATURES if engine.tower and not engine.trains_tower else 0)


def _of_tower(engine: FsdpSizes) -> int:
    """Weights that are whole while pictures pass through the tower: the output layer's, and two of its layers'."""
    shape = engine.shape.tower
    return _whole(engine, engine.head + engine.rest + shape.rest + 2 * shape.layer) if shape else 0


def _forward_moments(engine: FsdpSizes) -> Iterator[Memory]:
    shape, token = engine.shape, engine.own_tokens * engine.item_bytes
    hidden, rotation = token * shape.hidden, 3 * token * shape.head_dim
    head, rest, layer = _whole(engine, engine.head), _whole(engine, engine.rest), _whole(engine, engine.layer)
    yield Memory(gathered=2 * head + head // engine.shards)  # the head's shards as they come together
    yield Memory(gathered=head + 2 * (rest + layer), activations=hidden)  # the body's first parameters
    gathered = head + rest + 2 * layer
    yield Memory(gathered=gathered + layer, activations=hidden)  # a layer as it comes together
    yield Memory(gathered=gathered, activations=token * _feed_forward_numbers(engine) + 3 * hidden + rotation)
    yield Memory(gathered=gathered, activations=_merging(engine) + 2 * hidden + rotation)
    yield Memory(gathered=head + rest, activations=2 * hidden, logits=_logits(engine))


def _whole(engine: FsdpSizes, parameters: int) -> int:
    """Weights that lie in shards, gathered: bytes."""
    return engine.item_bytes * parameters if engine.sharded else 0


def _feed_forward_numbers(engine: FsdpSizes) -> int:
    """Numbers a token inside a feed-forward layer of a pass without gradients."""
    shape = engine.shape
    dense = (4 if engine.lora_rank else 3) * shape.width
    mixture = shape.active_experts * max(4 * shape.hidden, shape.hidden + 4 * shape.expert_width) + shape.hidden
    return max(dense, mixture if shape.experts else 0)


def _merging(engine: FsdpSizes) -> int:
    """Bytes inside attention, where the answers' share of their prompts is added in float32."""
    attention, token = engine.shape.attention, engine.own_tokens * engine.item_bytes
    merged = 12 * engine.own_scored * attention.query if engine.shared_prompts else 0
    return token * (3 * attention.query + attention.key + attention.value) + merged


def _logits(engine: FsdpSizes) -> int:
    """What the head holds at most: a tile, or two float32 ones of whole rows, and gradients of hidden states."""
    if engine.value_head:
        return 8 * engine.own_scored
    hidden, words = engine.shape.hidden, engine.shape.vocabulary
    if words > _TILE:
        tokens = min(engine.own_scored, _TILE)
        tiles = engine.item_bytes * tokens * _TILE + 4 * (tokens + _TILE) * hidden
    else:
        tokens = min(engine.own_scored, _TILE * _TILE // words)
        tiles = 8 * tokens * words + 4 * tokens * hidden
    return tiles + _scored_hidden(engine)


def _scored_hidden(engine: FsdpSizes) -> int:
    return engine.own_scored * engine.item_bytes * engine.shape.hidden


def _saved_before(engine: FsdpSizes) -> int:
    """Numbers a token that autograd keeps of a layer's attention and norms."""
    shape, attention = engine.shape, engine.shape.attention
    numbers = 2 * attention.query + attention.key + attention.value
    if shape.family in LEAN:
        return numbers + 4 * shape.hidden + attention.normed
    return numbers + 8 * shape.hidden + 3 * attention.normed


def _saved(engine: FsdpSizes, layer: int) -> int:
    """Bytes that autograd keeps of a layer without checkpointing."""
    shape, numbers = engine.shape, _saved_before(engine)
    if shape.mixtures[layer]:
        numbers += shape.active_experts * (4 * shape.expert_width + 2 * shape.hidden) + 4 * shape.shared_width
    else:
        numbers += 4 * shape.width
    return engine.own_tokens * (engine.item_bytes * numbers + 4 * (shape.heads + 2))


def _kept(engine: FsdpSizes, layer: int) -> int:
    """Bytes of a layer that wait for its backward pass."""
    if not engine.checkpointing:
        return _saved(engine, layer)
    attended = engine.item_bytes * engine.shape.attention.query + 4 * engine.shape.heads
    numbers = engine.item_bytes * engine.shape.hidden + (attended if engine.keeps_attention else 0)
    return engine.own_tokens * numbers


def _backward(engine: FsdpSizes) -> Memory:
    tower = engine.tower
    if tower is None:
        return resident(engine) + _largest(_backward_moments(engine))
    seeing = Memory(gathered=_of_tower(engine), gradients=_gradients(engine), activations=tower.passing())
    if not engine.trains_tower:
        return resident(engine) + _seen(engine) + _largest((seeing, *_backward_moments(engine)))
    own = Memory(activations=tower.kept() + tower.features())
    returning = replace(seeing, activations=tower.returning())
    return resident(engine) + _largest((returning, *(moment + own for moment in _backward_moments(engine))))


def _backward_moments(engine: FsdpSizes) -> Iterator[Memory]:
    """From the second micro-batch on, when gradients of the first are there."""
    hidden = engine.own_tokens * engine.item_bytes * engine.shape.hidden
    rotation = 3 * engine.own_tokens * engine.item_bytes * engine.shape.head_dim
    head, rest = _whole(engine, engine.head), _whole(engine, engine.rest)
    gradients, layers = _gradients(engine), range(engine.shape.layers)
    kept = sum(_kept(engine, layer) for layer in layers) + rotation
    yield Memory(gathered=2 * head + head // engine.shards, gradients=gradients)
    yield Memory(gathered=head + rest, gradients=gradients, activations=kept + 2 * hidden, logits=_logits(engine))
    for layer in {layers[-1], layers[max(0, len(layers) - 2)]}:
        yield _in_layer(engine, layer, kept)
    if engine.all_learns:
        for memory in _at_embedding(engine):
            yield memory + Memory(gathered=head, gradients=gradients, activations=hidden)


def _at_embedding(engine: FsdpSizes) -> Iterator[Memory]:
    """The end of the backward pass: the embedding's gradient, beside that of the first layer on its way."""
    own, exact = engine.item_bytes * engine.shape.embedding, 4 * engine.shape.embedding
    rest, travelling = _whole(engine, engine.rest), _travelling(engine)
    if not engine.sharded or (engine.shape.tied and not engine.value_head):  # it is added to the output layer's
        yield Memory(gathered=rest, gradients=travelling + own + (exact if engine.item_bytes != 4 else 0))
    else:
        yield Memory(gathered=rest, gradients=travelling + own)
        yield Memory(gradients=own + (0 if engine.reduce_once else exact + exact // engine.shards))


def _gradients(engine: FsdpSizes) -> int:
    """What is there of earlier micro-batches: float32, whole or a rank's own part; the head's whole in any case."""
    if not engine.sharded or engine.reduce_once:
        return 4 * engine.learning
    head = engine.head if engine.head_learns else 0
    return 4 * head + (0 if engine.cpu_offload else 4 * (engine.learning - head) // engine.shards)


def _travelling(engine: FsdpSizes) -> int:
    """A layer's gradients in float32, whole, on their way to the ranks that sum them."""
    return 4 * engine.layer if engine.sharded and engine.all_learns and not engine.reduce_once else 0


def _in_layer(engine: FsdpSizes, layer: int, kept: int) -> Memory:
    """Inside a feed-forward layer's backward pass, while the gradients of the layer after it travel; or at its end."""
    shape, token = engine.shape, engine.own_tokens * engine.item_bytes
    hidden, later = token * shape.hidden, engine.shape.layers - 1 - layer
    done = later * _kept(engine, layer)
    before = Memory(
        gathered=_whole(engine, engine.head + engine.rest + min(1, layer) * engine.layer),
        gradients=_gradients(engine),
        activations=kept - done + 2 * hidden,
    )
    recomputed = 0
    if engine.checkpointing:  # a layer's input is kept already, and what is selected
        recomputed = _saved(engine, layer) - (_kept(engine, layer) if shape.family in LEAN else 0)
    numbers = 3 * shape.active_experts * shape.hidden if shape.mixtures[layer] else 2 * shape.width
    inside = before + Memory(
        gathered=_whole(engine, engine.layer),
        gradients=_own_gradient(engine, layer) + (_travelling(engine) if later else 0),
        activations=recomputed + token * numbers,
        logits=_scored_hidden(engine),
    )
    if not engine.sharded or not engine.all_learns:
        return inside
    # Of the layer's own gradients: all there, in the dtype of the pass; then in float32, with none of its activations.
    own = engine.item_bytes * engine.layer
    there = before + Memory(
        gathered=_whole(engine, engine.layer),
        gradients=own + (_travelling(engine) if later else 0),
        activations=token * _saved_before(engine) if engine.checkpointing else 0,
    )
    end = before + Memory(
        gradients=own + _travelling(engine) + _travelling(engine) // engine.shards, activations=-_kept(engine, layer)
    )
    return _largest((inside, there, end))


def _own_gradient(engine: FsdpSizes, layer: int) -> int:
    """Of the feed-forward layer's last matrix, before it is summed in float32."""
    if not engine.all_learns or engine.shape.mixtures[layer]:
        return 0
    cast = 4 if not engine.sharded and engine.item_bytes != 4 else 0
    return (engine.item_bytes + cast) * engine.shape.hidden * engine.shape.width


def _step(engine: FsdpSizes) -> Memory:
    """Gradients are a rank's own by now."""
    own = engine.learning // (engine.shards if engine.sharded else 1)
    if engine.sharded and engine.cpu_offload:
        return Memory()
    matrix = engine.shape.hidden * (engine.lora_rank or max(engine.shape.width, engine.shape.attention.query))
    buffers = engine.optimizer.step_bytes(matrix, engine.sharded)
    visit = _visit(engine, own, buffers) if engine.optimizer_offload else Memory(buffers=buffers)
    return resident(engine) + Memory(gradients=4 * own) + visit


def _visit(engine: FsdpSizes, own: int, buffers: int) -> Memory:
    """Of the parameters that step together, some at a time, those that take the most: an embedding, or matrices."""
    masters = 0 if engine.sharded or engine.item_bytes == 4 else 4
    matrices = min(own, engine.matrices // (engine.shards if engine.sharded else 1))
    most, chosen = max(_VISITING, engine.shape.embedding // engine.shards), engine.optimizer
    others = min(own if chosen.moves_embeddings else own - matrices, most)
    together = min(matrices, _VISITING)
    of_others = Memory(
        optimizer=masters * others + chosen.state_bytes(others, 0), buffers=buffers if chosen.moves_embeddings else 0
    )
    of_matrices = Memory(optimizer=masters * together + chosen.state_bytes(together, together), buffers=buffers)
    return _largest((of_others, of_matrices))


def _publish(engine: FsdpSizes) -> Memory:
    """One tensor at a time, whole."""
    shape, item = engine.shape, engine.item_bytes
    matrix = shape.hidden * max(shape.width, shape.attention.query)
    if engine.lora_rank:
        return resident(engine) + Memory(buffers=12 * matrix + (2 * item * matrix if engine.sharded else 0))
    if not engine.sharded:
        return resident(engine)
    largest = max(shape.embedding, matrix, 2 * shape.experts * shape.hidden * shape.expert_width)
    return resident(engine) + Memory(buffers=item * (2 * largest + largest // engine.shards))


@dataclass(frozen=True, slots=True)
class Generation:
    """An engine that answers prompts."""

    shape: ModelShape
    item_bytes: int = 2
    rows: int = 256
    """That run at once on one engine."""
    row_tokens: int = 2048
    """Prompt and answer, at most."""
    tensor_parallel: int = 1
    own_weights: bool = True
    """False: it generates with the trainer's own parameters."""
    whole_rows: bool = True
    """What the native engine needs where every row comes to its greatest length: it lets in no more rows than fit so.
    Else as tokens come."""


def generation(engine: Generation) -> Memory:
    """Of a device while it generates, weights and cache."""
    shape, share = engine.shape, engine.tensor_parallel
    weights = engine.item_bytes * shape.parameters if engine.own_weights else 0
    if engine.whole_rows:  # the native engine keeps what a layer's window has left behind, too
        attention = shape.attention
        row = engine.row_tokens * shape.layers * (attention.key + attention.value) * engine.item_bytes
    else:
        row = shape.kv_bytes(engine.row_tokens, engine.item_bytes)
    logits = engine.rows * shape.vocabulary * 4 * 3
    return Memory(weights=weights // share, cache=engine.rows * row // share, logits=logits)
