"""The Triton kernels of the output layer, under Triton's interpreter, against float64; skipped where Triton is not."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tandem.models.kernels import vocabulary
from tandem.models.logits import NO_BEND, Bend

TOKENS, WORDS, TILE = 6, 300, 128
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BENDS = [NO_BEND, Bend(factor=0.25), Bend(cap=3.0)]


def exact(numbers: Tensor, chosen: Tensor, bend: Bend, temperature: float, by: Tensor) -> tuple[Tensor, Tensor]:
    """In float64: log sum exp, entropy, sum of squares and chosen logit, `[4, C]`, and the gradient of the numbers
    by the chosen log-prob, further ones that are summed up in it, and the entropy, `by` `[3, C]`."""
    x = numbers.double().requires_grad_()
    logits = (bend.factor * x if bend.cap is None else bend.cap * (x / bend.cap).tanh() * bend.factor) / temperature
    log_softmax = logits.log_softmax(-1)
    probs, at = log_softmax.exp(), chosen[:, None]
    entropy = -(probs * log_softmax).sum(-1)
    further = -logits.logsumexp(-1)  # the softmax's part in log-probs of other tokens
    value = by[0] * log_softmax.gather(1, at)[:, 0] + (by[1] - by[0]) * further + by[2] * entropy
    (gradient,) = torch.autograd.grad(value.sum(), x)
    found = logits.logsumexp(-1), entropy, probs.square().sum(-1), logits.gather(1, at)[:, 0]
    return torch.stack(found).detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bend", BENDS, ids=str)
@pytest.mark.parametrize("with_entropy", [True, False])
def test_tiles_answer_what_float64_does(dtype: torch.dtype, bend: Bend, with_entropy: bool) -> None:
    """The operators' arithmetic in torch; where Triton's interpreter runs, the kernels'."""
    operators = _kernels() if INTERPRETED else vocabulary
    torch.manual_seed(0)
    numbers = (3 * torch.randn(TOKENS, WORDS)).to(dtype)
    numbers[0] *= 1e-3  # a cap's tanh near 0
    chosen, temperature = torch.tensor([0, 127, 128, 255, 256, 299]), 0.7
    by = torch.randn(3, TOKENS)
    if not with_entropy:
        by[2] = 0
    wanted, gradient = exact(numbers, chosen, bend, temperature, by.double())
    sums = torch.zeros(5, TOKENS)
    sums[0] = torch.finfo(torch.float32).min
    tiles = [slice(start, min(start + TILE, WORDS)) for start in range(0, WORDS, TILE)]
    how = temperature, bend.factor, bend.cap
    for part in tiles:
        operators.add_tile(sums, numbers[:, part].contiguous(), chosen - part.start, *how)
    largest, total, weighted, squares, picked = sums
    log_total, entropy = largest + total.log(), total.log() - weighted / total
    found = torch.stack((log_total, entropy, squares / total.square(), picked))
    torch.testing.assert_close(found, wanted.float(), rtol=3e-6, atol=3e-6)
    for part in tiles:
        tile = numbers[:, part].contiguous()
        operators.gradient_(
            tile, chosen - part.start, log_total, entropy, by[0], by[1], by[2] if with_entropy else None, *how
        )
        rounding = max(torch.finfo(dtype).eps, 4e-6)
        torch.testing.assert_close(tile.double(), gradient[:, part], rtol=rounding, atol=3e-6)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: torch's builds for CUDA bring it")
def test_the_kernels_answer_the_same_under_the_interpreter() -> None:
    """In a process of its own: Triton asks how to run when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "float64"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "18 passed" in done.stdout, done.stdout[-3000:]


def _kernels() -> object:
    from tandem.models.kernels import vocabulary_triton

    return vocabulary_triton
