"""Pages of keys and values, and the fused pass over them: what a GPU does, on a CPU, against the engine of CPUs."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tandem.errors import EngineError, UserError
from tandem.generation.native import NativeEngine
from tandem.generation.recorded import RecordedSteps
from tandem.models import fused as fused_on_cpu
from tandem.models import lean
from tandem.models.attention import ATTENTION
from tandem.models.fused_gpu import FusedOnGpu
from tandem.models.pages import PAGE, PagedCache
from tandem.types import Completion, Request, SamplingParams

VOCABULARY, SLOTS = 31, 12
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def model_of(family: str, layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    more = {"head_dim": 8} if family != "qwen2" else {}
    config = FAMILIES[family](
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=600, initializer_range=0.3, **more,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    lean.make_lean(model)
    return model.eval()


def engine_of(model: PreTrainedModel, slots: int = SLOTS, **options: Any) -> NativeEngine:
    engine = NativeEngine(model, max_running=slots, **options)
    engine.load_weights(0, None)
    return engine


def some_requests(random: np.random.Generator, count: int) -> list[Request]:
    """Prompts of 1 to 90 tokens with up to five samples; some begin with an earlier one and keep what they make."""
    requests: list[Request] = []
    for number in range(count):
        row = random.integers(1, VOCABULARY, random.integers(1, 90)).astype(np.int32)
        if requests and random.random() < 0.3:
            row = np.concatenate((requests[-1].token_ids[:60], row[:20]))
        sampling = SamplingParams(max_tokens=int(random.integers(1, 50)), stop_token_ids=(0,))
        seeds = tuple(range(10 * number, 10 * number + int(random.integers(1, 6))))
        requests.append(Request(row, sampling, seeds, keep=bool(random.random() < 0.5)))
    return requests


def answers(engine: NativeEngine, requests: list[Request], check: Any = lambda: None) -> list[Completion]:
    async def one(request: Request) -> list[Completion]:
        found = []
        async for completion in engine.generate(request):
            check()
            found.append(completion)
        return sorted(found, key=lambda completion: completion.sample)

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*map(one, requests))

    return [completion for own in asyncio.run(all_of_them()) for completion in own]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """CPU models run the pass of a GPU; counts the passes."""
    passes = Counter[str]()

    class Counted(FusedOnGpu):
        def __call__(self, *arguments: Any) -> torch.Tensor:
            passes[type(arguments[-1]).__name__] += 1
            return super().__call__(*arguments)

    monkeypatch.setattr(lean, "Fused", Counted)
    return passes


def same_until(one: Completion, another: Completion, tolerance: float = 5e-5) -> bool:
    """Whether the answers part somewhere; up to there the log-probs are asserted to be the same in float32, in which
    either engine is up to 2e-5 from float64."""
    length = min(len(one.token_ids), len(another.token_ids))
    parted = np.flatnonzero(one.token_ids[:length] != another.token_ids[:length])
    length = int(parted[0]) if len(parted) else length
    np.testing.assert_allclose(one.logprobs[:length], another.logprobs[:length], atol=tolerance)
    assert len(parted) or (len(one.token_ids) == len(another.token_ids) and one.status == another.status)
    return len(parted) > 0


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 60))])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_schedules_are_answered_as_on_a_cpu(family: str, seed: int, fused: Counter[str]) -> None:
    """Few pages, so that rows wait for others to end; the draws and the log-probs are the same."""
    random = np.random.default_rng(seed)
    model, other = model_of(family), model_of(family)
    limit = int(random.integers(14, 60))
    paged = engine_of(model, record=True, pages=limit)
    cache: Any = paged._cache
    plain = engine_of(other, record=False)
    for turn in range(3):
        requests = some_requests(random, 12)

        def within_limits() -> None:
            assert cache.used <= cache.spoken_for < limit and cache.pages <= limit

        found, wanted = answers(paged, requests, within_limits), answers(plain, requests)
        assert cache.used == cache.spoken_for == 0, "nobody has pages any more"
        differ = [same_until(one, another) for one, another in zip(found, wanted, strict=True)]
        assert sum(differ) <= 1, "float32 puts one draw of 250,000 on the other side of a border"
        if turn == 1:
            for engine in (paged, plain):
                engine.sleep()
                engine.wake()
    assert fused["PagedPrefill"] and fused["PagedDecode"]
    if family == "qwen3" and seed == 1:
        assert fused["PagedExtend"]


def test_a_row_that_no_pages_could_hold_is_refused_at_once_and_others_go_on() -> None:
    engine = engine_of(model_of("qwen3"), record=True, pages=11)
    with pytest.raises(UserError, match=r"a row of 229 tokens takes 15 pages of 16 tokens .* room for 10: lower"):
        answers(engine, [asked(200)])
    assert [len(completion.token_ids) for completion in answers(engine, [asked(40, samples=4)])] == [40] * 4


def asked(tokens: int, samples: int = 1) -> Request:
    """A prompt of 29 tokens."""
    return Request(np.arange(1, 30, dtype=np.int32), SamplingParams(max_tokens=tokens), tuple(range(samples)))


def test_before_pages_are_measured_too_long_a_row_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU their size is known once a row has some: until then nobody can be refused."""
    monkeypatch.setattr(PagedCache, "_unmeasured", property(lambda cache: not cache._layers))
    engine = engine_of(model_of("qwen3"), record=True, pages=11)

    async def all_of_them() -> list[Any]:
        async def one(request: Request) -> list[Completion]:
            return [completion async for completion in engine.generate(request)]

        requests = [asked(40), asked(40, samples=2), asked(200), asked(200, samples=2), asked(30)]
        return await asyncio.wait_for(asyncio.gather(*map(one, requests), return_exceptions=True), 60)

    first, second, *refused, last = asyncio.run(all_of_them())
    assert [len(found) for found in (first, second, last)] == [1, 2, 1]
    assert all(isinstance(error, UserError) and "takes 15 pages" in str(error) for error in refused)


