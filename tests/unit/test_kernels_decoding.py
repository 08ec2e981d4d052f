"""What a decoding pass of a GPU does besides products, against float64: in torch, and Triton's kernels, interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.models.kernels import decoding

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PAGE = 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = {
    "qwen3": (16, 8, 128, 128), "qwen2": (14, 2, 64, 64), "hymba": (25, 5, 64, 64), "phi": (4, 4, 80, 80),
    "gemma": (8, 1, 256, 256), "two widths": (4, 2, 24, 16),
}  # fmt: skip
"""Heads, key heads, width of keys, of values."""
PUBLISHED = {
    "qwen3-0.6b": (16, 8, 128, None, None, False), "qwen3-8b": (32, 8, 128, None, None, False),
    "qwen3-32b": (64, 8, 128, None, None, False), "llama-3-8b": (32, 8, 128, None, None, False),
    "gemma-3-4b": (8, 4, 256, 1024, None, False), "gemma-2-9b": (16, 8, 256, 4096, 50.0, False),
    "gpt-oss-20b": (64, 8, 64, 128, None, True),
}  # fmt: skip
"""Heads, key heads, their width, window, cap, sinks."""


def operators() -> Any:
    if not INTERPRETED:
        return decoding
    from tandem.models.kernels import decoding_triton

    return decoding_triton


def close(found: Tensor, wanted: Tensor, roundings: float = 2) -> None:
    """Within so many roundings of the type, or of float32's sums."""
    rounding = max(torch.finfo(found.dtype).eps, 2e-6)
    torch.testing.assert_close(found.double(), wanted, rtol=roundings * rounding, atol=roundings * rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 1000])
