"""How long a model takes to score a step's rows, and to learn from them."""

import math
from dataclasses import dataclass

from tandem.planning.hardware import Card
from tandem.planning.model_shape import ModelShape
from tandem.planning.time import CONSTANTS, Constants, ParallelDims, Workload, response_lengths

ITEM_BYTES = 2
"""Of a weight or activation that travels: bfloat16."""
GRADIENT_BYTES = 4


HOST_BYTES_PER_S = 40e9
"""What the cores beside one GPU read and write of host memory together: an estimate, of two sockets with DDR5 for eight
GPUs; nobody has measured it here."""


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Bytes of a rank that has something in host memory."""

    a_pass: float = 0
    """Weights to the GPU, for a micro-batch's forward pass and again for its backward pass."""
    a_backward: float = 0
    """Gradients from the GPU, of a micro-batch."""
    a_step: float = 0
    """To the GPU and from it, in an optimizer step."""
    computed: float = 0
    """Read and written by the host's cores, in an optimizer step."""


IN_PLACE = HostTraffic()
"""Of a model that is on its GPUs."""


@dataclass(frozen=True, slots=True)
class Passes:
    """A model on its GPUs, and the rows that pass through it."""

    shape: ModelShape
    card: Card
    layout: ParallelDims
    workload: Workload
    constants: Constants = CONSTANTS
    host: HostTraffic = IN_PLACE
    adapters: bool = False
    """They alone learn: no matrix of the model gets a gradient, but for theirs, which are small."""

    def tokens_of(self, rows: float) -> float:
        """Tokens of the replica that has the most of these rows, which are whole; a prompt once for its siblings."""
        return math.ceil(rows / self.layout.replicas) * self._row_share()

    def _row_share(self) -> float:
        return self.workload.response_tokens + self.workload.prompt_tokens / self.workload.siblings

    def _micro_batches_of(self, tokens: float) -> float:
        return max(1.0, tokens / max(self.workload.row_tokens, self.workload.micro_batch_tokens))

    def forward_s(self) -> float:
        """A pass without gradients over all rows."""
        tokens = self.tokens_of(self.workload.rows)
        micro_batches = self._micro_batches_of(tokens)
        a_micro_batch = self._micro_batch_s(tokens / micro_batches)
        moving = self._gathering_s() + self.host.a_pass / self.card.host_bytes_per_s
        return (micro_batches + self.layout.pipeline - 1) * max(a_micro_batch, moving)

    def update_s(self) -> float:
        """All optimizer steps: forward and backward passes, and the sum of gradients over replicas."""
        steps = min(self.workload.optimizer_steps, max(1, self.workload.rows))
        tokens = self.tokens_of(self.workload.rows / steps)
        micro_batches = self._micro_batches_of(tokens)
        forwards = 2 + (not self.adapters) + self.workload.recompute
        computing = forwards * self._micro_batch_s(tokens / micro_batches)
        # forward and backward passes gather the weights, the backward pass scatters float32 gradients
        gradients = 0 if self.adapters else GRADIENT_BYTES / ITEM_BYTES
        moving = (2 + gradients) * self._gathering_s()
        moving += (2 * self.host.a_pass + self.host.a_backward) / self.card.host_bytes_per_s
        a_step = (micro_batches + self.layout.pipeline - 1) * max(computing, moving) + self._exchange_s()
        a_step += self.host.a_step / self.card.host_bytes_per_s + self.host.computed / HOST_BYTES_PER_S
        return self.workload.epochs * steps * a_step

    def _micro_batch_s(self, tokens: float) -> float:
        """A forward pass of one micro-batch of so many tokens through one pipeline stage."""
        shape, layout = self.shape, self.layout
        shared = layout.tensor * layout.context * layout.pipeline
        attention = shape.attending * (shape.attention.query + shape.heads * shape.head_dim) * self._row()
        flops = tokens * (2 * shape.active_parameters + attention + shape.mixer_flops) + self._seeing_flops(tokens)
        computing = flops / shared / (self.card.flops_per_s * self.constants.matmul_share)
        launching = sum(shape.mixtures) / layout.pipeline * self.constants.mixture_pass_s
        moving = self._tensor_s(tokens) + self._context_s(tokens) + self._expert_s(tokens) + self._handing_on_s(tokens)
        return max(computing, launching) + moving

    def _context_s(self, tokens: float) -> float:
        """What a rank gets of the keys and values of the others that share its rows, in every layer; as if nothing were
        computed meanwhile."""
        layout, shape = self.layout, self.shape
        if layout.context == 1:
            return 0.0
        size = tokens * shape.kv_bytes_per_token() / layout.pipeline / min(layout.tensor, shape.kv_heads)
        near = layout.tensor * layout.context <= self.card.node
        speed = self.card.peer_bytes_per_s if near else self.card.network_bytes_per_s
        waits = shape.layers / layout.pipeline * self.constants.exchange_s
        return waits + size * (1 - 1 / layout.context) / speed

    def _handing_on_s(self, tokens: float) -> float:
        """What a stage makes, to the next one, which waits for it: of a tensor rank its part, between nodes if there
        are several (Narayanan et al. 2021, arXiv:2104.04473, section 4.1)."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        size = tokens / (layout.tensor * layout.context) * self.shape.hidden * ITEM_BYTES
        return size / (self.card.peer_bytes_per_s if layout.gpus <= self.card.node else self.card.network_bytes_per_s)

    def _seeing_flops(self, tokens: float) -> float:
        """Of a micro-batch's pictures, once for siblings. A tower that does not learn keeps what it made of them."""
        work, tower = self.workload, self.shape.tower
        if tower is None or self.adapters or not work.tower_learns:
            return 0.0
        return tower.flops(tokens / self._row_share() * work.picture_tokens / work.siblings)

    def _row(self) -> float:
        """The length of a token's row, on average over tokens."""
        return self.workload.prompt_tokens + response_lengths(self.workload).weighted_mean

    def _tensor_s(self, tokens: float) -> float:
        """Two sums a layer over the ranks that share its matrices."""
        layout, shape = self.layout, self.shape
        if layout.tensor == 1:
            return 0.0
        bytes_a_sum = 2 * (1 - 1 / layout.tensor) * tokens / layout.context * shape.hidden * ITEM_BYTES
        within = layout.tensor <= self.card.node
        speed = self.card.peer_bytes_per_s if within else self.card.network_bytes_per_s
        return 2 * bytes_a_sum * shape.layers / layout.pipeline / speed

    def _expert_s(self, tokens: float) -> float:
        """Tokens travel to their experts, and back."""
        layout, shape, card = self.layout, self.shape, self.card
        if layout.expert == 1 or not shape.experts:
            return 0.0
        sent = 2 * tokens / (layout.tensor * layout.context) * shape.active_experts * shape.hidden * ITEM_BYTES
        distant = max(0.0, 1 - card.node / layout.expert)
        a_layer = sent * (distant / card.network_bytes_per_s + (1 - distant) / card.peer_bytes_per_s)
        return a_layer * sum(shape.mixtures) / layout.pipeline

    def _gathering_s(self) -> float:
        """FSDP: all weights to all ranks, once."""
        if not self.layout.sharded:
            return 0.0
        return self._travel_s(ITEM_BYTES * self.shape.parameters, self.layout.gpus)

    def _exchange_s(self) -> float:
        """Without FSDP, gradients are summed and new weights gathered over the ranks that hold the same ones. These are
        neighbours, as in Megatron-Core: tensor ranks lie together, then replicas, then stages."""
        layout, shape = self.layout, self.shape
        if layout.sharded:
            return 0.0
        degree = layout.tensor * layout.pipeline
        dense = (shape.parameters - shape.expert_parameters) / degree
        routed = shape.expert_parameters / (layout.pipeline * max(layout.expert, layout.tensor))
        size = GRADIENT_BYTES + ITEM_BYTES
        copies = layout.gpus // degree
        expert_copies = max(1, layout.gpus // (layout.pipeline * max(layout.expert, layout.tensor)))
        apart = max(layout.expert, layout.tensor)
        return self._travel_s(size * dense, copies, layout.tensor) + self._travel_s(size * routed, expert_copies, apart)

    def _travel_s(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each of `ranks` has `size` bytes of which all hold a share, inside nodes first, then between
        them; the ranks are `stride` apart."""
        if ranks <= 1:
            return 0.0
        inside = max(1, min(ranks, self.card.node // stride))
        nodes = ranks / inside
        seconds = size * (1 - 1 / inside) / self.card.peer_bytes_per_s
        return seconds + size / inside * (1 - 1 / nodes) / self.card.network_bytes_per_s
