"""Pieces are attention under a dense mask, output and gradients, whichever kernel computes them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.models.attention import PackedRows, Scoring
from tandem.models.attention.kernel_choice import kernel_for
from tandem.models.attention.kernels import Flash, ReferenceKernel
from tandem.models.attention.pieces import KernelCall, Piece, attend, gathered, shared_prefixes, tokens_before
from tandem.models.attention.rectangles import Cpu, Plain
from tandem.types import IntArray
from tests.flash_operators import flash_operators_on_the_cpu

CPU = torch.device("cpu")
Rows = tuple[IntArray, IntArray]
"""Offsets and prefixes of segments."""
ORDERS = ("prompts first", "prompt by prompt")


def packed(order: str, longest: int = 40) -> Rows:
    """Four prompts with answers, one without any."""
    random = np.random.default_rng(0)
    groups = [(int(random.integers(1, longest)), random.integers(1, longest, count)) for count in (0, 3, 1, 5, 2)]
    lengths: list[int] = []
    prefixes: list[int] = []
    if order == "prompts first":
        lengths, prefixes = [prompt for prompt, _ in groups], [-1] * len(groups)
    for number, (prompt, answers) in enumerate(groups):
        if order == "prompt by prompt":
            number = len(lengths)
            lengths.append(prompt)
            prefixes.append(-1)
        lengths += answers.tolist()
        prefixes += [number] * len(answers)
    return np.append(0, np.cumsum(lengths)), np.array(prefixes)


def tree(seed: int) -> Rows:
    random = np.random.default_rng(seed)
    prefixes = np.array([-1, *(int(random.integers(-1, segment)) for segment in range(1, 24))])
    return np.append(0, random.integers(1, 20, 24).cumsum()), prefixes


def tensors(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    drawn = [torch.randn(tokens, n, width, generator=generator, dtype=torch.float64).to(dtype) for n in counts]
    return [*(x.requires_grad_() for x in drawn[:3]), drawn[3]]


def seen(rows: Rows, window: int | None) -> Tensor:
    """bool `[N, N]`: which tokens each sees."""
    offsets, prefixes = rows
    lengths = np.diff(offsets)
    segment_N = np.repeat(np.arange(len(lengths)), lengths)
    sees, before = np.eye(len(lengths), dtype=np.bool_), np.zeros(len(lengths), dtype=np.int64)
    for segment, prefix in enumerate(prefixes.tolist()):
        if prefix >= 0:
            sees[segment] |= sees[prefix]
            before[segment] = before[prefix] + lengths[prefix]
    place_N = np.arange(len(segment_N)) - np.repeat(offsets[:-1] - before, lengths)
    behind = place_N[:, None] - place_N
    return torch.from_numpy(sees[segment_N][:, segment_N] & (behind >= 0) & (behind < (window or 10**9)))


def dense(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rows: Rows, scoring: Scoring) -> Tensor:
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * scoring.scale
    if scoring.cap is not None:
        scores = scoring.cap * (scores / scoring.cap).tanh()
    scores = scores.masked_fill(~seen(rows, scoring.window), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(key)], value)


def with_gradients(output: Tensor, grad: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    return [output, *torch.autograd.grad(output, [x for x in inputs if x is not None], grad)]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = [(f.detach().double(), w.detach().double()) for f, w in zip(found, wanted, strict=True)]
    return max(float((f - w).abs().max() / w.abs().max().clamp(min=1)) for f, w in pairs)


def planned(
    pieces: list[Piece], kernel: Callable[[Piece, torch.device], KernelCall], device: torch.device = CPU
) -> list[KernelCall]:
    return [kernel(piece, device) for piece in pieces]


@pytest.fixture
def flash() -> Iterator[None]:
    with flash_operators_on_the_cpu((torch.bfloat16, torch.float64)):
        yield


@pytest.mark.parametrize("kernel", [ReferenceKernel, Cpu, Plain, Flash])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_output_and_gradients_are_those_of_a_dense_mask(
    flash: None, kernel: Any, order: str, window: int | None, heads: tuple[int, int], with_sinks: bool
) -> None:
    rows, scoring = packed(order), Scoring(0.3, window)
    query, key, value, grad = tensors(int(rows[0][-1]), *heads, 8)
    sinks = torch.linspace(-2, 3, heads[0], dtype=torch.float64).requires_grad_() if with_sinks else None
    inputs = (query, key, value, sinks)
    wanted = with_gradients(dense(*inputs, rows, scoring), grad, *inputs)
    plans = [gathered(*rows, window), *([shared_prefixes(*rows)] if window is None else [])]
    for pieces in plans:
        found = attend(query, key, value, planned(pieces, kernel), scoring.scale, sinks)
        assert error(with_gradients(found, grad, *inputs), wanted) < 1e-12


@pytest.mark.parametrize("kernel", [ReferenceKernel, Cpu, Plain, Flash])
@pytest.mark.parametrize("seed", range(4))
def test_trees_of_prefixes(flash: None, kernel: Any, seed: int) -> None:
    rows = tree(seed)
    query, key, value, grad = tensors(int(rows[0][-1]), 4, 2, 8)
    pieces = shared_prefixes(*rows)
    assert len(pieces) > 3
    wanted = with_gradients(dense(query, key, value, None, rows, Scoring(0.3)), grad, query, key, value)
    for plan in (pieces, gathered(*rows)):
        found = attend(query, key, value, planned(plan, kernel), 0.3)
        assert error(with_gradients(found, grad, query, key, value), wanted) < 1e-12
    windowed = dense(query, key, value, None, rows, Scoring(0.3, 9))
    assert error([attend(query, key, value, planned(gathered(*rows, 9), kernel), 0.3)], [windowed]) < 1e-12


@pytest.mark.parametrize("order", ORDERS)
def test_capped_scores(order: str) -> None:
    rows, scoring = packed(order), Scoring(2.0, cap=1.5)
    query, key, value, grad = tensors(int(rows[0][-1]), 4, 2, 8)
    calls = planned(shared_prefixes(*rows), partial(Plain, cap=1.5))
    found = with_gradients(attend(query, key, value, calls, 2.0), grad, query, key, value)
    wanted = with_gradients(dense(query, key, value, None, rows, scoring), grad, query, key, value)
    assert error(found, wanted) < 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_of_ranks_is_a_piece_each(ranks: int) -> None:
    """One long row: every rank has some of its queries, and sees the keys of one rank after the other."""
    share = 6 * ranks
    tokens = share * ranks
    query, key, value, grad = tensors(tokens, 4, 2, 8)
    rows = (np.array([0, tokens]), np.array([-1]))
    wanted = with_gradients(dense(query, key, value, None, rows, Scoring(0.4)), grad, query, key, value)
    outputs: list[Tensor] = []
    gradients = [torch.zeros_like(x) for x in (query, key, value)]
    for rank in range(ranks):
        mine = slice(rank * share, (rank + 1) * share)
        lengths = np.array([share])
        own = Piece(slice(0, share), mine, lengths, lengths, causal=True)
        others = [slice(other * share, (other + 1) * share) for other in range(rank)]
        pieces = [own, *(Piece(slice(0, share), theirs, lengths, lengths, causal=False) for theirs in others)]
        own_query = query[mine].detach().requires_grad_()
        output = attend(own_query, key, value, planned(pieces, ReferenceKernel), 0.4)
        of_query, of_key, of_value = torch.autograd.grad(output, (own_query, key, value), grad[mine])
        outputs.append(output)
        gradients[0][mine] = of_query
        gradients[1] += of_key
        gradients[2] += of_value
    assert error([torch.cat(outputs), *gradients], wanted) < 1e-12


@pytest.mark.parametrize("computed", [1, 3])
def test_prefixes_that_an_earlier_pass_computed_ask_nothing(computed: int) -> None:
    offsets, prefixes = packed("prompts first")
    query, key, value, _ = tensors(int(offsets[-1]), 4, 2, 8)
    whole = dense(query, key, value, None, (offsets, prefixes), Scoring(0.3))
    first = int(offsets[computed])
    for pieces in (shared_prefixes(offsets, prefixes, computed), gathered(offsets, prefixes, None, computed)):
        found = attend(query[first:], key, value, planned(pieces, Cpu), 0.3)
        assert error([found], [whole[first:]]) < 1e-12


@pytest.mark.parametrize("widths", [(8, 8), (6, 6), (24, 16), (16, 24)])
def test_a_plan_takes_heads_of_any_width(widths: tuple[int, int]) -> None:
    """Also those of latent attention, whose values have another width than queries and keys."""
    offsets, prefixes = packed("prompt by prompt")
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, widths[0]), (2, widths[0]), (2, widths[1])]
    inputs = [torch.randn(int(offsets[-1]), *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    plan = PackedRows(offsets, prefixes=prefixes)
    found = plan.attend(0, *(x.transpose(0, 1)[None] for x in inputs), Scoring(0.3, 12))
    wanted = dense(*inputs, None, (offsets, prefixes), Scoring(0.3, 12))
    assert found.shape == (1, *wanted.shape) and error([found[0]], [wanted]) < 1e-12


def test_with_prompts_first_nothing_is_copied() -> None:
    for piece in shared_prefixes(*packed("prompts first")):
        assert isinstance(piece.queries, slice) and isinstance(piece.keys, slice)


def test_positions_go_on_after_the_prefix() -> None:
    offsets, prefixes = np.array([0, 3, 5, 6, 10]), np.array([-1, 0, 1, -1])
    assert tokens_before(offsets, prefixes).tolist() == [0, 3, 5, 0]
    assert PackedRows(offsets, prefixes=prefixes).positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]


def test_merging_by_autograd_would_be_wrong(flash: None) -> None:
    """torch's varlen_attn takes no gradient of its log-sum-exp, without a word; so backward is written out."""
    rows = packed("prompts first")
    query, key, value, grad = tensors(int(rows[0][-1]), 4, 4, 8)
    own, prefix = shared_prefixes(*rows)

    def part(piece: Piece) -> Any:
        lengths = piece.query_lengths, piece.key_lengths
        starts = [torch.from_numpy(np.append(0, x.cumsum()).astype(np.int32)) for x in lengths]
        sides = query[piece.queries], key[piece.keys], value[piece.keys]
        window = (-1, 0 if piece.causal else -1)
        longest = [int(x.max()) for x in lengths]
        return varlen_attn(
            *sides, *starts, *longest, return_aux=AuxRequest(lse=True), scale=0.3, window_size=window
        )  # fmt: skip

    (output, lse), (more, more_lse) = part(own), part(prefix)
    here = lse[:, prefix.queries]
    total = torch.logaddexp(here, more_lse)
    shares = [(x - total).exp().t()[..., None] for x in (here, more_lse)]
    merged = output.clone()
    merged[prefix.queries] = output[prefix.queries] * shares[0] + more * shares[1]
    wanted = with_gradients(dense(query, key, value, None, rows, Scoring(0.3)), grad, query, key, value)
    found = with_gradients(merged, grad, query, key, value)
    assert error(found[:1], wanted[:1]) < 1e-12 and error(found[1:], wanted[1:]) > 1e-2


