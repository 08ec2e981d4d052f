"""The native engine: recorded steps, their speed, kernels a token, skewed lengths, choosing tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from gpu_checks.figures import Bench
from gpu_checks.measuring import (
    GIB,
    copy_rate,
    device_of,
    dtype_of,
    kernels,
    peak_gib,
    reset_peak,
    seconds,
    synchronize,
)
from gpu_checks.models import config_of, model_of
from tandem.generation.native import NativeEngine
from tandem.generation.sampling import CHOICE, Chooser
from tandem.planning.model_shape import shape_of
from tandem.types import Completion, Request, SamplingParams


def answers(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    """To all requests at once, in their order, samples in theirs."""

    async def one(request: Request) -> list[Completion]:
        return sorted([c async for c in engine.generate(request)], key=lambda completion: completion.sample)

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*map(one, requests))

    return [completion for own in asyncio.run(all_of_them()) for completion in own]


def request(prompt: int, new: int, seed: int, vocabulary: int, samples: int = 1) -> Request:
    tokens = np.random.default_rng(seed).integers(1, vocabulary, prompt).astype(np.int32)
    return Request(tokens, SamplingParams(max_tokens=new), tuple(range(seed * samples, (seed + 1) * samples)))


def started(model: PreTrainedModel, rows: int, record: bool) -> NativeEngine:
    engine = NativeEngine(model, max_running=rows, record=record)
    engine.load_weights(0, None)
    return engine


def recorded(bench: Bench) -> None:
    """CUDA graphs against plain steps: lengths up, down and up again, a sleep, a publish, moved weights."""
    device = device_of(bench)
    model = model_of(config_of("tiny", initializer_range=0.3), device, torch.float32)
    plain, replayed = (started(model, 8, record) for record in (False, True))
    worst, recordings = 0.0, 0
    for turn, lengths in enumerate([[600], [3], [600], [300], [600], [3], [3, 600, 20], [600]]):
        if turn == 4:
            replayed.sleep()
            replayed.wake()
        if turn == 6:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data = 0.9 * parameter.data
        if turn in (5, 6):
            for engine in (plain, replayed):
                engine.load_weights(turn, None)
        requests = [request(length, 12, seed, 512, samples=2) for seed, length in enumerate(lengths)]
        pairs = zip(answers(plain, requests), answers(replayed, requests), strict=True)
        off = max(float(np.abs(one.logprobs - other.logprobs).max()) for one, other in pairs)
        bench.report("log-probs differ by", off, "", f"turn {turn}: prompts of {', '.join(map(str, lengths))}")
        worst = max(worst, off)
        steps = replayed._recorded
        recordings = max(recordings, len(steps._steps) if steps else 0)
        if not bench.small and turn == 3:  # what has been freed is written over
            torch.full((2**28,), float("nan"), device=device)
            torch.cuda.empty_cache()
    bench.report("recordings at once, at most", recordings)
    assert worst < 1e-4, f"recorded steps differ by {worst:.3g}: do they read memory that was freed?"


def decoding(bench: Bench) -> None:
    """Steps of 1, 64 and 256 rows of Qwen3-0.6B's shape, against the time to read weights, keys and values."""
    device = device_of(bench)
    config = config_of("tiny" if bench.small else "Qwen3-0.6B")
    model, rate = model_of(config, device, dtype_of(bench)), copy_rate(bench)
    prompt, new = (8, 8) if bench.small else (256, 256)
    for rows in (1, 4) if bench.small else (1, 64, 256):
        case = "1 row" if rows == 1 else f"{rows} rows"
        engine = started(model, rows, record=True)
        reset_peak(device)
        first = _seconds_of(engine, device, rows, prompt, new)
        prefill = min(_seconds_of(engine, device, rows, prompt, 1) for _ in range(2))
        whole = min(_seconds_of(engine, device, rows, prompt, new) for _ in range(2))
        step = (whole - prefill) / (new - 1)
        least = _bytes_read(config, model, rows, prompt + new / 2) / rate
        bench.report("a step", 1e3 * step, "ms", case)
        bench.report("tokens", rows / step, "tokens/s", case)
        bench.report("share of the bandwidth", least / step, "", case)
        bench.report("prompt tokens", rows * prompt / prefill, "tokens/s", case)
        bench.report("first run, beyond a later one", first - whole, "s", case)
        if (peak := peak_gib(device)) is not None:
            bench.report("peak", peak, "GiB", case)
        few, more = (kernels(device, partial(_seconds_of, engine, device, rows, prompt, tokens)) for tokens in (4, 8))
        bench.report("operators a step" if bench.small else "kernels a step", (more[0] - few[0]) / 4, "", case)
        bench.report("their time a step", 1e3 * (more[1] - few[1]) / 4, "ms", case)
        engine.close()
    if not bench.small:
        _eager(bench, model, prompt, new)


