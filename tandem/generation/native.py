"""The built-in engine: continuous batching over a Hugging Face causal language model, on the trainer's parameters.

Concurrency: all on one thread and one event loop.

    generate(), stream() --NativeSample--> waiting --prefill--> rows <--> decode --Completion, Delta--> the caller

Requests that differ in their seeds alone, such as those of siblings, wait in one place and start together: their prompt
is computed once.

consumes:     requests, at any time; they enter the batch between two steps
produces:     completions and deltas, into the queue of the call that each belongs to
waits for:    nothing; one task steps while there is work and lets others run between steps
unblocked by: `generate` and `stream`, which start that task when none runs

Suffixes: `_B` rows, `_N` tokens of one forward pass, `_V` vocabulary.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.errors import EngineError, UserError
from tandem.generation.base import EngineLimits
from tandem.generation.native_rows import DecodeBatch, DecodeSlots
from tandem.generation.native_sample import NativeSample
from tandem.generation.native_steps import Chosen, DecodingSteps, PlainSteps
from tandem.generation.pending import Results
from tandem.generation.prefixes import PrefixCache, Snapshot
from tandem.generation.prompt_logprobs import prompt_logprobs
from tandem.generation.recorded import RecordedSteps
from tandem.generation.sampling import most_probable
from tandem.models.attention import ATTENTION
from tandem.models.attention.interface import AttentionPlan
from tandem.models.attention.kernel_check import check_attention
from tandem.models.kv_cache import KVCache, Prefix
from tandem.models.lean import let_go
from tandem.models.loading import named_part
from tandem.models.mixing import has_mixers
from tandem.models.mixing.mixer_check import check_mixers
from tandem.models.pages import PAGE, PagedCache
from tandem.models.tower import PictureTower
from tandem.pictures.marks import PictureNumbers
from tandem.pictures.positions import joined
from tandem.types import Completion, Delta, IntArray, Picture, Request, SamplingParams, Status

_PREFILL_TOKENS, _PREFILL_TOKENS_ON_GPU = 2048, 8192
"""Prompt tokens after which a prefill pass takes no further prompt: larger ones outgrow a CPU's caches (20% slower)."""
_PREFIX_SHARE = 8
"""This many tokens of a prefix, which are copied and attended to, count for one that is computed."""
_LEAST_PREFIX = 4
"""A prefix below 1 / this of the prompt is computed again: attention after a prefix costs more than that of a whole
prompt, which tokens up to there do not save (1M parameters and 1,000 tokens; less with larger models)."""
_KEPT_ASLEEP, _SHARE_KEPT_ASLEEP = 64 * 2**20, 1 / 64
"""A cache of at most so many bytes on a CPU, and of at most such a share of a GPU's memory, is kept through a sleep: to
make it anew is a fortieth of a short step there, and here all steps would be recorded anew."""
_ADMIT_SHARE = 8
"""New rows wait until 1 / this of the slots is free: one prefill of many prompts costs less than many of one."""
_PICTURES = 2**16
"""So many are told apart before those that nobody shows any more are forgotten, and with them what is kept of rows.
Every publish does the same."""


class Asked(NamedTuple):
    """All of a request but its seeds."""

    token_ids: bytes
    pictures: tuple[Picture, ...]
    sampling: SamplingParams
    top_logprobs: int
    prompt_logprobs: bool
    made: int
    keep: bool
    streamed: bool
    is_rest: bool = False
    """Of these some have started: what is asked now waits behind all others, so that nobody is overtaken for ever."""

    @classmethod
    def of(cls, request: Request, streamed: bool) -> Self:
        """Of lists in the place of tuples, too."""
        given = request.sampling
        stops = {"stop_token_ids": tuple(given.stop_token_ids), "stop_strings": tuple(given.stop_strings)}
        return cls(
            request.token_ids.astype(np.int32).tobytes(),
            tuple(request.pictures),
            replace(given, **stops),
            request.top_logprobs,
            request.prompt_logprobs,
            request.made,
            request.keep,
            streamed,
        )


