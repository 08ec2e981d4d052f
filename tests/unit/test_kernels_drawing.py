"""Which tokens may be drawn, and which one is: against a sort of the whole vocabulary."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.generation.native_rows import _ROW
from tandem.generation.recorded import _packed
from tandem.generation.sampling import sample, streams, uniforms
from tandem.models.kernels import drawing

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
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


def state_of(rows: int, seed: int = 0) -> np.ndarray:
    """Rows of all kinds: greedy ones, with and without top-k and top-p, at several temperatures and places."""
    random = np.random.default_rng(seed)
    state = np.zeros(rows, dtype=_ROW)
    state["stream"] = streams(range(seed, seed + rows))
    for name, values in {
        "made": [0, 1, 7, 1000], "temperature": [1, 1, 0.7, 1.3, 0], "top_k": [0, 0, 1, 5, 50, 10**6],
        "top_p": [1, 1, 0.3, 0.9, 0.999], "last": [0, 3], "position": [5, 17], "lag": [0, -2],
    }.items():  # fmt: skip
        state[name] = random.choice(values, rows)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("never", [None, torch.tensor([1, 4])], ids=["all", "some"])
@pytest.mark.parametrize("vocabulary", [6, 1300])
def test_the_operator_chooses_what_a_chooser_chooses(vocabulary: int, never: Tensor | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    state = state_of(200)
    packed, chosen = torch.from_numpy(_packed(state, 203)), torch.zeros(203, 2, dtype=torch.float64)
    before = packed.clone()
    for _ in range(3):
        logits = torch.randn(203, vocabulary).to(dtype)
        tokens, logprobs = sample(logits[:200].clone(), state, never)
        drawing.choose_(logits, packed, chosen, never)
        assert chosen[:200, 0].tolist() == tokens.tolist() == packed[0, :200].tolist()
        assert chosen[:200, 1].tolist() == logprobs.tolist()
        state["last"] = tokens
        state["made"] += 1
        state["position"] += 1
    assert torch.equal(packed[:, :200], torch.from_numpy(_packed(state, 200)))
    assert torch.equal(packed[1:, 200:], before[1:, 200:]), "what fills rows up stays where it is"


interpreted = pytest.mark.skipif(not INTERPRETED, reason="asked in a process of its own, with Triton's interpreter")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("never", [None, torch.tensor([1, 4])], ids=["all", "some"])
@pytest.mark.parametrize("vocabulary", [6, 4096, 9000])
def test_the_kernels_make_the_probabilities(vocabulary: int, never: Tensor | None, dtype: torch.dtype) -> None:
    """Against float64."""
    from tandem.models.kernels import drawing_triton

    torch.manual_seed(0)
    state = state_of(5)
    logits = (3 * torch.randn(5, vocabulary)).to(dtype)
    made = drawing_triton.probabilities(logits, torch.from_numpy(_packed(state, 5)), never)
    divisor = torch.from_numpy(np.where(state["temperature"] == 0, 1, state["temperature"]))[:, None]
    wanted, scores = (logits.double() / divisor).softmax(-1), logits.double()
    if never is not None:
        wanted, scores = wanted.index_fill(1, never, 0), scores.index_fill(1, never, -torch.inf)
    torch.testing.assert_close(made.probs_BV.double(), wanted, rtol=4e-6, atol=0)
    tiles = made.masses.shape[1]
    padded = torch.nn.functional.pad(made.probs_BV, (0, -vocabulary % 4096)).view(5, tiles, 4096)
    torch.testing.assert_close(made.masses, padded.double().sum(-1))
    assert torch.equal(made.peaks, padded.view(5, -1, 128).amax(-1))
    best = made.sums[..., 2].argmax(-1, keepdim=True)
    assert torch.equal(made.best.gather(1, best)[:, 0].long(), scores.argmax(-1))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocabulary", "rows"),
    [(7, 20), *(pytest.param(*size, marks=pytest.mark.nightly) for size in ((31, 100), (4096, 30), (9000, 20)))],
)
def test_the_kernels_draw_what_sorting_draws(vocabulary: int, rows: int, kind: str, dtype: torch.dtype) -> None:
    """Of the same probabilities."""
    from tandem.models.kernels import drawing_triton

    torch.manual_seed(0)
    state = state_of(rows, seed=vocabulary)
    packed, chosen = torch.from_numpy(_packed(state, rows)), torch.zeros(rows, 2, dtype=torch.float64)
    made = drawing_triton.probabilities(logits_of(kind, rows, vocabulary, dtype), packed, None)
    drawing_triton.draw_(made, packed, chosen)
    numbers = uniforms(state["stream"], state["made"])
    for row, token in enumerate(chosen[:, 0].long().tolist()):
        probs, uniform = made.probs_BV[row], float(numbers[row])
        k, p = int(state["top_k"][row]), float(state["top_p"][row])
        tokens, weights = np.arange(vocabulary), probs.double().numpy()
        if k or p < 1:
            tokens, weights = by_sorting(probs, k, p)
        cumulative = weights.cumsum()
        place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        best = state["temperature"][row] == 0
        assert token == (int(probs.argmax()) if best else int(tokens[place])), (row, k, p)
        assert float(chosen[row, 1]) == pytest.approx(float(probs[token].log()), abs=1e-6)
    assert packed[0].tolist() == chosen[:, 0].tolist()
    assert packed[1].tolist() == (state["position"] + 1).tolist() and packed[3].tolist() == (state["made"] + 1).tolist()


@interpreted
def test_rows_of_nan_end() -> None:
    from tandem.models.kernels import drawing_triton

    state = state_of(40)
    packed, chosen = torch.from_numpy(_packed(state, 40)), torch.zeros(40, 2, dtype=torch.float64)
    with warnings.catch_warnings(action="ignore"):  # numpy's, of NaN
        drawing_triton.choose_(torch.full((40, 50), torch.nan), packed, chosen, None)
    assert chosen[:, 1].isnan().all() and ((chosen[:, 0] >= 0) & (chosen[:, 0] < 50)).all()


@pytest.mark.skipif(INTERPRETED, reason="it asks for itself")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: torch's builds for CUDA bring it")
@pytest.mark.parametrize("tier", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_the_kernels_under_the_interpreter(tier: str) -> None:
    """In a process of its own: Triton asks how to run when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "make_the_probabilities or sorting_draws or of_nan", "-m", tier]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


def test_of_equally_probable_tokens_at_the_end_of_a_top_k_those_of_the_lowest_ids_may_be_drawn() -> None:
    probs = torch.full((3, 1000), 0.5e-3)
    probs[:, 700:702] = 0.2
    weights, tokens = drawing.allowed(probs, torch.tensor([5, 2, 1]), torch.ones(3, dtype=torch.float64))
    found = [sorted(own[weight > 0].tolist()) for own, weight in zip(tokens, weights, strict=True)]
    assert found == [[0, 1, 2, 700, 701], [700, 701], [700]]
