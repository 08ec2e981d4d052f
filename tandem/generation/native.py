"""The built-in engine: continuous batching over a Hugging Face causal language model, on the trainer's parameters.

Concurrency: all on one thread and one event loop.

    generate() --Sample--> waiting --prefill--> rows <--> decode --Completion--> the generate() that asked

consumes:     requests, at any time; they enter the batch between two steps
produces:     completions, into the queue of the `generate` call that each belongs to
waits for:    nothing; one task steps while there is work and lets others run between steps
unblocked by: `generate`, which starts that task when none runs

Suffixes: `_B` rows, `_N` tokens of one forward pass, `_V` vocabulary.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.errors import EngineError
from tandem.generation.base import check_request
from tandem.generation.kv_cache import Decode, KVCache, Prefill
from tandem.generation.rows import Rows, Sample, Ticket
from tandem.generation.sampling import sample
from tandem.models.attention import ATTENTION, AttentionPlan
from tandem.types import Completion, FinishReason, IntArray, Request

_PREFILL_TOKENS = 2048
"""Prompt tokens after which a prefill pass takes no further prompt: larger ones outgrow a CPU's caches (20% slower)."""
_ADMIT_SHARE = 8
"""New rows wait until 1 / this of the slots is free: one prefill of many prompts costs less than many of one."""