class _Start(NamedTuple):
    """Samples that start together, of requests that differ in their seeds alone."""

    samples: list[NativeSample]
    prefix: Prefix | None
    """What earlier requests have left of the prompt."""

    @property
    def prompt(self) -> IntArray:
        return self.samples[0].request.token_ids

    @property
    def known(self) -> int:
        """How many of the prompt's tokens need not be computed."""
        return self.prefix.length if self.prefix else 0


class NativeEngine:
    """Generates with `model` as it is at each step: nothing is copied, weights changed in place are seen at once.

    Float32 and bfloat16, on the device of the model's parameters.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        record: bool | None = None,
        prefix_cache_tokens: int | None = None,
        pages: int | None = None,
        tower: PictureTower | None = None,
        never_drawn: Sequence[int] = (),
    ) -> None:
        """`max_running`: samples that decode at once. `tokenizer` is needed for stop strings alone.

        `record`: decoding steps are recorded and replayed; None: where the model is on a GPU.

        `pages`: the most pages of keys and values, of `tandem.models.pages.PAGE` tokens each; None: what there is room
        for. Without a GPU there are pages only where `record` is asked for.

        `prefix_cache_tokens`: the most tokens whose keys and values are kept for requests that go on from them
        (`Request.keep`); None: as many as `max_running` rows have, each as long as the longest.

        `tower`: the model's, for requests with pictures.

        `never_drawn`: ids that no token of the tokenizer has; log-probs are over all rows of the model all the same, as
        a trainer's are.
        """
        if model.config._attn_implementation != ATTENTION:
            raise EngineError(f"load the model with attn_implementation={ATTENTION!r}, or its rows see one another")
        self._model = model
        self._weight = next(model.parameters())
        """Any parameter: it knows the device, which transformers looks up at some cost."""
        check_attention(model.config, self._weight.device, self._weight.dtype)
        check_mixers(model, self._weight.device, self._weight.dtype)
        self._has_states = has_mixers(model)
        self._tokenizer = tokenizer
        self._tower = tower
        self._pictures = PictureNumbers()
        """Those that were asked about: in what follows prompts with other pictures are other tokens."""
        never = [*never_drawn, *(tower.never_drawn if tower else ())]
        self._never_drawn = self._tensor(np.array(never)) if never else None
        config = model.config.get_text_config()
        self._limits = EngineLimits(
            positions=getattr(config, "max_position_embeddings", math.inf),
            vocabulary=config.vocab_size,
            stop_strings=tokenizer is not None,
            max_running=max_running,
            placeholder=tower.placeholder if tower else None,
            scores_full_prompts=True,
        )
        self._waiting: OrderedDict[Asked, list[NativeSample]] = OrderedDict()
        """Samples that have not started, those of requests that ask the same in one list, who came first first."""
        self._rows = DecodeSlots(max_running)
        self._prefix_cache_tokens = prefix_cache_tokens
        self.prefilled_tokens = 0
        """Prompt tokens that were computed since the engine was made, those of siblings once."""
        on_gpu = self._weight.device.type == "cuda"
        self._record = on_gpu if record is None else record
        self._paged, self._pages = on_gpu or self._record, pages
        self._prefill_tokens = _PREFILL_TOKENS_ON_GPU if on_gpu else _PREFILL_TOKENS
        self._renew_cache()
        self._version: int | None = None
        self._asleep = False
        self._stepping: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        if self._version is None:
            raise EngineError("the generation engine has no weights yet: call load_weights first")
        return self._version

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def generate(self, request: Request) -> AsyncIterator[Completion]:
        return self._answer(request, streamed=False)

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        return self._answer(request, streamed=True)

    async def _answer(self, request: Request, streamed: bool) -> AsyncIterator[Any]:
        if self._asleep or self._version is None:
            raise EngineError("the generation engine is not ready: call load_weights, and wake after sleep")
        self._limits.check(request)
        prompt = len(request.token_ids)
        self._cache.samples_that_fit(prompt, prompt + request.sampling.max_tokens, 1, 0)  # else it is told at once
        if request.pictures:
            if self._pictures.known >= _PICTURES:
                self._prefixes.clear()  # theirs stand in it
                self._forget_pictures()
            request = replace(request, token_ids=self._pictures.mark(request.token_ids, request.pictures))
        results: Results = asyncio.Queue()
        pending, asked = len(request.seeds), Asked.of(request, streamed)
        if pending:
            waiting = self._waiting.setdefault(asked, [])
            waiting += [NativeSample(request, index, streamed, results) for index in range(pending)]
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        try:
            while pending:
                result = await results.get()
                if isinstance(result, UserError):
                    raise result
                if isinstance(result, Exception):
                    raise EngineError(f"generation failed: {result}") from result
                pending -= result.status is not None
                yield result
        finally:
            if pending:
                self._withdraw(results, asked)

    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        for name, weight in weights or ():
            named_part(self._model, name).copy_(weight)
        self._version = version
        self._prefixes.clear()
        self._steps.look_for_moves()
        if self._tower is not None:
            if self._tower.learns:
                self._tower.forget()
            self._forget_pictures()
        self._rows.state["keep"] = False  # of rows under way a part is computed by other weights

    def sleep(self) -> None:
        if self._waiting or self._rows:
            raise EngineError("the generation engine cannot sleep while requests run: await or abort them first")
        kept = _KEPT_ASLEEP
        if self._weight.is_cuda:
            kept = torch.cuda.get_device_properties(self._weight.device).total_memory * _SHARE_KEPT_ASLEEP
        if self._cache.nbytes + self._cache.states.nbytes > kept:
            self._renew_cache()
        self._cache.forget_rows()
        self._prefixes = PrefixCache(self._has_states)
        if self._weight.is_cuda:
            let_go(self._model)
        if self._tower is not None:
            self._tower.offload()
        if self._weight.is_cuda:
            torch.cuda.empty_cache()  # other processes have to see the memory that is free now
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def abort(self) -> None:
        self._rows.deliver(np.arange(len(self._rows)), [Status.ABORTED] * len(self._rows))
        self._rows.clear()
        for entry in self._clear():
            entry.end_without_tokens()

    def close(self) -> None:
        self.abort()
        self.sleep()
        self._renew_cache()

    def _renew_cache(self) -> None:
        """What stood here before goes first, or both would be there at once."""
        admitted = getattr(self, "_cache", None)
        admitted = admitted.admitted if isinstance(admitted, PagedCache) else 0
        self._prefixes = PrefixCache(self._has_states)
        device, never = self._weight.device, self._never_drawn
        self._cache: KVCache | PagedCache = KVCache()
        self._steps: DecodingSteps = PlainSteps(self._forward, self._cache, self._rows, never, device)
        if self._paged:
            self._cache = PagedCache(device, self._pages, admitted)
            self._steps = RecordedSteps(self._forward, self._model, self._cache, never, record=self._record)

    async def _step_until_idle(self) -> None:
        begins = True
        while self._waiting or self._rows:
            try:
                if begins:
                    self._steps.look_for_moves()
                begins = False
                self._step()
            except Exception as error:  # noqa: BLE001 - every caller raises it
                for results in {entry.results for entry in self._clear()}:
                    results.put_nowait(error)
                self._renew_cache()  # the old one may hold what broke the step
            await asyncio.sleep(0)

    @torch.inference_mode()
    def _step(self) -> None:
        while starts := self._admit():
            self._prefill(starts)
        if self._rows:
            batch = self._rows.batch(0)
            self._advance(batch, self._steps.decode(batch))

    def _admit(self) -> list[_Start]:
        """The samples to start now. Those that ask the same are started in parts only if they are the first to wait."""
        free, tokens = self._rows.slots - len(self._rows), 0
        pages = -(-self._prefixes.tokens // PAGE) if self._paged else 0
        starts: list[_Start] = []
        if free < min(sum(map(len, self._waiting.values())), -(-self._rows.slots // _ADMIT_SHARE)):
            return starts
        while self._waiting and tokens < self._prefill_tokens and free:
            asked, group = next(iter(self._waiting.items()))
            request = group[0].request
            lengths = len(request.token_ids), len(request.token_ids) + request.sampling.max_tokens
            try:
                count = self._cache.samples_that_fit(*lengths, min(free, len(group)), pages)
            except UserError as error:  # no pages could hold it: the others go on
                del self._waiting[asked]
                for results in {entry.results for entry in group}:
                    results.put_nowait(error)
                continue
            if not count and not starts and not self._rows and self._prefixes.tokens:
                self._prefixes.clear()
                pages = 0
                continue
            if not count or (starts and count < len(group)):
                break
            start = _Start(group[:count], self._prefix_of(request))
            del self._waiting[asked]
            if count < len(group):
                rest = asked._replace(is_rest=True)
                self._waiting[rest] = group[count:]
                self._waiting.move_to_end(rest, last=False)
            starts.append(start)
            pages += self._cache.pages_of(*lengths, count)
            free -= count
            tokens += len(start.prompt) - start.known + start.known // _PREFIX_SHARE
        return starts

    def _prefix_of(self, request: Request) -> Prefix | None:
        """What is known of a prompt, where it is worth it; a prompt that is scored is computed whole."""
        prefix = None if request.prompt_logprobs else self._prefixes.longest(request.token_ids)
        return prefix if prefix and _LEAST_PREFIX * prefix.length >= len(request.token_ids) else None

    def _prefill(self, starts: list[_Start]) -> None:
        """Start the samples: run what is not known of each prompt once, and choose the first token of each sample."""
        first = len(self._rows)
        prompt_B = np.repeat(np.arange(len(starts)), [len(start.samples) for start in starts])
        self._rows.start([start.samples for start in starts])
        requests = [group[0].request for group in (*(start.samples for start in starts), *self._waiting.values())]
        longest = max(len(request.token_ids) + request.sampling.max_tokens for request in requests)
        slots = len(self._rows) + sum(map(len, self._waiting.values()))
        self._cache.reserve(self._rows.slots if self._paged else min(self._rows.slots, slots), longest)
        lengths = [len(start.prompt) for start in starts]
        most = [len(start.prompt) + start.samples[0].request.sampling.max_tokens for start in starts]
        self._cache.start(first, lengths, most, prompt_B)
        logits = self._prompt_logits(starts, first, prompt_B)
        for start in starts:
            if (request := start.samples[0].request).prompt_logprobs:
                scored = prompt_logprobs(self._model, request, self._limits.vocabulary)
                for entry in start.samples:
                    entry.prompt = scored
        batch = self._rows.batch(first)
        self._advance(batch, self._steps.choose(batch, logits.index_select(0, self._tensor(prompt_B))))

    def _prompt_logits(self, starts: list[_Start], first: int, prompt_B: IntArray) -> torch.Tensor:
        """Logits after each prompt, `[prompts, V]`; the slots from `first` on are filled."""
        lengths = np.array([len(start.prompt) - start.known for start in starts])
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        self.prefilled_tokens += int(offsets[-1])
        prefixes, device = [start.prefix for start in starts], self._weight.device
        if any(prefixes):
            plan = self._cache.extend(prefixes, lengths, first, prompt_B, device)
        else:
            plan = self._cache.prefill(offsets, first, prompt_B, device)
        token_N, wanted = (
            np.concatenate([start.prompt[start.known :] for start in starts]),
            self._tensor(offsets[1:] - 1),
        )
        if self._tower is None or not any(start.samples[0].request.pictures for start in starts):
            return self._forward(self._tensor(token_N)[None], plan, plan.position_N, wanted)
        whole = [self._tower.places_of_row(start.prompt, self._pictures.pictures) for start in starts]
        for slot, start in enumerate(prompt_B, first):
            self._rows.state["lag"][slot] = whole[start].ends[0] - len(starts[start].prompt)
        rest = [places.after(start.known, start.prompt) for places, start in zip(whole, starts, strict=True)]
        seen = self._tower.inputs(token_N, joined(rest, self._pictures.pictures), self._pictures.pictures, keep=True)
        return self._model(
            seen.token_ids, attention_plan=plan, use_cache=False, logits_to_keep=wanted, **seen.options
        ).logits[0]

    def _forward(
        self, token_1N: torch.Tensor, plan: AttentionPlan, stands_N: torch.Tensor, wanted: int | torch.Tensor = 0
    ) -> torch.Tensor:
        """Logits `[wanted, V]`, of every token where `wanted` is 0. `stands_N`: the positions that are encoded."""
        return self._model(
            token_1N, position_ids=stands_N[None], attention_plan=plan, use_cache=False, logits_to_keep=wanted
        ).logits[0]

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._weight.device)

    def _advance(self, batch: DecodeBatch, chosen: Chosen) -> None:
        """Note the next tokens of the rows of the batch; deliver and remove those that end with them."""
        state, rows, version = batch.state, self._rows, self.version
        if len(batch.top):
            self._note_top(batch, chosen.logits_BV)
        token_B, logprob_B, _ = chosen
        if not np.isfinite(logprob_B).all():
            raise EngineError(f"log-probabilities are not finite (policy version {version})")
        rows.take(batch, token_B, logprob_B, version)
        stopped_B = rows.stopped(batch, self._tokenizer)
        ended_B = stopped_B | (state["made"] >= state["max_tokens"])
        rows.stream(batch, ended_B)
        ended = np.flatnonzero(ended_B)
        if len(ended):
            rows.deliver(
                batch.slots[ended], [Status.COMPLETED if stopped else Status.TRUNCATED for stopped in stopped_B[ended]]
            )
            self._keep(batch.slots[ended[state["keep"][ended] > 0]])
            self._release(batch.slots[ended].tolist())

    def _note_top(self, batch: DecodeBatch, logits_BV: torch.Tensor) -> None:
        """Keep the most probable next tokens for the rows that want them."""
        rows, counts = batch.top, batch.state["top_logprobs"][batch.top]
        found = most_probable(logits_BV[torch.from_numpy(rows)], batch.state["temperature"][rows], int(counts.max()))
        token_BK, logprob_BK = (values.cpu().numpy() for values in found)
        for row, count, tokens, logprobs in zip(rows, counts, token_BK.astype(np.int32), logprob_BK, strict=True):
            self._rows.samples[batch.slots[row]].top.append((tokens[:count], logprobs[:count]))

    def _keep(self, slots: IntArray) -> None:
        """Keep what is computed of the rows in these slots: all but their last tokens."""
        room, each = self._prefix_cache_tokens, self._snapshot_tokens()
        if room is None:
            room = self._rows.slots * (self._cache.length + each)
        room = min(room, self._prefixes.tokens + self._cache.tokens_left())
        for slot in slots.tolist():
            row = np.concatenate((self._rows.samples[slot].request.token_ids, self._rows.of(slot)["token"][:-1]))
            snapshot = Snapshot(self._cache.states.read(slot), each) if self._has_states else None
            self._prefixes.keep(row, partial(self._cache.read, slot), room, snapshot)

    def _snapshot_tokens(self) -> int:
        """How many tokens of keys and values take the memory of a row's states; of a model that has none of them, as
        many as the longest row has."""
        cache = self._cache
        return -(-cache.states.row_bytes // cache.token_bytes) if cache.token_bytes else cache.length

    def _release(self, slots: list[int]) -> None:
        """Drop rows."""
        movers, holes = self._rows.remove(slots)
        self._cache.release(slots, movers, holes, int(self._rows.state["position"][movers].max(initial=0)))

    @torch.inference_mode()
    def _withdraw(self, results: Results, asked: Asked) -> None:
        """Drop what is left of a request that nobody waits for any more."""
        for key in (asked, asked._replace(is_rest=True)):
            waiting = self._waiting.get(key, [])
            others = [entry for entry in waiting if entry.results is not results]
            if others:
                self._waiting[key] = others
            elif waiting:
                del self._waiting[key]
        if started := [slot for slot, entry in enumerate(self._rows.samples) if entry.results is results]:
            self._release(started)

    def _forget_pictures(self) -> None:
        """All that no sample shows; no prefix is kept."""
        samples = (entry for group in (self._rows.samples, *self._waiting.values()) for entry in group)
        self._pictures.forget(entry.request.token_ids for entry in samples)

    def _clear(self) -> list[NativeSample]:
        """Forget every sample; returns them."""
        entries = [entry for group in (self._rows.samples, *self._waiting.values()) for entry in group]
        self._rows.clear()
        self._waiting.clear()
        self._cache.forget_rows()
        return entries
