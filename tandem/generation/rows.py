"""The rows that decode now: their state by slot, in arrays, so that a step's Python does not grow with the rows.

Suffix: `_B` the rows of one step, a range of slots. Live rows are slots 0 … count - 1.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandem.generation.sampling import Choice, stream
from tandem.types import BoolArray, Completion, FinishReason, FloatArray, IntArray, Request

_NO_TOKEN = -1


@dataclass(eq=False, slots=True)
class Ticket:
    """One `generate` call: its request, what is still to come, and where results are delivered."""

    request: Request
    waiting: int
    """Samples that have not started."""
    pending: int
    """Samples that have not been delivered."""
    results: asyncio.Queue[Completion | Exception] = field(default_factory=asyncio.Queue)

    def deliver(self, completion: Completion) -> None:
        self.pending -= 1
        self.results.put_nowait(completion)


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    ticket: Ticket
    index: int
    """Into the request's seeds."""


class Rows:
    """State of up to `slots` rows."""

    def __init__(self, slots: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.samples: list[Sample] = []
        self.positions = np.zeros(slots, dtype=np.int64)
        """Tokens in the KV cache: where the row's next one goes."""
        self.made = np.zeros(slots, dtype=np.int64)
        """Tokens generated."""
        self.last = np.zeros(slots, dtype=np.int64)
        """The token generated last, which is not in the KV cache yet."""
        self.choice = Choice(
            np.zeros(slots, dtype=np.uint64),
            np.ones(slots, dtype=np.float32),
            np.zeros(slots, dtype=np.int64),
            np.ones(slots, dtype=np.float64),
        )
        self._limits = np.zeros(slots, dtype=np.int64)
        self._stops = np.full((slots, 1), _NO_TOKEN, dtype=np.int64)
        self._watched = np.zeros(slots, dtype=np.bool_)
        """Rows that a stop string may end."""
        self._tokens = np.zeros((slots, 0), dtype=np.int32)
        self._logprobs = np.zeros((slots, 0), dtype=np.float32)
        self._versions = np.zeros((slots, 0), dtype=np.int32)
        self._tokenizer = tokenizer

    @property
    def count(self) -> int:
        return len(self.samples)

    def start(self, samples: list[Sample]) -> None:
        """Give samples of one ticket, whose prompt is in the KV cache, the next slots."""
        request = samples[0].ticket.request
        sampling = request.sampling
        live = slice(self.count, self.count + len(samples))
        self._widen(sampling.max_tokens, len(sampling.stop_token_ids))
        self.positions[live] = len(request.token_ids)
        self.made[live] = 0
        self.choice.seeds_B[live] = stream([request.seeds[sample.index] for sample in samples])
        self.choice.temperature_B[live] = sampling.temperature
        self.choice.top_k_B[live] = sampling.top_k
        self.choice.top_p_B[live] = sampling.top_p
        self._limits[live] = sampling.max_tokens
        self._stops[live] = _NO_TOKEN
        self._stops[live, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self._watched[live] = bool(sampling.stop_strings)
        self.samples.extend(samples)

    def append(self, first: int, token_B: IntArray, logprob_B: FloatArray, version: int) -> tuple[BoolArray, BoolArray]:
        """Record a token in the slots from `first` on; returns which rows stopped, and which ended for any cause."""
        live = slice(first, self.count)
        slots, made = np.arange(first, self.count), self.made[live]
        self._tokens[slots, made] = token_B
        self._logprobs[slots, made] = logprob_B
        self._versions[slots, made] = version
        self.last[live] = token_B
        made += 1
        stopped = (self._stops[live] == token_B[:, None]).any(axis=1)
        if self._watched[live].any():
            stopped |= np.array([self._hits_stop_string(slot) for slot in range(first, self.count)])
        return stopped, stopped | (made >= self._limits[live])

    def completion(self, slot: int, finish: FinishReason) -> Completion:
        made = slice(0, self.made[slot])
        return Completion(
            sample=self.samples[slot].index,
            token_ids=self._tokens[slot, made].copy(),
            logprobs=self._logprobs[slot, made].copy(),
            versions=self._versions[slot, made].copy(),
            finish=finish,
        )

    def move(self, source: IntArray, target: IntArray) -> None:
        """Copy rows into other slots."""
        choice = (self.choice.seeds_B, self.choice.temperature_B, self.choice.top_k_B, self.choice.top_p_B)
        for column in (self.positions, self.made, self.last, self._limits, self._stops, self._watched, *choice):
            column[target] = column[source]
        longest = int(self.made[source].max())
        for column in (self._tokens, self._logprobs, self._versions):
            column[target, :longest] = column[source, :longest]
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.samples[new] = self.samples[old]

    def _hits_stop_string(self, slot: int) -> bool:
        """Whether the latest token completes a stop string; only the tail of the response is decoded."""
        strings = self.samples[slot].ticket.request.sampling.stop_strings
        if not strings or self._tokenizer is None:
            return False
        # A token is at least a byte of text; a few more give the decoder the context of the first one.
        tail = max(len(string.encode()) for string in strings) + 8
        made = self.made[slot]
        text = self._tokenizer.decode(self._tokens[slot, max(0, made - tail) : made], skip_special_tokens=False)
        return any(string in text for string in strings)

    def _widen(self, tokens: int, stops: int) -> None:
        if stops > self._stops.shape[1]:
            missing = stops - self._stops.shape[1]
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        if tokens > self._tokens.shape[1]:
            self._tokens = _with_columns(self._tokens, tokens)
            self._logprobs = _with_columns(self._logprobs, tokens)
            self._versions = _with_columns(self._versions, tokens)


def _with_columns(array: np.ndarray[Any, Any], columns: int) -> np.ndarray[Any, Any]:
    wide = np.zeros((len(array), columns), dtype=array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