def test_float64_says_the_same_of_norms_and_gates(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    hidden, added, gate_up = (torch.randn(5, n).to(dtype) for n in (width, width, 2 * width))
    weight = torch.rand(width).to(dtype)
    for more in (None, added):
        total = hidden.clone()
        normed = operators().add_and_norm_(total, more, weight, 1e-6)
        close(total, hidden.double() if more is None else hidden.double() + added.double(), 1)
        close(normed, torch.rms_norm(total.double(), (width,), weight.double(), 1e-6))
    gate, up = gate_up.double().chunk(2, -1)
    close(operators().gated(gate_up), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("norms", [True, False])
def test_float64_says_the_same_of_rotations(dtype: torch.dtype, head_dim: int, norms: bool) -> None:
    torch.manual_seed(0)
    rows, heads, kv_heads = 3, 4, 2
    packed = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(dtype)
    angles = 100 * torch.rand(rows, head_dim // 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [torch.rand(head_dim).to(dtype) for _ in range(2)] if norms else [None, None]
    keys, values = (torch.zeros(4, PAGE, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    place = torch.tensor([17, 0, 63])
    before = packed.clone()
    operators().rotate_and_store_(packed, cosines, sines, place, keys, values, *weights, 1e-6)
    exact = before.double()
    queries, made, others = exact[:, :heads], exact[:, heads:-kv_heads], exact[:, -kv_heads:]
    if norms:
        queries, made = (
            torch.rms_norm(x, (head_dim,), weight.double(), 1e-6).to(dtype).double()
            for x, weight in ((queries, weights[0]), (made, weights[1]))
            if weight is not None
        )
    turned = [_rotated(x, cosines.double()[:, None], sines.double()[:, None]) for x in (queries, made)]
    close(packed[:, :heads], turned[0], 4)
    close(keys.flatten(0, 1)[place], turned[1], 4)
    assert torch.equal(values.flatten(0, 1)[place].double(), others)
    assert keys.count_nonzero() == keys.flatten(0, 1)[place].count_nonzero(), "nothing else is written"


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize(
    ("window", "cap", "sinks"), [(None, None, False), (70, None, False), (None, 20.0, False), (5, 30.0, True)]
)
def test_float64_says_the_same_of_attention(
    dtype: torch.dtype, shape: str, rows: int, window: int | None, cap: float | None, sinks: bool
) -> None:
    if rows == 70 and shape != "qwen2":
        pytest.skip("what many rows change, that they are not split, is the same in every shape")
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    torch.manual_seed(0)
    position = torch.tensor([200, 0, 63, 64, 15]).repeat(14)[:rows]
    compare_attention(SHAPES[shape], position, dtype, window, cap, sinks)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", PUBLISHED)
def test_float64_says_the_same_of_published_shapes(dtype: torch.dtype, shape: str) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    torch.manual_seed(0)
    heads, kv_heads, head_dim, *options = PUBLISHED[shape]
    compare_attention((heads, kv_heads, head_dim, head_dim), torch.tensor([199, 1]), dtype, *options)


def random_shape(seed: int) -> None:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kv_heads, group = int(random.integers(1, 5)), int(random.integers(1, 9))
    of_keys, of_values = (8 * int(n) for n in random.integers(1, 20, 2))
    window = int(random.integers(1, 200)) if random.random() < 0.5 else None
    cap = float(random.uniform(5, 60)) if random.random() < 0.5 else None
    position = torch.from_numpy(random.integers(0, 208, int(random.integers(1, 5))))
    dtype = [torch.float32, torch.float16][int(random.integers(2))]
    shape = kv_heads * group, kv_heads, of_keys, of_values
    compare_attention(shape, position, dtype, window, cap, sinks=bool(random.random() < 0.5))


@pytest.mark.parametrize(
    "seeds",
    [range(3), *(pytest.param(range(n, n + 20), marks=pytest.mark.nightly) for n in range(3, 203, 20))],
    ids=str,
)
def test_float64_says_the_same_of_random_shapes(seeds: range) -> None:
    for seed in seeds:
        random_shape(seed)


def compare_attention(
    shape: tuple[int, int, int, int],
    position: Tensor,
    dtype: torch.dtype,
    window: int | None,
    cap: float | None,
    sinks: bool,
) -> None:
    (heads, kv_heads, of_keys, of_values), rows, most = shape, len(position), 13
    pages = 1 + min(rows, 5) * most
    keys = torch.randn(pages, PAGE, kv_heads, of_keys).to(dtype)
    values = torch.randn(pages, PAGE, kv_heads, of_values).to(dtype)
    packed = torch.randn(rows, heads + 2, of_keys).to(dtype)
    query = 2 * packed[:, :heads]  # rows that do not lie side by side
    table = 1 + torch.randperm(pages - 1)[: 5 * most].view(-1, most).int().repeat(rows, 1)[:rows]
    logits = torch.randn(heads).to(dtype) if sinks else None
    scale = of_keys**-0.5
    found = operators().attend_pages(query, keys, values, table, position, scale, window, cap, logits)
    assert found.shape == (rows, heads, of_values) and found.dtype == dtype
    for row in range(rows):
        first = 0 if window is None else max(0, int(position[row]) + 1 - window)
        seen = slice(first, int(position[row]) + 1)
        of_row = [x[table[row].long()].flatten(0, 1)[seen].double() for x in (keys, values)]
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in of_row)
        scores = torch.einsum("hd,lhd->hl", query[row].double(), key) * scale
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        most_s = scores.amax(-1, keepdim=True)
        weights = (scores - most_s).exp()
        total = weights.sum(-1) + (0 if logits is None else (logits.double() - most_s[:, 0]).exp())
        wanted = torch.einsum("hl,lhd->hd", weights, value) / total[:, None]
        close(found[row], wanted)


@pytest.mark.parametrize("rows", [1, 130])
def test_places_are_those_of_the_table(rows: int) -> None:
    torch.manual_seed(0)
    table, position = torch.randint(1, 1000, (rows + 2, 9)).int()[:rows], torch.randint(0, 9 * PAGE, (rows,))
    wanted = [int(table[row, at // PAGE]) * PAGE + at % PAGE for row, at in enumerate(position.tolist())]
    assert operators().places(table, position, PAGE).tolist() == wanted


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: torch's builds for CUDA bring it")
@pytest.mark.parametrize(
    "which",
    [
        "places or (float64 and float32 and (norms or rotations or (two and 5-30.0-True-5)))",
        pytest.param("float64", marks=pytest.mark.nightly),
    ],
    ids=["few", "all"],
)
def test_the_kernels_say_the_same_under_the_interpreter(which: str) -> None:
    """In a process of its own: Triton asks how to run when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", which]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