def test_what_fails_before_the_first_step_is_told_to_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model_of("qwen3"), record=True)

    def no_memory(model: Any) -> bool:
        raise torch.OutOfMemoryError("there is none")

    monkeypatch.setattr("tandem.generation.recorded.lay_out", no_memory)
    for parameter in engine._model.parameters():
        parameter.data = parameter.detach().clone()
    with pytest.raises(EngineError, match="there is none"):
        answers(engine, [asked(4)])
    monkeypatch.undo()
    assert len(answers(engine, [asked(4)])) == 1


def test_a_row_that_was_let_in_may_go_on_though_less_memory_is_free() -> None:
    engine = engine_of(model_of("qwen3"), record=True, pages=20)
    cache: Any = engine._cache
    answers(engine, [asked(200)])
    cache._given = cache._limit = 12
    assert [len(completion.token_ids) for completion in answers(engine, [asked(200)])] == [200]
    engine._renew_cache()
    assert cache.admitted == engine._cache.admitted == 15  # type: ignore[union-attr]


def test_kept_prefixes_take_what_rows_leave_and_go_where_a_row_needs_their_room() -> None:
    engine = engine_of(model_of("qwen3"), record=True, pages=16)
    random = np.random.default_rng(0)
    for number in range(12):
        row = random.integers(1, VOCABULARY, 60).astype(np.int32)
        answers(engine, [Request(row, SamplingParams(max_tokens=30), (number,), keep=True)])
        assert engine._prefixes.tokens <= 15 * PAGE
    assert engine._prefixes.tokens > 0
    assert len(answers(engine, [asked(200)])) == 1


def test_prompts_that_start_one_after_another_move_what_is_there_seldom() -> None:
    cache, grown = PagedCache(torch.device("cpu")), set[int]()
    cache.reserve(64, 528)
    for slot in range(64):
        cache.start(slot, [512], [528], np.zeros(1, dtype=np.int64))
        grown.add(cache.pages)
    assert len(grown) < 20 and cache.used == 64 * 32


