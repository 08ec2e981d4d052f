"""One layer's attention over packed rows, forward and backward: pieces against padded calls with dense masks.

The baseline is what one would write with `scaled_dot_product_attention`: segments of similar length share a call, the
keys of an answer's prompt are gathered before its own, and a boolean mask says which a query sees. Prompts of up to
4,096 tokens, groups of 1 to 16 answers; 8 heads of queries and 2 of keys, 64 numbers each, float32, one thread.

Both run in turn in one process; `ratio` is the baseline's CPU time through ours, the median of the rounds' ratios:
above 1, ours is faster. `held`: MiB that a layer keeps for its backward pass beyond its inputs, masks among them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import torch
from command_line import parse_arguments
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

from tandem.models.attention import PackedRows, Scoring
from tandem.types import IntArray

HEADS, KV_HEADS, WIDTH = 8, 2, 64
SCALE = WIDTH**-0.5


class Masked:
    """The baseline. Every answer continues one prompt, or none."""

    def __init__(self, offsets: IntArray, prefixes: IntArray) -> None:
        starts, lengths = offsets[:-1], np.diff(offsets)
        before = np.where(prefixes < 0, 0, lengths[prefixes])
        home = np.empty(int(offsets[-1]), dtype=np.int64)
        queries: list[IntArray] = []
        keys: list[IntArray] = []
        self._calls: list[tuple[int, Tensor | None]] = []
        filled = 0
        for rows in _alike(lengths, before):
            longest, seen = int(lengths[rows].max()), int(before[rows].max())
            real = np.arange(longest) < lengths[rows][:, None]
            own = starts[rows][:, None] + np.where(real, np.arange(longest), 0)
            home[own[real]] = filled + np.flatnonzero(real)
            filled += own.size
            gap = seen - before[rows]
            earlier = starts[prefixes[rows]][:, None] + np.maximum(np.arange(seen) - gap[:, None], 0)
            queries.append(own.ravel())
            keys.append(np.concatenate((earlier, own), axis=1).ravel())
            places = np.arange(seen + longest)
            mask = (places[seen:, None] >= places) & (places >= gap[:, None, None])
            self._calls.append((len(rows), torch.from_numpy(mask[:, None]) if seen else None))
        orders = (np.concatenate(queries), np.concatenate(keys), home)
        self._queries, self._keys, self._home = (torch.from_numpy(order) for order in orders)
        self._sizes = [call.size for call in queries], [call.size for call in keys]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            x[0].transpose(0, 1).index_select(0, order).split(sizes)
            for x, order, sizes in (
                (query, self._queries, self._sizes[0]),
                (key, self._keys, self._sizes[1]),
                (value, self._keys, self._sizes[1]),
            )
        )
        outputs = [self._call(*call, *own) for call, *own in zip(self._calls, q, k, v, strict=True)]
        return torch.cat(outputs).index_select(0, self._home)[None]

    def _call(self, rows: int, mask: Tensor | None, *sides: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in sides)
        output = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=SCALE, enable_gqa=True)
        return output.transpose(1, 2).flatten(0, 1)


def _alike(lengths: IntArray, before: IntArray) -> Iterator[IntArray]:
    numbers = np.arange(len(lengths))
    for rest in (numbers[before == 0], numbers[before > 0]):
        while len(rest):
            alike = lengths[rest] >= lengths[rest].max() * 0.75
            yield rest[alike]
            rest = rest[~alike]


def rows_of(prompts: int, prompt: int, answers: int) -> tuple[IntArray, IntArray]:
    """Offsets and prefixes: as many prompts, with as many answers of 64 to 256 tokens each, prompts first."""
    lengths = np.random.default_rng(0).integers(64, 257, prompts * answers)
    if prompt == 0:
        return np.append(0, lengths.cumsum()), np.full(len(lengths), -1)
    own = np.maximum(np.random.default_rng(1).integers(prompt // 2, prompt + 1, prompts), 1)
    prefixes = np.append(np.full(prompts, -1), np.repeat(np.arange(prompts), answers))
    return np.append(0, np.append(own, lengths).cumsum()), prefixes


def held(attend: Callable[[], Tensor], inputs: list[Tensor]) -> float:
    """MiB that autograd keeps of a pass, its inputs aside."""
    known = {x.untyped_storage().data_ptr() for x in inputs}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = attend()
    del output
    return sum(kept.values()) / 2**20


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(prompts: int, prompt: int, answers: int, rounds: int) -> dict[str, float]:
    offsets, prefixes = rows_of(prompts, prompt, answers)
    tokens = int(offsets[-1])
    made = [torch.randn(1, tokens, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [x.transpose(1, 2).requires_grad_() for x in made]
    grad = torch.randn(1, tokens, HEADS, WIDTH)
    plans = Masked(offsets, prefixes), PackedRows(offsets, prefixes=prefixes)

    def masked() -> Tensor:
        return plans[0].attend(*inputs)

    def pieces() -> Tensor:
        return plans[1].attend(0, *inputs, Scoring(SCALE))

    def step(attend: Callable[[], Tensor]) -> list[Tensor]:
        output = attend()
        return [output.detach(), *torch.autograd.grad(output, inputs, grad)]

    off = max(float((a - b).abs().max()) for a, b in zip(step(masked), step(pieces), strict=True))
    taken = [(seconds(lambda: step(masked)), seconds(lambda: step(pieces))) for _ in range(rounds)]
    return {
        "tokens": tokens,
        "masked_cpu_s": round(median(base for base, _ in taken), 4),
        "ratio": round(median(base / ours for base, ours in taken), 3),
        "masked_held_mib": round(held(masked, inputs), 1),
        "held_mib": round(held(pieces, inputs), 1),
        "largest_difference": off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--longest", type=int, default=4096, metavar="TOKENS", help="of the prompts")
    arguments = parse_arguments(parser, rounds=1, longest=64)
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for prompts, prompt in ((4, 0), (4, 64), (4, 256), (2, 1024), (1, 2048), (1, 4096)):
        if prompt > arguments.longest:
            continue
        for answers in (1, 4, 16):
            name = f"{prompts} prompts of up to {prompt}, {answers} answers each"
            found[name] = compare(prompts, prompt, answers, arguments.rounds)
            print(f"{name}: {found[name]}", flush=True)
    worst = min(case["ratio"] for case in found.values())
    print(json.dumps({"worst_ratio": worst, "cases": found}))


if __name__ == "__main__":
    main()
