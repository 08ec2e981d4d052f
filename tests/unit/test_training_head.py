"""The chunked output layer against plain log_softmax under autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tandem.training.head import VocabularyHead
from tandem.types import Outputs, TokenColumns

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
        logprobs_S, entropy_S, weights_S = outputs.logprobs_S, outputs.entropy_S, columns.weights
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
        self.columns = TokenColumns(weights=torch.rand(TOKENS))

    def plain(self, loss: CurvedLoss, temperature: float) -> tuple[Outputs[torch.Tensor], torch.Tensor]:
        logprobs = torch.log_softmax(self.linear(self.hidden).float() / temperature, -1)
        chosen = logprobs.gather(1, self.targets[:, None]).squeeze(1)
        outputs = Outputs(chosen, -(logprobs.exp() * logprobs).sum(-1))
        value, _ = loss(outputs, self.columns)
        value.backward()
        return outputs, value

    def head(self, temperature: float, tokens_per_chunk: int) -> VocabularyHead:
        return VocabularyHead(self.linear, temperature, tokens_per_chunk * VOCABULARY)

    def gradients(self) -> list[torch.Tensor]:
        tensors = (self.hidden, *self.linear.parameters())
        return [tensor.grad for tensor in tensors if tensor.grad is not None]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens_per_chunk", [1, 5, 100])
@pytest.mark.parametrize("token_local", [True, False])
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_loss_and_gradients_are_the_plain_ones(
    bias: bool, temperature: float, tokens_per_chunk: int, token_local: bool, entropy_gradient: bool
) -> None:
    loss = CurvedLoss(token_local, entropy_gradient)
    plain, chunked = Case(bias=bias), Case(bias=bias)
    wanted, value = plain.plain(loss, temperature)
    head = chunked.head(temperature, tokens_per_chunk)
    result = head.backward(chunked.hidden, chunked.targets, chunked.columns, loss)
    (outputs,) = result.outputs
    assert wanted.logprobs_S is not None and wanted.entropy_S is not None
    torch.testing.assert_close(outputs.logprobs_S, wanted.logprobs_S.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.outputs[0].entropy_S, wanted.entropy_S.detach(), rtol=0, atol=1e-6)
    assert result.loss == pytest.approx(value.item(), rel=1e-6)
    assert chunked.columns.weights is not None
    entropy = (chunked.columns.weights * wanted.entropy_S).sum().item()
    assert result.metrics["entropy"] == pytest.approx(entropy, rel=1e-6)
    assert len(plain.gradients()) == 2 + bias
    for found, want in zip(chunked.gradients(), plain.gradients(), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=2e-6)
    forward = head.forward(chunked.hidden.detach(), chunked.targets)
    torch.testing.assert_close(forward.logprobs_S, result.outputs[0].logprobs_S, rtol=0, atol=0)
    torch.testing.assert_close(forward.entropy_S, result.outputs[0].entropy_S, rtol=0, atol=0)


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


def test_bfloat16_weights_get_a_float32_softmax_and_float32_gradients() -> None:
    case, plain, loss = Case(torch.bfloat16), Case(torch.bfloat16), CurvedLoss(True, True)
    case.linear.weight.grad_dtype = torch.float32
    result = case.head(1.0, 5).backward(case.hidden, case.targets, case.columns, loss)
    wanted, _ = plain.plain(loss, 1.0)
    gradient = case.linear.weight.grad
    assert wanted.logprobs_S is not None and plain.linear.weight.grad is not None
    assert gradient is not None and gradient.dtype == torch.float32
    torch.testing.assert_close(result.outputs[0].logprobs_S, wanted.logprobs_S.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, plain.linear.weight.grad.float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(case.hidden.grad, plain.hidden.grad, rtol=0.02, atol=0.02)


def test_the_logits_of_all_tokens_never_exist_at_once() -> None:
    """Counted, not timed: every tensor that the pass allocates is seen by the dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // 4)
            return result

    for token_local in (True, False):
        case = Case()
        with Largest():
            case.head(1.0, 9).backward(case.hidden, case.targets, case.columns, CurvedLoss(token_local, True))
        assert largest == 9 * VOCABULARY < TOKENS * VOCABULARY
