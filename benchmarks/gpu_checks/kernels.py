"""Kernels against the same arithmetic in float32 or float64.

The error of a result is the norm of its difference to the exact one by the norm of that, in roundings of its type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_checks.figures import Bench
from gpu_checks.measuring import device_of, dtype_of, peak_gib, reset_peak, seconds
from gpu_checks.models import PolicyLoss
from tandem.models.attention.kernel_check import LARGEST, error_of
from tandem.models.attention.kernels import Flash, ReferenceKernel
from tandem.models.kernels import decoding, vocabulary
from tandem.training.head import VocabularyHead
from tandem.training.tiled_head import TiledVocabularyHead
from tandem.types import TokenColumns

_HEADS = {
    "Qwen3-0.6B": (16, 8, 128),
    "Qwen2.5-0.5B": (14, 2, 64),
    "Qwen2.5-1.5B": (12, 2, 128),
    "Qwen3-32B": (64, 8, 128),
    "Llama 3 8B": (32, 8, 128),
    "Gemma 3 1B": (4, 1, 256),
    "Phi-3 mini": (32, 32, 96),
}
"""Heads, key heads, numbers in each."""
_MOST_ROUNDINGS = 2.0
_PAGE = 16


def attention(bench: Bench) -> None:
    """Training's attention and its gradients against float64, by the rounding of plain products."""
    kernel = ReferenceKernel if bench.small else Flash
    worst = 0.0
    for name, heads in list(_HEADS.items())[: 1 if bench.small else None]:
        for dtype in (torch.bfloat16, torch.float16):
            off = error_of(kernel, heads, dtype, device_of(bench), (None, 64))
            bench.report("off by", off, "roundings", case=f"{name}, {_short(dtype)}")
            worst = max(worst, off)
    assert worst <= LARGEST, f"off by {worst:.3g} roundings"


_ALL_VARIANTS = ("Qwen3-0.6B", "Gemma 3 1B")
"""Of attention are tried in these shapes; each takes a compilation."""


def kernels(bench: Bench) -> None:
    """Operators of decoding and of the output layer against float32: Triton's kernels on a GPU."""
    device, worst = device_of(bench), 0.0
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            shapes = _HEADS if dtype == torch.bfloat16 and not bench.small else _ALL_VARIANTS[:1]
            found = {
                f"{name}, {_short(dtype)}": _decoding_errors(_HEADS[name], dtype, device, name in _ALL_VARIANTS)
                for name in shapes
            }
            found[_short(dtype)] = _vocabulary_errors(dtype, device)
            for case, errors in found.items():
                for operator, off in errors.items():
                    bench.report(operator, off, "roundings", case)
                    worst = max(worst, off / 8 if dtype == torch.float32 else off)
    assert worst <= _MOST_ROUNDINGS, f"off by {worst:.3g} roundings; of float32 an eighth counts"