class Largest(TorchDispatchMode):
    """The operators that ran, and the most elements of a tensor that one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        given = found if isinstance(found, tuple | list) else [found]
        self.elements = max([self.elements, *(x.numel() for x in given if isinstance(x, Tensor))])
        return found


@pytest.mark.parametrize("window", [None, 128])
def test_on_a_gpu_no_tensor_is_larger_than_the_queries(window: int | None) -> None:
    """Shapes alone, through the operators' own shape functions: a layer of a 32B model over 20,480 tokens."""
    lengths = [2048, 2048, *[1024] * 16]
    rows = np.append(0, np.cumsum(lengths)), np.array([-1, -1, *[0] * 8, *[1] * 8])
    meta = torch.device("meta")
    sinks = torch.zeros(64, device="meta", requires_grad=True)
    with Largest() as largest:
        query, key, value = (
            torch.empty(sum(lengths), n, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for n in (64, 8, 8)
        )
        pieces = shared_prefixes(*rows) if window is None else gathered(*rows, window)
        output = attend(query, key, value, planned(pieces, Flash, meta), 0.1, sinks)
        torch.autograd.grad(output, (query, key, value, sinks), torch.empty_like(output))
    assert output.dtype == torch.bfloat16
    assert largest.elements == query.numel()
    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        assert sum(name in operator for operator in largest.names) == len(pieces)


def test_the_operators_are_those_that_the_calls_were_written_for() -> None:
    operators: Any = torch.ops.aten
    forward, backward = (
        str(operator.default._schema)
        for operator in (operators._flash_attention_forward, operators._flash_attention_backward)
    )
    assert forward.startswith(
        "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
        "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
        "SymInt? window_size_left=None, SymInt? window_size_right=None"
    )
    assert backward.startswith(
        "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, SymInt? window_size_left=None, "
        "SymInt? window_size_right=None)"
    )


def test_the_kernel_is_chosen_by_what_it_can_compute() -> None:
    cuda_like = torch.device("meta")  # whatever is not a CPU
    assert kernel_for(CPU, torch.float32, 64, None, 10**6) is Cpu
    assert kernel_for(cuda_like, torch.bfloat16, 256, None, 10**6) is Flash
    for dtype, width, cap in ((torch.float32, 64, None), (torch.bfloat16, 264, None), (torch.bfloat16, 64, 50.0)):
        chosen: Any = kernel_for(cuda_like, dtype, width, cap, 10)
        assert chosen.func is Plain and chosen.keywords == {"cap": cap}
