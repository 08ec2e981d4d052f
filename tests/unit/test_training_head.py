"""The output layer, chunk by chunk and tile by tile, against plain log_softmax under autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tandem.models.logits import NO_BEND, Bend
from tandem.training.base import sum_results
from tandem.training.head import VocabularyHead
from tandem.training.tiled_head import TiledVocabularyHead
from tandem.types import Outputs, TokenColumns
from tests.storages import Storages

TOKENS, HIDDEN, VOCABULARY = 13, 8, 31


class CurvedLoss:
    """A loss that is not linear in its inputs; where it is not token-local, tokens depend on their mean."""

    def __init__(self, token_local: bool, entropy_gradient: bool) -> None:
        self.token_local = token_local
        self.entropy_gradient = entropy_gradient
        self.calls = 0

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.calls += 1
        logprobs_S, entropy_S, weights_S = outputs.logprobs_S, outputs.entropy_S, columns.loss_weights
        assert logprobs_S is not None and entropy_S is not None and weights_S is not None
        centre = 0.0 if self.token_local else logprobs_S.mean()
        term_S = (logprobs_S - centre).exp() + logprobs_S.square()
        if self.entropy_gradient:
            term_S = term_S - 0.3 * entropy_S.square()
        return (weights_S * term_S).sum(), {"entropy": (weights_S * entropy_S.detach()).sum()}


class Case:
    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(HIDDEN, VOCABULARY, bias=bias).to(dtype)
        self.hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
        self.targets = torch.randint(VOCABULARY, (TOKENS,))
        self.columns = TokenColumns(loss_weights=torch.rand(TOKENS))

    def plain(
        self, loss: CurvedLoss, temperature: float, bend: Bend = NO_BEND
    ) -> tuple[Outputs[torch.Tensor], torch.Tensor]:
        logits = self.linear(self.hidden).float() * bend.factor
        if bend.cap is not None:
            logits = bend.cap * (logits / bend.cap).tanh()
        logprobs = torch.log_softmax(logits / temperature, -1)
        chosen = logprobs.gather(1, self.targets[:, None]).squeeze(1)
        outputs = Outputs(chosen, -(logprobs.exp() * logprobs).sum(-1))
        value, _ = loss(outputs, self.columns)
        value.backward()
        return outputs, value

    def head(self, temperature: float, tokens_per_chunk: int, bend: Bend = NO_BEND) -> VocabularyHead:
        return VocabularyHead(self.linear, temperature, tokens_per_chunk * VOCABULARY, bend)

    def tiled(self, temperature: float, tokens: int, words: int, bend: Bend = NO_BEND) -> TiledVocabularyHead:
        return TiledVocabularyHead(self.linear, temperature, bend, tokens, words)

    def gradients(self) -> list[torch.Tensor]:
        tensors = (self.hidden, *self.linear.parameters())
        return [tensor.grad for tensor in tensors if tensor.grad is not None]


TILES = [(1, None), (5, None), (100, None), (5, 7), (4, 100)]
"""Tokens of a chunk, or tokens and words of a tile."""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("tokens", "words"), TILES)
@pytest.mark.parametrize("token_local", [True, False])
@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("bend", [NO_BEND, Bend(factor=0.5), Bend(cap=0.5)], ids=str)
def test_loss_and_gradients_are_the_plain_ones(
    bias: bool,
    temperature: float,
    tokens: int,
    words: int | None,
    token_local: bool,
    entropy_gradient: bool,
    bend: Bend,
) -> None:
    loss = CurvedLoss(token_local, entropy_gradient)
    plain, chunked = Case(bias=bias), Case(bias=bias)
    wanted, value = plain.plain(loss, temperature, bend)
    head = chunked.tiled(temperature, tokens, words, bend) if words else chunked.head(temperature, tokens, bend)
    result = head.backward(chunked.hidden, chunked.targets, chunked.columns, loss)
    outputs = result.outputs
    assert wanted.logprobs_S is not None and wanted.entropy_S is not None
    torch.testing.assert_close(outputs.logprobs_S, wanted.logprobs_S.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(outputs.entropy_S, wanted.entropy_S.detach(), rtol=0, atol=1e-6)
    loss_sum, metrics = sum_results([result])
    assert loss_sum == pytest.approx(value.item(), rel=1e-6)
    assert chunked.columns.loss_weights is not None
    entropy = (chunked.columns.loss_weights * wanted.entropy_S).sum().item()
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-6)
    assert len(plain.gradients()) == 2 + bias
    for found, want in zip(chunked.gradients(), plain.gradients(), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=2e-6)
    forward = head.forward(chunked.hidden.detach(), chunked.targets)
    torch.testing.assert_close(forward.logprobs_S, outputs.logprobs_S, rtol=0, atol=0)
    torch.testing.assert_close(forward.entropy_S, outputs.entropy_S, rtol=0, atol=0)
    logits = chunked.linear(chunked.hidden).detach() * bend.factor
    bent = logits if bend.cap is None else bend.cap * (logits / bend.cap).tanh()
    torch.testing.assert_close(forward.squared_probs_S, (bent / temperature).softmax(-1).square().sum(-1))


def test_a_token_local_loss_is_called_once_a_chunk_and_any_other_once() -> None:
    for token_local, calls in ((True, 3), (False, 1)):
        case, loss = Case(), CurvedLoss(token_local, False)
        case.head(1.0, 5).backward(case.hidden, case.targets, case.columns, loss)
        assert loss.calls == calls


def test_the_weight_gradient_is_added_to_what_is_there() -> None:
    case, loss = Case(), CurvedLoss(True, False)
    case.linear.weight.grad = torch.full_like(case.linear.weight, 2.0)
    before = case.linear.weight.grad
    case.head(1.0, 5).backward(case.hidden, case.targets, case.columns, loss)
    plain = Case()
    plain.plain(loss, 1.0)
    assert case.linear.weight.grad is before and plain.linear.weight.grad is not None
    torch.testing.assert_close(before - 2, plain.linear.weight.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("words", [None, 7])
def test_bfloat16_weights_get_a_float32_softmax_and_float32_gradients(words: int | None) -> None:
    case, plain, loss = Case(torch.bfloat16), Case(torch.bfloat16), CurvedLoss(True, True)
    case.linear.weight.grad_dtype = torch.float32
    head = case.tiled(1.0, 5, words) if words else case.head(1.0, 5)
    result = head.backward(case.hidden, case.targets, case.columns, loss)
    wanted, _ = plain.plain(loss, 1.0)
    gradient = case.linear.weight.grad
    assert wanted.logprobs_S is not None and plain.linear.weight.grad is not None
    assert gradient is not None and gradient.dtype == torch.float32
    torch.testing.assert_close(result.outputs.logprobs_S, wanted.logprobs_S.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, plain.linear.weight.grad.float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(case.hidden.grad, plain.hidden.grad, rtol=0.02, atol=0.02)


def test_tiles_pass_frozen_parameters_by_and_take_no_tokens() -> None:
    case, plain, loss = Case(bias=True), Case(bias=True), CurvedLoss(True, True)
    case.linear.requires_grad_(False)
    case.tiled(1.0, 4, 8).backward(case.hidden, case.targets, case.columns, loss)
    plain.plain(loss, 1.0)
    assert case.linear.weight.grad is None and case.linear.bias.grad is None
    torch.testing.assert_close(case.hidden.grad, plain.hidden.grad, rtol=1e-5, atol=2e-6)
    nothing, calls = torch.zeros(0, HIDDEN, requires_grad=True), loss.calls
    result = case.tiled(1.0, 4, 8).backward(nothing, case.targets[:0], TokenColumns(), loss)
    assert (sum_results([result])[0], len(result.outputs.logprobs_S), loss.calls) == (0, 0, calls)
    assert nothing.grad is not None and nothing.grad.shape == (0, HIDDEN)


def test_the_logits_of_all_tokens_never_exist_at_once() -> None:
    for token_local in (True, False):
        case = Case()
        with Storages() as storages:
            case.head(1.0, 9).backward(case.hidden, case.targets, case.columns, CurvedLoss(token_local, True))
        assert storages.largest == 4 * 9 * VOCABULARY < 4 * TOKENS * VOCABULARY


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("bend", [NO_BEND, Bend(cap=0.5)], ids=str)
def test_tiles_of_a_large_model_hold_what_they_say(entropy_gradient: bool, bend: Bend) -> None:
    """On meta tensors in the shape of a 32B model's: what is held does not grow with tokens or vocabulary."""
    hidden, words, tile = 5120, 151_936, 8192
    for tokens in (8192, 20_000):
        linear = nn.Linear(hidden, words, bias=False, dtype=torch.bfloat16, device="meta")
        linear.weight.grad_dtype = torch.float32
        linear.weight.grad = torch.empty(words, hidden, device="meta")
        hidden_S = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
        targets_S = torch.empty(tokens, dtype=torch.int64, device="meta")
        columns = TokenColumns(loss_weights=torch.empty(tokens, device="meta"))
        head = TiledVocabularyHead(linear, bend=bend)
        with Storages() as storages:
            head.backward(hidden_S, targets_S, columns, CurvedLoss(False, entropy_gradient))
        of_tile, of_input, of_rows, numbers = 2 * tile * tile, 2 * tokens * hidden, 4 * tile * hidden, 100 * tokens
        assert storages.largest == max(of_tile, of_input, of_rows)
        assert storages.most < of_tile + of_input + 2 * of_rows + numbers