def _decoding_errors(
    heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, all_variants: bool
) -> dict[str, float]:
    """Of each operator. Exact is its arithmetic in torch, on a CPU, in float32, on the same numbers."""
    torch.manual_seed(0)
    count, kv_heads, width = heads
    rows, most, hidden = 5, 40, 1024
    found: dict[str, float] = {}

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape)).to(dtype)

    before, added, weight = drawn(rows, hidden), drawn(rows, hidden), drawn(hidden)
    found["add and norm"] = _error(decoding.add_and_norm_, (before, added, weight, 1e-6), device, dtype)
    found["gate"] = _error(decoding.gated, (drawn(rows, 2 * hidden),), device, dtype)

    pages = [drawn(1 + rows * most, _PAGE, kv_heads, width) for _ in range(2)]
    angles = 100 * torch.rand(rows, width // 2)
    turns = [angles.cos().to(dtype), angles.sin().to(dtype)]
    place = torch.arange(rows) * 7 + 3
    packed, norms = drawn(rows, count + 2 * kv_heads, width), [drawn(width), drawn(width)]
    rotation = (packed, *turns, place, *pages, *norms, 1e-6)
    found["rotate and store"] = _error(decoding.rotate_and_store_, rotation, device, dtype, results=(0, 4, 5))

    table = 1 + torch.randperm(rows * most).view(rows, most).int()
    position = torch.tensor([most * _PAGE - 1, 0, 63, 64, 300])
    variants: dict[str, tuple[float, Any, Any, Any]] = {
        "attention": (1.0, None, None, None),
        "attention, scores of deviation 6": (6.0, None, None, None),
        "attention, window": (1.0, 70, None, None),
        "attention, cap and sinks": (1.0, None, 20.0, drawn(count)),
    }
    for name, (scale, window, cap, sinks) in list(variants.items())[: None if all_variants else 1]:
        asked = (drawn(rows, count, width, scale=scale), *pages, table, position, width**-0.5, window, cap, sinks)
        found[name] = _error(decoding.attend_pages, asked, device, dtype)
    return found


def _vocabulary_errors(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    tokens, words = 64, 1000
    numbers, chosen = (3 * torch.randn(tokens, words)).to(dtype), torch.randint(words, (tokens,))
    sums = torch.zeros(5, tokens)
    sums[0] = torch.finfo(torch.float32).min
    exact = sums.clone()
    vocabulary.add_tile(exact, numbers.float(), chosen, 0.7, 1.0, None)
    log_total, entropy = exact[0] + exact[1].log(), exact[1].log() - exact[2] / exact[1]
    by = torch.randn(2, tokens)
    gradient = (numbers, chosen, log_total, entropy, by[0], by[0], by[1], 0.7, 1.0, None)
    return {
        "sums of a tile": _error(vocabulary.add_tile, (sums, numbers, chosen, 0.7, 1.0, None), device, dtype, (0,)),
        "gradient of a tile": _error(vocabulary.gradient_, gradient, device, dtype, (0,)),
    }


def _error(
    operator: Any, arguments: Sequence[Any], device: torch.device, dtype: torch.dtype, results: Sequence[int] = ()
) -> float:
    """Of what `operator` returns, or else of those of its arguments that it changes, `results`."""
    given = [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in arguments]
    exact = [_as_float32(x) if isinstance(x, Tensor) else x for x in arguments]
    returned, wanted = operator(*given), operator(*exact)
    pairs = [(given[i], exact[i]) for i in results] or [(returned, wanted)]
    rounding = torch.finfo(dtype).eps
    return max(float((f.cpu().double() - w.double()).norm() / w.double().norm()) / rounding for f, w in pairs)


def _as_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32, copy=True) if x.is_floating_point() else x.clone()


def output_layer(bench: Bench) -> None:
    """Log-probs, and with gradients, of 151,936 words: tiles against whole rows."""
    device, dtype = device_of(bench), dtype_of(bench)
    tokens, hidden, words = (64, 32, 512) if bench.small else (8192, 896, 151_936)
    torch.manual_seed(0)
    layer = torch.nn.Linear(hidden, words, bias=False, device=device, dtype=dtype)
    if dtype != torch.float32:
        layer.weight.grad_dtype = torch.float32
    hidden_S = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
    targets_S = torch.randint(words, (tokens,), device=device)
    columns = TokenColumns(loss_weights=torch.full((tokens,), 1 / tokens, device=device))
    logprobs: dict[str, Tensor] = {}
    for name, head in {"tiles": TiledVocabularyHead(layer), "whole rows": VocabularyHead(layer)}.items():
        outputs = head.forward(hidden_S.detach(), targets_S)
        assert outputs.logprobs_S is not None
        logprobs[name] = outputs.logprobs_S
        reset_peak(device)
        bench.report(
            "forward", 1e3 * seconds(device, lambda h=head: h.forward(hidden_S.detach(), targets_S), 5), "ms", name
        )
        once = seconds(device, lambda h=head: h.backward(hidden_S, targets_S, columns, PolicyLoss()), 5)
        bench.report("forward and backward", 1e3 * once, "ms", name)
        if (peak := peak_gib(device)) is not None:
            bench.report("peak", peak, "GiB", name)
    product = seconds(device, lambda: layer(hidden_S.detach()), 5)
    bench.report("forward", 1e3 * product, "ms", "the product alone")
    off = float((logprobs["tiles"] - logprobs["whole rows"]).abs().max())
    bench.report("log-probs differ by", off, "", "tiles and whole rows")
    assert off < 0.05


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
