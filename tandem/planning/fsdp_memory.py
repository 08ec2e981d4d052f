"""How many bytes a rank holds of one model, phase by phase and by cause: formulas, no torch, microseconds.

They follow what the engine of `tandem/training/fsdp.py` does on a GPU; tests/unit/test_planning_trace.py holds them to
a fake step of the same sizes. What grows with the model is exact, what grows with the tokens follows the tensors that
autograd keeps. Peaks are those of single instants: the head's, a layer's.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from tandem.config.optimizer import OptimizerConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.planning.model_shape import ModelShape
from tandem.planning.tower_memory import KEPT_FEATURES, KEPT_PIXELS, TowerPass

ModelPhase = Literal["forward", "backward", "step", "publish", "generation", "offloaded"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device at the instant when it holds the most, by cause."""

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
    predicted: int | None = None
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
    def own_predicted(self) -> int:
        predicted = self.tokens if self.predicted is None else self.predicted
        return -(-predicted // self.context_parallel)

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
"""`_NUMBERS_AT_ONCE` of `tandem/training/optimizer.py`: parameters whose state visits the device together."""


def adapted_edges(shape: ModelShape) -> int:
    """Inputs and outputs of the linear layers of a layer that get an adapter: all but routers and experts."""
    attention, hidden = shape.attention, shape.hidden
    edges = 4 * hidden + 2 * attention.query + attention.key + attention.value
    width = shape.shared_width if any(shape.mixtures) else shape.width
    return edges + 3 * (hidden + width) if width else edges


def phases(sizes: FsdpSizes) -> dict[ModelPhase, Memory]:
    """The peak of each phase of one model; what other models of the process hold is not in it."""
    found: dict[ModelPhase, Memory] = {"forward": _forward(sizes), "offloaded": Memory()}
    if sizes.learns:
        found |= {"backward": _backward(sizes), "step": _step(sizes), "publish": _publish(sizes)}
    return found


def resident(sizes: FsdpSizes) -> Memory:
    """Between phases, on the device."""
    learning, tower = sizes.learning, sizes.item_bytes * sizes.idle_tower
    master, frozen = 4 * learning, sizes.item_bytes * (sizes.body + sizes.head - learning)
    if sizes.sharded:
        if sizes.cpu_offload:
            return Memory(weights=tower)
        moments = 0 if sizes.optimizer_offload else sizes.moments
        shards = (master + frozen - tower) // sizes.shards
        return Memory(weights=shards + tower, optimizer=moments // sizes.shards)
    masters = master if sizes.item_bytes != 4 else 0
    on_host = sizes.cpu_offload or sizes.optimizer_offload
    return Memory(weights=sizes.item_bytes * learning + frozen, optimizer=0 if on_host else masters + sizes.moments)


def kept_on_host(sizes: FsdpSizes) -> int:
    """Bytes of host memory that `cpu_offload` or `optimizer_offload` takes at all times, for it or on its way."""
    learning = sizes.learning
    if sizes.sharded:
        frozen = sizes.item_bytes * (sizes.body + sizes.head - learning - sizes.idle_tower)
        whole = sizes.moments + (4 * learning + frozen if sizes.cpu_offload else 0)
        return whole // sizes.shards if sizes.cpu_offload or sizes.optimizer_offload else 0
    masters = 4 if sizes.cpu_offload or sizes.item_bytes != 4 else 0
    return sizes.moments + masters * learning if sizes.cpu_offload or sizes.optimizer_offload else 0


def features_on_host(sizes: FsdpSizes) -> int:
    """Bytes of host memory that a frozen tower's features take while the model waits there."""
    return _seen(sizes).total


def pixels_on_host(sizes: FsdpSizes) -> int:
    """Bytes of host memory that a tower keeps of pictures at all times."""
    return KEPT_PIXELS if sizes.tower else 0


def copied_for_checkpoint(sizes: FsdpSizes) -> int:
    """Bytes of host memory that a rank keeps from the first checkpoint on: copies, from which it is written while
    training goes on (`tandem/training/copies.py`). Of the weights that the rank writes, masters, and moments."""
    shape = sizes.shape
    if not sizes.learns:
        return 0
    head = [sizes.head] if sizes.value_head or not shape.tied else []
    parts = [shape.embedding, *(shape.layer(index) for index in range(shape.layers)), shape.hidden, *head]
    adapters = sizes.learning if sizes.lora_rank else 0
    weights = sizes.item_bytes * (_largest_file(parts, sizes.ranks) + adapters)
    return weights + (4 * sizes.learning + sizes.moments) // sizes.shards


def _largest_file(parts: Sequence[int], ranks: int) -> int:
    """Parameters of the rank that writes the most: as `tandem/models/directory.py` deals out layers."""
    written, before = [0] * ranks, 0
    for size in parts:
        written[min(ranks - 1, before * ranks // sum(parts))] += size
        before += size
    return max(written)


def _largest(instants: Iterable[Memory]) -> Memory:
    return max(instants, key=lambda memory: memory.total)


def _forward(sizes: FsdpSizes) -> Memory:
    tower = sizes.tower
    if tower is None:
        return resident(sizes) + _largest(_forward_instants(sizes))
    hidden = sizes.own_tokens * sizes.item_bytes * sizes.shape.hidden
    read = Memory(activations=2 * tower.features() + hidden * (2 if tower.shape.deeper else 1))
    seeing = Memory(gathered=_of_tower(sizes), activations=tower.passing())
    return (
        resident(sizes) + _seen(sizes) + _largest((seeing, *(instant + read for instant in _forward_instants(sizes))))
    )


def _seen(sizes: FsdpSizes) -> Memory:
    """Features that stay from pass to pass, where the tower does."""
    return Memory(buffers=KEPT_FEATURES if sizes.tower and not sizes.trains_tower else 0)


def _of_tower(sizes: FsdpSizes) -> int:
    """Weights that are whole while pictures pass through the tower: the output layer's, and two of its layers'."""
    shape = sizes.shape.tower
    return _whole(sizes, sizes.head + sizes.rest + shape.rest + 2 * shape.layer) if shape else 0


def _forward_instants(sizes: FsdpSizes) -> Iterator[Memory]:
    shape, token = sizes.shape, sizes.own_tokens * sizes.item_bytes
    hidden, rotation = token * shape.hidden, 3 * token * shape.head_dim
    head, rest, layer = _whole(sizes, sizes.head), _whole(sizes, sizes.rest), _whole(sizes, sizes.layer)
    yield Memory(gathered=2 * head + head // sizes.shards)  # the head's shards as they come together
    yield Memory(gathered=head + 2 * (rest + layer), activations=hidden)  # the body's first parameters
    gathered = head + rest + 2 * layer
    yield Memory(gathered=gathered + layer, activations=hidden)  # a layer as it comes together
    yield Memory(gathered=gathered, activations=token * _feed_forward_numbers(sizes) + 3 * hidden + rotation)
    yield Memory(gathered=gathered, activations=_merging(sizes) + 2 * hidden + rotation)
    yield Memory(gathered=head + rest, activations=2 * hidden, logits=_logits(sizes))


def _whole(sizes: FsdpSizes, parameters: int) -> int:
    """Weights that lie in shards, gathered: bytes."""
    return sizes.item_bytes * parameters if sizes.sharded else 0


def _feed_forward_numbers(sizes: FsdpSizes) -> int:
    """Numbers a token inside a feed-forward layer of a pass without gradients."""
    shape = sizes.shape
    dense = (4 if sizes.lora_rank else 3) * shape.width
    mixture = shape.active_experts * max(4 * shape.hidden, shape.hidden + 4 * shape.expert_width) + shape.hidden
    return max(dense, mixture if shape.experts else 0)


def _merging(sizes: FsdpSizes) -> int:
    """Bytes inside attention, where the answers' share of their prompts is added in float32."""
    attention, token = sizes.shape.attention, sizes.own_tokens * sizes.item_bytes
    merged = 12 * sizes.own_predicted * attention.query if sizes.shared_prompts else 0
    return token * (3 * attention.query + attention.key + attention.value) + merged


def _logits(sizes: FsdpSizes) -> int:
    """What the head holds at most: a tile, or two float32 ones of whole rows, and gradients of hidden states."""
    if sizes.value_head:
        return 8 * sizes.own_predicted
    hidden, words = sizes.shape.hidden, sizes.shape.vocabulary
    if words > _TILE:
        tokens = min(sizes.own_predicted, _TILE)
        tiles = sizes.item_bytes * tokens * _TILE + 4 * (tokens + _TILE) * hidden
    else:
        tokens = min(sizes.own_predicted, _TILE * _TILE // words)
        tiles = 8 * tokens * words + 4 * tokens * hidden
    return tiles + _predicted_hidden(sizes)


def _predicted_hidden(sizes: FsdpSizes) -> int:
    return sizes.own_predicted * sizes.item_bytes * sizes.shape.hidden


def _saved_before(sizes: FsdpSizes) -> int:
    """Numbers a token that autograd keeps of a layer's attention and norms."""
    shape, attention = sizes.shape, sizes.shape.attention
    numbers = 2 * attention.query + attention.key + attention.value
    if shape.family in LEAN:
        return numbers + 4 * shape.hidden + attention.normed
    return numbers + 8 * shape.hidden + 3 * attention.normed


def _saved(sizes: FsdpSizes, layer: int) -> int:
    """Bytes that autograd keeps of a layer without checkpointing."""
    shape, numbers = sizes.shape, _saved_before(sizes)
    if shape.mixtures[layer]:
        numbers += shape.active_experts * (4 * shape.expert_width + 2 * shape.hidden) + 4 * shape.shared_width
    else:
        numbers += 4 * shape.width
    return sizes.own_tokens * (sizes.item_bytes * numbers + 4 * (shape.heads + 2))


def _kept(sizes: FsdpSizes, layer: int) -> int:
    """Bytes of a layer that wait for its backward pass."""
    if not sizes.checkpointing:
        return _saved(sizes, layer)
    attended = sizes.item_bytes * sizes.shape.attention.query + 4 * sizes.shape.heads
    numbers = sizes.item_bytes * sizes.shape.hidden + (attended if sizes.keeps_attention else 0)
    return sizes.own_tokens * numbers


def _backward(sizes: FsdpSizes) -> Memory:
    tower = sizes.tower
    if tower is None:
        return resident(sizes) + _largest(_backward_instants(sizes))
    seeing = Memory(gathered=_of_tower(sizes), gradients=_gradients(sizes), activations=tower.passing())
    if not sizes.trains_tower:
        return resident(sizes) + _seen(sizes) + _largest((seeing, *_backward_instants(sizes)))
    own = Memory(activations=tower.kept() + tower.features())
    returning = replace(seeing, activations=tower.returning())
    return resident(sizes) + _largest((returning, *(instant + own for instant in _backward_instants(sizes))))


def _backward_instants(sizes: FsdpSizes) -> Iterator[Memory]:
    """From the second micro-batch on, when gradients of the first are there."""
    hidden = sizes.own_tokens * sizes.item_bytes * sizes.shape.hidden
    rotation = 3 * sizes.own_tokens * sizes.item_bytes * sizes.shape.head_dim
    head, rest = _whole(sizes, sizes.head), _whole(sizes, sizes.rest)
    gradients, layers = _gradients(sizes), range(sizes.shape.layers)
    kept = sum(_kept(sizes, layer) for layer in layers) + rotation
    yield Memory(gathered=2 * head + head // sizes.shards, gradients=gradients)
    yield Memory(gathered=head + rest, gradients=gradients, activations=kept + 2 * hidden, logits=_logits(sizes))
    for layer in {layers[-1], layers[max(0, len(layers) - 2)]}:
        yield _in_layer(sizes, layer, kept)
    if sizes.all_learns:
        for memory in _at_embedding(sizes):
            yield memory + Memory(gathered=head, gradients=gradients, activations=hidden)


def _at_embedding(sizes: FsdpSizes) -> Iterator[Memory]:
    """The end of the backward pass: the embedding's gradient, beside that of the first layer on its way."""
    own, exact = sizes.item_bytes * sizes.shape.embedding, 4 * sizes.shape.embedding
    rest, travelling = _whole(sizes, sizes.rest), _travelling(sizes)
    if not sizes.sharded or (sizes.shape.tied and not sizes.value_head):  # it is added to the output layer's
        yield Memory(gathered=rest, gradients=travelling + own + (exact if sizes.item_bytes != 4 else 0))
    else:
        yield Memory(gathered=rest, gradients=travelling + own)
        yield Memory(gradients=own + (0 if sizes.reduce_once else exact + exact // sizes.shards))


def _gradients(sizes: FsdpSizes) -> int:
    """What is there of earlier micro-batches: float32, whole or a rank's own part; the head's whole in any case."""
    if not sizes.sharded or sizes.reduce_once:
        return 4 * sizes.learning
    head = sizes.head if sizes.head_learns else 0
    return 4 * head + (0 if sizes.cpu_offload else 4 * (sizes.learning - head) // sizes.shards)


def _travelling(sizes: FsdpSizes) -> int:
    """A layer's gradients in float32, whole, on their way to the ranks that sum them."""
    return 4 * sizes.layer if sizes.sharded and sizes.all_learns and not sizes.reduce_once else 0


def _in_layer(sizes: FsdpSizes, layer: int, kept: int) -> Memory:
    """Inside a feed-forward layer's backward pass, while the gradients of the layer after it travel; or at its end."""
    shape, token = sizes.shape, sizes.own_tokens * sizes.item_bytes
    hidden, later = token * shape.hidden, sizes.shape.layers - 1 - layer
    done = later * _kept(sizes, layer)
    before = Memory(
        gathered=_whole(sizes, sizes.head + sizes.rest + min(1, layer) * sizes.layer),
        gradients=_gradients(sizes),
        activations=kept - done + 2 * hidden,
    )
    recomputed = 0
    if sizes.checkpointing:  # a layer's input is kept already, and what is selected
        recomputed = _saved(sizes, layer) - (_kept(sizes, layer) if shape.family in LEAN else 0)
    numbers = 3 * shape.active_experts * shape.hidden if shape.mixtures[layer] else 2 * shape.width
    inside = before + Memory(
        gathered=_whole(sizes, sizes.layer),
        gradients=_own_gradient(sizes, layer) + (_travelling(sizes) if later else 0),
        activations=recomputed + token * numbers,
        logits=_predicted_hidden(sizes),
    )
    if not sizes.sharded or not sizes.all_learns:
        return inside
    # Of the layer's own gradients: all there, in the dtype of the pass; then in float32, with none of its activations.
    own = sizes.item_bytes * sizes.layer
    there = before + Memory(
        gathered=_whole(sizes, sizes.layer),
        gradients=own + (_travelling(sizes) if later else 0),
        activations=token * _saved_before(sizes) if sizes.checkpointing else 0,
    )
    end = before + Memory(
        gradients=own + _travelling(sizes) + _travelling(sizes) // sizes.shards, activations=-_kept(sizes, layer)
    )
    return _largest((inside, there, end))


def _own_gradient(sizes: FsdpSizes, layer: int) -> int:
    """Of the feed-forward layer's last matrix, before it is summed in float32."""
    if not sizes.all_learns or sizes.shape.mixtures[layer]:
        return 0
    cast = 4 if not sizes.sharded and sizes.item_bytes != 4 else 0
    return (sizes.item_bytes + cast) * sizes.shape.hidden * sizes.shape.width


def _step(sizes: FsdpSizes) -> Memory:
    """Gradients are a rank's own by now."""
    own = sizes.learning // (sizes.shards if sizes.sharded else 1)
    if sizes.sharded and sizes.cpu_offload:
        return Memory()
    matrix = sizes.shape.hidden * (sizes.lora_rank or max(sizes.shape.width, sizes.shape.attention.query))
    buffers = sizes.optimizer.step_bytes(matrix, sizes.sharded)
    visit = _visit(sizes, own, buffers) if sizes.optimizer_offload else Memory(buffers=buffers)
    return resident(sizes) + Memory(gradients=4 * own) + visit


def _visit(sizes: FsdpSizes, own: int, buffers: int) -> Memory:
    """Of the parameters that step together, some at a time, those that take the most: an embedding, or matrices."""
    masters = 0 if sizes.sharded or sizes.item_bytes == 4 else 4
    matrices = min(own, sizes.matrices // (sizes.shards if sizes.sharded else 1))
    most, chosen = max(_VISITING, sizes.shape.embedding // sizes.shards), sizes.optimizer
    others = min(own if chosen.moves_embeddings else own - matrices, most)
    together = min(matrices, _VISITING)
    of_others = Memory(
        optimizer=masters * others + chosen.state_bytes(others, 0), buffers=buffers if chosen.moves_embeddings else 0
    )
    of_matrices = Memory(optimizer=masters * together + chosen.state_bytes(together, together), buffers=buffers)
    return _largest((of_others, of_matrices))


def _publish(sizes: FsdpSizes) -> Memory:
    """One tensor at a time, whole."""
    shape, item = sizes.shape, sizes.item_bytes
    matrix = shape.hidden * max(shape.width, shape.attention.query)
    if sizes.lora_rank:
        return resident(sizes) + Memory(buffers=12 * matrix + (2 * item * matrix if sizes.sharded else 0))
    if not sizes.sharded:
        return resident(sizes)
    largest = max(shape.embedding, matrix, 2 * shape.experts * shape.hidden * shape.expert_width)
    return resident(sizes) + Memory(buffers=item * (2 * largest + largest // sizes.shards))


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
        row = engine.row_tokens * shape.attending * (attention.key + attention.value) * engine.item_bytes
        row += shape.state_bytes(engine.item_bytes)
    else:
        row = shape.kv_bytes(engine.row_tokens, engine.item_bytes)
    logits = engine.rows * shape.vocabulary * 4 * 3
    return Memory(weights=weights // share, cache=engine.rows * row // share, logits=logits)