def test_what_pages_take_follows_the_tokens_and_siblings_share_their_prompt() -> None:
    """256 rows of 2,560 tokens, prompts of 512 in groups of 8: while answers have 100 tokens, and at the end."""
    cache = PagedCache(torch.device("cpu"))
    groups, samples, prompt, longest = 32, 8, 512, 2560
    cache.reserve(groups * samples, longest)
    cache.start(0, [prompt] * groups, [longest] * groups, np.repeat(np.arange(groups), samples))
    assert cache.used == groups * prompt // PAGE
    for position in (prompt, prompt + 99, longest - 1):
        for place in range(prompt, position + 1, PAGE):
            cache.grow(np.full(groups * samples, place))
        answered = -(-(position + 1 - prompt) // PAGE)
        assert cache.used == groups * (prompt // PAGE + samples * answered)
    dense = groups * samples * longest
    assert cache.used * PAGE < 0.85 * dense, "at most: 256 x 2,048 answered tokens and 32 prompts"
    assert cache.spoken_for == cache.used
    tables = cache._rows[: groups * samples, : longest // PAGE]
    owners = Counter(tables.flatten().tolist())
    assert owners[0] == 0 and sorted(set(owners.values())) == [1, samples]
    cache.release(list(range(groups * samples)), [], [], 0)
    assert cache.used == 0 and len(set(cache._free)) == len(cache._free) == cache.pages - 1


VIEWS = {
    "view", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "permute", "expand", "slice", "select", "t", "split",
    "split_with_sizes", "unbind", "detach", "alias", "narrow", "empty", "new_empty", "empty_like", "as_strided",
    "tensor_split", "unflatten", "flatten", "lift_fresh", "_reshape_alias",
}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Counts operators that start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in VIEWS:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


KERNELS_OF = {"attend_pages": 2, "choose_": 4}
"""Operators that are several kernels; attention is two where rows are few."""


def test_a_decoded_token_of_qwen3_0_6b_takes_at_most_300_kernels(
    fused: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded step, choosing included, in bfloat16 and on tensors without memory."""
    monkeypatch.setattr(fused_on_cpu, "_as_one", side_by_side)
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.bfloat16)
    lean.make_lean(model)
    cache = PagedCache(torch.device("meta"))
    cache.reserve(4, 64)
    cache.start(0, [20], [60], np.zeros(4, dtype=np.int64))

    def forward(token_1N: torch.Tensor, plan: Any, stands_N: torch.Tensor) -> torch.Tensor:
        return model(token_1N, position_ids=stands_N[None], attention_plan=plan, use_cache=False).logits[0]

    steps = RecordedSteps(forward, model, cache, None, record=True)
    steps._forget(cache.place)
    with torch.inference_mode():
        step = steps._prepare(4)
        step()  # makes the pages
        with Kernels() as kernels:
            step()
    assert fused["PagedDecode"] == 2 and kernels.count["attend_pages"] == 28 and kernels.count["choose_"] == 1
    copied_logits = 1
    total = sum(number * KERNELS_OF.get(name, 1) for name, number in kernels.count.items()) + copied_logits
    assert 290 < total <= 300, kernels.count


def side_by_side(parameters: list[torch.Tensor]) -> torch.Tensor:
    first = parameters[0]
    return first.new_empty(sum(map(len, parameters)), *first.shape[1:])


@pytest.mark.parametrize("samples", [320, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_pages_and_recorded_steps_draw_what_a_cpu_draws(samples: int, fused: Counter[str]) -> None:
    """In groups of 8, by every way of choosing; log-probs to 2e-5."""
    random = np.random.default_rng(0)
    requests = [
        Request(
            random.integers(1, VOCABULARY, random.integers(1, 40)).astype(np.int32),
            SamplingParams(
                max_tokens=8, temperature=float(random.choice([0.7, 1, 1.3])), top_p=float(random.choice([1, 0.9])),
                top_k=int(random.choice([0, 0, 10])),
            ),
            tuple(range(8 * group, 8 * group + 8)),
        )
        for group in range(samples // 8)
    ]  # fmt: skip
    found, wanted = (
        answers(engine_of(model_of("qwen3"), record=record, slots=64), requests) for record in (True, False)
    )
    assert len(found) == samples and fused["PagedDecode"]
    parted = sum(same_until(*both, 2e-5) for both in zip(found, wanted, strict=True))
    assert parted <= samples // 10_000, "float32 puts one draw of 250,000 on the other side of a border"
