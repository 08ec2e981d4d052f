"""The native engine against transformers' `model.generate`: the same Qwen2 model, prompts and lengths, batch 128.

Run: python benchmarks/generation.py [--sizes 1M 10M 60M] [--runs N]

Both sample at temperature 1 from the whole vocabulary, on one CPU thread in float32. Cases: `equal`, every sample the
same number of new tokens; `skewed`, four of five samples short (8) and the others long (up to the case's maximum),
where generate is told to stop each row at its own length. Figures are medians of CPU-seconds over interleaved runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from command_line import parse_arguments
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList

from tandem.generation.native import NativeEngine
from tandem.models.attention import ATTENTION
from tandem.models.lean import make_lean
from tandem.types import Completion, Request, SamplingParams

BATCH = 128
SHORT_TOKENS = 8


@dataclass(frozen=True)
class Size:
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    prompt_tokens: int
    equal_tokens: int
    skewed_max_tokens: int


SIZES = {
    "1M": Size(2_048, 128, 4, 4, 2, 352, prompt_tokens=128, equal_tokens=64, skewed_max_tokens=256),
    "10M": Size(8_192, 256, 10, 8, 4, 768, prompt_tokens=128, equal_tokens=64, skewed_max_tokens=256),
    "60M": Size(32_000, 512, 14, 8, 2, 1_536, prompt_tokens=32, equal_tokens=32, skewed_max_tokens=128),
}


class OwnLength(StoppingCriteria):
    """Ends each row at its own number of new tokens."""

    def __init__(self, prompt_tokens: int, lengths: list[int]) -> None:
        self._ends = prompt_tokens + torch.tensor(lengths)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object) -> torch.BoolTensor:
        return input_ids.shape[1] >= self._ends  # type: ignore[return-value]


def build(size: Size, attention: str) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        max_position_embeddings=1_024,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    return Qwen2ForCausalLM(config).eval()


def baseline(model: Qwen2ForCausalLM, prompts: torch.Tensor, lengths: list[int]) -> Callable[[], None]:
    def run() -> None:
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(lengths),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([OwnLength(prompts.shape[1], lengths)]),
        )
        assert output.shape[1] == prompts.shape[1] + max(lengths)

    return run


def ours(engine: NativeEngine, prompts: torch.Tensor, lengths: list[int]) -> Callable[[], None]:
    rows = prompts.numpy().astype(np.int32)
    requests = [Request(rows[i], SamplingParams(max_tokens=length), (i,)) for i, length in enumerate(lengths)]

    async def one(request: Request) -> Completion:
        (completion,) = [completion async for completion in engine.generate(request)]
        return completion

    async def all_of_them() -> None:
        completions = await asyncio.gather(*(one(request) for request in requests))
        assert [len(completion.token_ids) for completion in completions] == lengths

    return lambda: asyncio.run(all_of_them())


def cpu_seconds(runs: int, *contenders: Callable[[], None]) -> list[float]:
    """Median CPU-seconds of each contender; one run to warm up, then `runs` in turns."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for turn in range(runs + 1):
        for record, contender in zip(seconds, contenders, strict=True):
            start = time.process_time()
            contender()
            if turn:
                record.append(time.process_time() - start)
    return [statistics.median(record) for record in seconds]


def measure(name: str, size: Size, runs: int, figures: dict[str, float]) -> None:
    reference = build(size, "sdpa")
    reference.generation_config.eos_token_id = None
    model = build(size, ATTENTION)
    make_lean(model)
    engine = NativeEngine(model, max_running=BATCH)
    engine.load_weights(0, None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {parameters:,} parameters, {size}")
    random = np.random.default_rng(0)
    prompts = torch.from_numpy(random.integers(0, size.vocabulary, (BATCH, size.prompt_tokens)))
    long_lengths = random.integers(size.skewed_max_tokens // 2, size.skewed_max_tokens + 1, BATCH)
    skewed = [int(long_lengths[i]) if i % 5 == 4 else SHORT_TOKENS for i in range(BATCH)]
    skewed[4] = size.skewed_max_tokens
    for case, lengths in (("equal", [size.equal_tokens] * BATCH), ("skewed", skewed)):
        theirs_s, ours_s = cpu_seconds(runs, baseline(reference, prompts, lengths), ours(engine, prompts, lengths))
        ratio = theirs_s / ours_s
        figures[f"{name}_{case}_native_tokens_per_cpu_s"] = round(sum(lengths) / ours_s, 1)
        figures[f"{name}_{case}_generate_tokens_per_cpu_s"] = round(sum(lengths) / theirs_s, 1)
        figures[f"{name}_{case}_ratio"] = round(ratio, 2)
        print(f"  {case:7} native {ours_s:8.3f} CPU-s, generate {theirs_s:8.3f} CPU-s, {ratio:.2f}x faster", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--runs", type=int, default=2)
    arguments = parse_arguments(parser, sizes=["1M"], runs=1)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name in arguments.sizes:
        measure(name, SIZES[name], arguments.runs, figures)
    ratios = {key: value for key, value in figures.items() if key.endswith("_ratio")}
    worst = min(ratios.values())
    print(json.dumps({"benchmark": "generation", "figures": figures, "baseline": "model.generate", "ratio": worst}))


if __name__ == "__main__":
    main()
