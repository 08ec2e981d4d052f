"""The check at an engine's start passes right kernels and finds each mistake that a kernel could make."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.models.attention.kernel_check import LARGEST, Kernel, error_of
from tandem.models.attention.kernels import Flash, ReferenceKernel
from tandem.models.attention.pieces import Piece
from tandem.models.attention.rectangles import Cpu, Plain
from tests.flash_operators import flash_operators_on_the_cpu

CPU = torch.device("cpu")
HEADS = (6, 2, 32)


@pytest.fixture(autouse=True)
def flash() -> Iterator[None]:
    with flash_operators_on_the_cpu():
        yield


@pytest.mark.parametrize("kernel", [Flash, Cpu, Plain])
@pytest.mark.parametrize("heads", [HEADS, (4, 4, 64), (5, 1, 8)])
def test_right_kernels_are_off_by_rounding_alone(kernel: Kernel, heads: tuple[int, int, int]) -> None:
    assert error_of(kernel, heads, torch.bfloat16, CPU, (None, 7, 200)) < LARGEST / 2


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_an_engine_may_start_where_no_gradients_are_kept(without: type[AbstractContextManager[None]]) -> None:
    with without():
        assert error_of(ReferenceKernel, HEADS, torch.bfloat16, CPU) == pytest.approx(1)


class Mistaken(ReferenceKernel):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return self.answer(*super().forward(query, key, value, scale))

    def answer(self, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return output, lse


class BaseTwo(Mistaken):
    def answer(self, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return output, lse / torch.log(torch.tensor(2.0))


class OneHeadOfAGroup(Mistaken):
    def answer(self, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return output.index_copy(1, torch.tensor([1]), output[:, 2:3]), lse


class WindowOffByOne(ReferenceKernel):
    def __init__(self, piece: Piece, device: torch.device) -> None:
        places = (piece.queries, piece.keys, piece.query_lengths, piece.key_lengths)
        super().__init__(Piece(*places, piece.causal, piece.window and piece.window + 1), device)


class NotCausal(ReferenceKernel):
    def __init__(self, piece: Piece, device: torch.device) -> None:
        super().__init__(Piece(piece.queries, piece.keys, piece.query_lengths, piece.key_lengths, False), device)


class OwnLogSumExp(ReferenceKernel):
    """Backward as autograd through each call alone would do it."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
    ) -> Any:
        own, own_lse = self.forward(query, key, value, scale)
        output, lse = output.clone(), lse.clone()
        output[self.queries], lse[:, self.queries] = own, own_lse
        return super().backward(grad, query, key, value, output, lse, scale)


@pytest.mark.parametrize("kernel", [BaseTwo, OneHeadOfAGroup, WindowOffByOne, NotCausal, OwnLogSumExp])
def test_mistaken_kernels_are_off_by_far_more(kernel: Kernel) -> None:
    assert error_of(kernel, HEADS, torch.bfloat16, CPU, (None, 7)) > 3 * LARGEST