class NativeEngine:
    """Generates with `model` as it is at each step: nothing is copied, weights changed in place are seen at once.

    `model` must be loaded with the attention of `tandem.models.attention`. Float32 and bfloat16, on the device of its
    parameters.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_running: int, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """`max_running`: samples that decode at once. `tokenizer` is needed for stop strings alone."""
        if model.config._attn_implementation != ATTENTION:
            raise EngineError(
                f"the model must be loaded with attn_implementation={ATTENTION!r}, or rows see one another"
            )
        self._model = model
        self._max_running = max_running
        self._tokenizer = tokenizer
        self._max_tokens: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._rows = Rows(max_running, tokenizer)
        self._cache = KVCache()
        self._waiting: deque[Sample] = deque()
        self._longest = 0
        self._version: int | None = None
        self._asleep = False
        self._stepping: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        if self._version is None:
            raise EngineError("the generation engine has no weights yet: call load_weights first")
        return self._version

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        self._check_ready()
        check_request(request, self._max_tokens, self._tokenizer)
        samples = len(request.seeds)
        ticket = Ticket(request, waiting=samples, pending=samples)
        self._longest = max(self._longest, len(request.token_ids) + request.sampling.max_tokens)
        self._waiting.extend(Sample(ticket, index) for index in range(samples))
        self._keep_stepping()
        try:
            for _ in request.seeds:
                result = await ticket.results.get()
                if isinstance(result, Exception):
                    raise EngineError(f"generation failed: {result}") from result
                yield result
        finally:
            if ticket.pending:
                self._withdraw(ticket)

    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        if weights is not None:
            own = self._model.state_dict()
            for name, weight in weights:
                if name not in own:
                    raise EngineError(f"load_weights: the model has no parameter {name}")
                own[name].copy_(weight)
        self._version = version

    def sleep(self) -> None:
        if self._waiting or self._rows.count:
            raise EngineError("the generation engine cannot sleep while requests run: await or abort them first")
        self._cache.free()
        self._longest = 0
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def abort(self) -> None:
        for slot, entry in enumerate(self._rows.samples):
            entry.ticket.deliver(self._rows.completion(slot, FinishReason.ABORT))
        nothing = np.zeros(0, dtype=np.int32)
        for entry in self._waiting:
            completion = Completion(entry.index, nothing, nothing.astype(np.float32), nothing, FinishReason.ABORT)
            entry.ticket.deliver(completion)
        self._rows.samples.clear()
        self._waiting.clear()

    def close(self) -> None:
        self.abort()
        self.sleep()

    def _check_ready(self) -> None:
        if self._asleep or self._version is None:
            need = "wake" if self._asleep else "load_weights"
            raise EngineError(f"the generation engine is not ready: call {need} before generate")

    def _keep_stepping(self) -> None:
        running = self._stepping
        if running is None or running.done() or running.get_loop() is not asyncio.get_running_loop():
            self._stepping = asyncio.create_task(self._step_until_idle())

    async def _step_until_idle(self) -> None:
        while self._waiting or self._rows.count:
            try:
                self._step()
            except Exception as error:  # noqa: BLE001 - every caller raises it
                self._fail(error)
            await asyncio.sleep(0)

    @torch.inference_mode()
    def _step(self) -> None:
        while self._admits():
            self._prefill(self._take_waiting())
        if self._rows.count:
            self._decode()

    def _admits(self) -> bool:
        free = self._max_running - self._rows.count
        return bool(self._waiting) and free >= min(len(self._waiting), -(-self._max_running // _ADMIT_SHARE))

    def _take_waiting(self) -> list[list[Sample]]:
        """The samples to start now, by ticket. A ticket is started in parts only if it is the first to wait."""
        free, tokens = self._max_running - self._rows.count, 0
        groups: list[list[Sample]] = []
        while self._waiting and tokens < _PREFILL_TOKENS:
            ticket = self._waiting[0].ticket
            size = min(ticket.waiting, free)
            if size == 0 or (groups and size < ticket.waiting):
                break
            groups.append([self._waiting.popleft() for _ in range(size)])
            ticket.waiting -= size
            free -= size
            tokens += len(ticket.request.token_ids)
        return groups

    def _prefill(self, groups: list[list[Sample]]) -> None:
        """Start the samples: run each prompt once, and choose the first token of each sample."""
        first = self._rows.count
        prompts = [group[0].ticket.request.token_ids for group in groups]
        samples = np.array([len(group) for group in groups])
        for group in groups:
            self._rows.start(group)
        self._cache.reserve(min(self._max_running, self._rows.count + len(self._waiting)), self._longest)
        offsets = np.concatenate(([0], np.cumsum([len(prompt) for prompt in prompts])))
        position_N = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
        plan = Prefill(self._cache, offsets, first, samples, self._model.device)
        logits = self._forward(np.concatenate(prompts), position_N, plan, offsets[1:] - 1)
        if len(groups) < samples.sum():
            logits = logits[torch.from_numpy(np.repeat(np.arange(len(groups)), samples)).to(logits.device)]
        self._advance(first, logits)

    def _decode(self) -> None:
        position_B = self._rows.positions[: self._rows.count]
        plan = Decode(self._cache, position_B, self._model.device)
        logits = self._forward(self._rows.last[: self._rows.count], position_B, plan, None)
        position_B += 1
        self._advance(0, logits)

    def _forward(
        self, token_N: IntArray, position_N: IntArray, plan: AttentionPlan, wanted: IntArray | None
    ) -> torch.Tensor:
        """Logits `[wanted, V]`, of every token where `wanted` is None."""
        device = self._model.device
        token_1N, position_1N = (
            torch.from_numpy(x.astype(np.int64, copy=False)).to(device)[None] for x in (token_N, position_N)
        )
        keep = 0 if wanted is None else torch.from_numpy(wanted).to(device)
        output = self._model(
            token_1N, position_ids=position_1N, attention_plan=plan, use_cache=False, logits_to_keep=keep
        )
        return output.logits[0]

    def _advance(self, first: int, logits_BV: torch.Tensor) -> None:
        """Choose the next token of the rows from slot `first` on; deliver and remove those that end with it."""
        rows = self._rows
        live = slice(first, rows.count)
        tokens, logprobs = sample(logits_BV, rows.choice[live], rows.made[live])
        token_B, logprob_B = tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not np.isfinite(logprob_B).all():
            raise EngineError(f"the model's logits are not finite (policy version {self.version})")
        stopped, ended = rows.append(first, token_B, logprob_B, self.version)
        if ended.any():
            slots = first + np.flatnonzero(ended)
            for slot in slots.tolist():
                finish = FinishReason.STOP if stopped[slot - first] else FinishReason.LENGTH
                rows.samples[slot].ticket.deliver(rows.completion(slot, finish))
            self._release(slots)

    def _release(self, slots: IntArray) -> None:
        """Drop rows and move the last live ones into the holes: live rows stay the first slots."""
        count = self._rows.count - len(slots)
        holes = slots[slots < count]
        movers = np.setdiff1d(np.arange(count, self._rows.count), slots)
        if len(holes):
            self._cache.move(movers, holes, int(self._rows.positions[movers].max()))
            self._rows.move(movers, holes)
        del self._rows.samples[count:]

    @torch.inference_mode()
    def _withdraw(self, ticket: Ticket) -> None:
        """Drop what is left of a request that nobody waits for any more."""
        self._waiting = deque(entry for entry in self._waiting if entry.ticket is not ticket)
        slots = [slot for slot, entry in enumerate(self._rows.samples) if entry.ticket is ticket]
        self._release(np.array(slots, dtype=np.int64))

    def _fail(self, error: Exception) -> None:
        """Tell every caller; nothing of the batch is kept, not even the cache, which may hold what broke it."""
        for ticket in {entry.ticket for entry in (*self._rows.samples, *self._waiting)}:
            ticket.results.put_nowait(error)
        self._rows.samples.clear()
        self._waiting.clear()
        self._cache.free()
