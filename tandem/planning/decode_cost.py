"""How long a generation engine takes for a step's answers."""

import math
from dataclasses import dataclass
from functools import cached_property

from tandem.planning.hardware import Card
from tandem.planning.model_shape import ModelShape
from tandem.planning.time import CONSTANTS, Constants, LengthDistribution, Workload, response_lengths


@dataclass(frozen=True)
class DecodeCost:
    """A generation engine on `tensor` GPUs."""

    shape: ModelShape
    card: Card
    tensor: int = 1
    item_bytes: float = 2
    """Of a weight; of keys and values always two."""
    most_rows: int | None = None
    """That run at once; None: as many as there is room for."""

    @property
    def cache_share(self) -> int:
        """GPUs that share a row's keys and values; one latent vector cannot be shared."""
        return 1 if self.shape.cached else min(self.tensor, self.shape.kv_heads)

    def iteration_s(self, rows: float, context: float, constants: Constants = CONSTANTS) -> float:
        """An iteration that gives each of `rows` a token, `context` tokens long on average."""
        shape, card = self.shape, self.card
        touched = 1 - self._missed ** (rows**constants.expert_skew)
        bandwidth = card.bytes_per_s * constants.memory_share
        reading = self.item_bytes * (self._dense + shape.expert_parameters * touched) / self.tensor / bandwidth
        peak = card.flops_per_s * (2 if self.item_bytes < 2 else 1) * constants.matmul_share
        computing = 2 * self._active * rows / self.tensor / peak
        cache = rows * self._row_bytes(context) / self.cache_share / bandwidth
        return self._latency(constants) + max(reading, computing) + cache + rows * constants.row_s

    @cached_property
    def _active(self) -> int:
        return self.shape.active_parameters

    @cached_property
    def _dense(self) -> float:
        """Parameters that every token is multiplied with."""
        return self._active - self.shape.expert_parameters * (1 - self._missed)

    @cached_property
    def _missed(self) -> float:
        """The chance that a token is not sent to an expert; without experts 1."""
        return 1 - self.shape.active_experts / max(1, self.shape.experts)

    @cached_property
    def _windows(self) -> bool:
        return any(self.shape.windows)

    def _row_bytes(self, tokens: float) -> float:
        """Keys, values and states of a row."""
        shape = self.shape
        if self._windows:
            return shape.kv_bytes(math.ceil(tokens))
        return tokens * shape.kv_bytes_per_token() + shape.state_bytes()

    def _latency(self, constants: Constants) -> float:
        layer = constants.layer_s + (constants.exchange_s if self.tensor > 1 else 0)
        if self.tensor > self.card.node:
            layer += 2 * constants.distant_s * math.log2(self.tensor / self.card.node)
        return self.shape.layers * layer + sum(self.shape.mixtures) * constants.mixture_s

    def fits(self, cache_bytes: float, workload: Workload, rows: int = 1) -> bool:
        """Whether there is room for so many of the longest rows."""
        return cache_bytes >= self.cache_bytes(workload, rows)

    def cache_bytes(self, workload: Workload, rows: int) -> float:
        """On each GPU, of so many of the longest rows."""
        return rows * self._row_bytes(workload.prompt_tokens + workload.max_response_tokens) / self.cache_share

    def room(self, cache_bytes: float, workload: Workload) -> int:
        """Rows that run at once, of three quarters of their length on average."""
        tokens = workload.prompt_tokens + 0.75 * workload.response_tokens
        rows = max(1, int(cache_bytes * self.cache_share / self._row_bytes(tokens)))
        return rows if self.most_rows is None else min(rows, self.most_rows)


def generation_s(
    decoder: DecodeCost, workload: Workload, gpus: int, cache_bytes: float, constants: Constants = CONSTANTS
) -> float:
    """Seconds until the last row of a step has ended; nothing else is decoded meanwhile.

    `cache_bytes`: room for keys and values on each GPU.
    """
    rows = workload.rows / max(1, gpus // decoder.tensor)
    running = min(rows, decoder.room(cache_bytes, workload))
    lengths = response_lengths(workload)
    turns = rows / running - 1  # of a full engine, whose rows start as others end
    full = turns * lengths.mean * decoder.iteration_s(running, _context(workload, lengths), constants)
    return full + _together_s(decoder, workload, lengths, running, constants)


def steady_generation_s(
    decoder: DecodeCost,
    workload: Workload,
    gpus: int,
    cache_bytes: float,
    steps: float = 1.0,
    constants: Constants = CONSTANTS,
) -> float:
    """Seconds a step where the rows of `steps` steps are decoded side by side, and none waits for the longest."""
    rows = workload.rows / max(1, gpus // decoder.tensor)
    running = min(steps * rows, decoder.room(cache_bytes, workload))
    lengths = response_lengths(workload)
    iteration = decoder.iteration_s(running, _context(workload, lengths), constants)
    return rows / running * lengths.mean * iteration


def _context(workload: Workload, lengths: LengthDistribution) -> float:
    """Tokens that a row has behind it, on average over the iterations."""
    return workload.prompt_tokens + lengths.weighted_mean / 2


def _together_s(
    decoder: DecodeCost, workload: Workload, lengths: LengthDistribution, rows: float, constants: Constants
) -> float:
    """Seconds until all of `rows` that start together have ended."""
    total, before, ended = 0.0, 0.0, 0.0
    for length, share in zip(lengths.tokens, lengths.shares, strict=True):
        left = max(1.0, rows * (1 - ended))
        context = workload.prompt_tokens + (before + length) / 2
        total += (length - before) * decoder.iteration_s(left, context, constants)
        before, ended = length, ended + share
    return total
