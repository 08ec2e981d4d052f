"""Which tokens may be drawn, and which one is: against a sort of the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.models.kernels import drawing

TOP_P = (1e-12, 1e-3, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-6, 1 - 1e-12, 1.0)
TOP_K = (0, 1, 2, 7, 50, 10_000)
KINDS = ("random", "peaked", "flat", "tied", "certain")


def logits_of(kind: str, rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Rounded to `dtype`, in float32; bfloat16 alone ties hundreds of tokens of a large vocabulary."""
    logits = torch.randn(rows, vocabulary)
    if kind == "peaked":
        logits = 12 * logits
    elif kind == "flat":
        logits = torch.zeros_like(logits)
    elif kind == "tied":
        logits = torch.randint(0, 3, logits.shape).float()
    elif kind == "certain":
        logits = torch.where(logits == logits.amax(-1, keepdim=True), 300.0, logits)
    return logits.to(dtype).float()


EXACT = {"flat", "tied", "certain"}
"""Sums of their probabilities are exact in float64, in whatever order they are added up."""


def by_sorting(probs: Tensor, top_k: int, top_p: float, more: float = 0) -> tuple[np.ndarray, np.ndarray]:
    """The allowed tokens of one row, the most probable first, and their float64 probabilities; `more`: the share by
    which another order of adding may change the total."""
    order = torch.sort(probs, descending=True, stable=True).indices.numpy()
    order = order[: min(top_k, len(order))] if top_k else order
    weights = probs.double().numpy()[order]
    cumulative = weights.cumsum()
    kept = (cumulative - weights < top_p * cumulative[-1] * (1 + more)) & (weights > 0)
    return order[kept], weights[kept]


@pytest.mark.parametrize("vocabulary", [5, 31, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_are_allowed_as_by_sorting_all(kind: str, dtype: torch.dtype, vocabulary: int) -> None:
    """Every top-k with every top-p, in rows that are drawn together."""
    torch.manual_seed(0)
    how = [(top_k, top_p) for top_k in TOP_K for top_p in TOP_P]
    probs = logits_of(kind, len(how), vocabulary, dtype).softmax(-1)
    top_k, top_p = torch.tensor([k for k, _ in how]), torch.tensor([p for _, p in how], dtype=torch.float64)
    weights, tokens = drawing.allowed(probs, top_k, top_p)
    uniform = torch.rand(len(how), 1, dtype=torch.float64)
    drawn = drawing.draw_filtered(probs, uniform, top_k, top_p)
    rounding = 0 if kind in EXACT else 1e-15
    for row, (k, p) in enumerate(how):
        found = tokens[row][weights[row] > 0].tolist()
        (least, _), (most, _) = (by_sorting(probs[row], k, p, more) for more in (-rounding, rounding))
        assert found == most.tolist()[: len(found)] and len(least) <= len(found), (k, p)
        if p < 0.9999:
            assert len(least) == len(most), "no case stands on the edge"
        cumulative = probs[row].double().numpy()[found].cumsum()
        place = int(np.searchsorted(cumulative, float(uniform[row]) * cumulative[-1], side="right"))
        assert drawn[row] == found[place]


def test_few_tokens_of_a_peaked_distribution_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50,000 those below a 500,000th are out of question for top-p 0.9."""
    torch.manual_seed(0)
    sorted_columns: list[int] = []
    sort = Tensor.sort

    def counted(values: Tensor, **options: bool) -> tuple[Tensor, Tensor]:
        sorted_columns.append(values.shape[1])
        return sort(values, **options)

    monkeypatch.setattr(Tensor, "sort", counted)
    probs = logits_of("peaked", 4, 50_000, torch.float32).softmax(-1)
    drawing.allowed(probs, torch.zeros(4, dtype=torch.int64), torch.full((4,), 0.9, dtype=torch.float64))
    assert sorted_columns and max(sorted_columns) < 2_000
