"""Conversations of several turns on the native engine: their cache kept between the turns, or all computed anew.

Run: python benchmarks/conversations.py [--sizes 1M 10M] [--turns N] [--conversations N] [--runs N]

Each turn the policy says 32 tokens and is told 32; a prompt has 128, and 4 siblings, for which it is computed once.
Conversations are asked at once, each for itself, and answered as they come. Without keeping, a later turn prefills the
conversation so far: all turns together about (turns + 1) / 2 times its tokens. Figures are medians of CPU-seconds over
interleaved runs, one CPU thread, float32; and prefilled tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable

import numpy as np
import torch
from command_line import parse_arguments
from generation import SIZES, build, cpu_seconds

from tandem.generation.native import NativeEngine
from tandem.models.attention import ATTENTION
from tandem.models.lean import make_lean
from tandem.types import Request, SamplingParams

PROMPT, SIBLINGS, SAID, TOLD = 128, 4, 32, 32


def conversations(engine: NativeEngine, count: int, turns: int, vocabulary: int, keep: bool) -> Callable[[], None]:
    sampling = SamplingParams(max_tokens=SAID)

    async def converse(number: int) -> None:
        row = np.random.default_rng([number // SIBLINGS]).integers(0, vocabulary, PROMPT, dtype=np.int32)
        random = np.random.default_rng(number)
        for turn in range(turns):
            asked = Request(row, sampling, (turns * number + turn,), keep=keep)
            (completion,) = [completion async for completion in engine.generate(asked)]
            row = np.concatenate((row, completion.token_ids, random.integers(0, vocabulary, TOLD, dtype=np.int32)))

    async def all_of_them() -> None:
        engine.load_weights(0, None)  # nothing is kept from the run before
        await asyncio.gather(*map(converse, range(count)))

    return lambda: asyncio.run(all_of_them())


def measure(name: str, arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    model = build(SIZES[name], ATTENTION)
    make_lean(model)
    engines = [NativeEngine(model, max_running=arguments.conversations) for _ in range(2)]
    runs = [
        conversations(engine, arguments.conversations, arguments.turns, SIZES[name].vocabulary, keep)
        for engine, keep in zip(engines, (False, True), strict=True)
    ]
    anew_s, kept_s = cpu_seconds(arguments.runs, *runs)
    anew, kept = (engine.prefilled_tokens / (arguments.runs + 1) for engine in engines)
    prompts = -(-arguments.conversations // SIBLINGS)
    assert kept == prompts * PROMPT + arguments.conversations * (arguments.turns - 1) * (1 + TOLD), "each token once"
    figures |= {
        f"{name}_anew_cpu_s": round(anew_s, 3),
        f"{name}_kept_cpu_s": round(kept_s, 3),
        f"{name}_anew_prefilled_tokens": anew,
        f"{name}_kept_prefilled_tokens": kept,
        f"{name}_ratio": round(anew_s / kept_s, 2),
    }
    print(
        f"{name}: {arguments.conversations} conversations of {arguments.turns} turns: kept {kept_s:.3f} CPU-s and "
        f"{kept:,.0f} prefilled tokens, anew {anew_s:.3f} CPU-s and {anew:,.0f}; {anew_s / kept_s:.2f}x faster",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "10M"])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--runs", type=int, default=2)
    arguments = parse_arguments(parser, sizes=["1M"], turns=2, conversations=4, runs=1)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name in arguments.sizes:
        measure(name, arguments, figures)
    worst = min(value for key, value in figures.items() if key.endswith("_ratio"))
    print(json.dumps({"benchmark": "conversations", "figures": figures, "baseline": "keep=False", "ratio": worst}))


if __name__ == "__main__":
    main()