def _eager(bench: Bench, model: PreTrainedModel, prompt: int, new: int) -> None:
    device, rows = device_of(bench), 64
    engine = started(model, rows, record=False)
    _seconds_of(engine, device, rows, prompt, 4)
    prefill, whole = (_seconds_of(engine, device, rows, prompt, n) for n in (1, new))
    bench.report("a step", 1e3 * (whole - prefill) / (new - 1), "ms", f"{rows} rows, without CUDA graphs")


def _seconds_of(engine: NativeEngine, device: torch.device, rows: int, prompt: int, new: int) -> float:
    """For `rows` answers of `new` tokens, each to a prompt of its own."""
    requests = [request(prompt, new, row, 512) for row in range(rows)]
    synchronize(device)
    start = time.perf_counter()
    found = answers(engine, requests)
    synchronize(device)
    taken = time.perf_counter() - start
    assert all(len(completion.token_ids) == new for completion in found)
    return taken


def _bytes_read(config: PreTrainedConfig, model: PreTrainedModel, rows: int, length: float) -> float:
    """By one step: weights, and the keys and values of rows of `length` tokens."""
    shape, size = shape_of(config.to_dict()), model.dtype.itemsize
    return shape.parameters * size + rows * length * shape.kv_bytes_per_token(size)


def skewed(bench: Bench) -> None:
    """64 prompts of 512 tokens, 8 answers each of very different lengths: speed, recordings, keys and values."""
    device = device_of(bench)
    config = config_of("tiny" if bench.small else "Qwen3-0.6B")
    model = model_of(config, device, dtype_of(bench))
    prompts, samples, prompt, longest, slots = (4, 2, 40, 24, 6) if bench.small else (64, 8, 512, 2048, 256)
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(longest / 8), 1.0, prompts * samples), 1, longest).astype(int)
    engine = started(model, slots, record=True)
    requests = []
    for number, length in enumerate(lengths.tolist()):  # siblings ask one by one, for each has a length of its own
        asked = request(prompt, length, number // samples, 512)
        requests.append(Request(asked.token_ids, asked.sampling, (number,)))
    for case in ("first run", "second run"):
        reset_peak(device)
        synchronize(device)
        start = time.perf_counter()
        found = answers(engine, requests)
        synchronize(device)
        taken = time.perf_counter() - start
        assert [len(completion.token_ids) for completion in found] == lengths.tolist()
        bench.report("decoded tokens", lengths.sum() / taken, "tokens/s", case)
    padded = slots * (prompt + longest) * shape_of(config.to_dict()).kv_bytes_per_token(model.dtype.itemsize)
    cache, steps = engine._cache, engine._recorded
    bench.report("pages of keys and values", cache.nbytes / GIB, "GiB")
    bench.report("rows as long as the longest would take", padded / GIB, "GiB")
    bench.report("recordings", len(steps._steps) if steps else 0)
    bench.report("longest answer by the mean", lengths.max() / lengths.mean(), "x")


def choosing(bench: Bench) -> None:
    """Choosing 256 tokens of 151,936 each: plain, top-k, top-p."""
    device = device_of(bench)
    rows, words = (4, 2048) if bench.small else (256, 151_936)
    torch.manual_seed(0)
    logits = torch.randn(rows, words, device=device, dtype=dtype_of(bench))
    with torch.inference_mode():
        for name, top_k, top_p in (("plain", 0, 1.0), ("top_k 50", 50, 1.0), ("top_p 0.95", 0, 0.95)):
            choice = np.zeros(rows, dtype=CHOICE)
            choice["stream"], choice["temperature"] = np.arange(rows), 1.0
            choice["top_k"], choice["top_p"] = top_k, top_p
            chooser = Chooser(choice, device)
            bench.report("a step", 1e3 * seconds(device, lambda c=chooser: c(logits.clone()), 10), "ms", name)
