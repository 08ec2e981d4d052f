"""Hidden states of scored tokens -> log-probs, entropy, values, and the gradient of a loss on them.

Logits exist for one chunk of tokens at a time. The loss is asked for its derivative by each token's log-prob and
entropy; from these and the chunk's softmax the gradient of the logits follows in closed form, with p = softmax(z),
H = -sum p log p:

    d log p[y] / dz = onehot(y) - p        dH / dz = -p * (log p + H)

A token-local loss is differentiated chunk by chunk while the chunk's logits are there; any other loss needs all
log-probs first, and the logits are computed a second time.

Suffixes: `_S` scored tokens of a micro-batch, `_C` tokens of a chunk, `_V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from tandem.training.base import LossResult
from tandem.types import Outputs, TokenColumns, TokenLoss

GradientOf = Callable[[torch.Tensor], torch.Tensor | None]
"""Parameter -> the float32 tensor that its gradient is added to; None when it is frozen."""

Columns = TokenColumns[torch.Tensor]
Workspace = tuple[torch.Tensor, torch.Tensor]
"""Two float32 `[C, V]`."""


class Head(Protocol):
    """What stands between the hidden states and the loss."""

    def forward(self, hidden_S: torch.Tensor, targets_S: torch.Tensor, entropy: bool) -> Outputs[torch.Tensor]:
        """No gradient. `hidden_S` `[S, hidden]`; `targets_S` int64, the tokens that were chosen."""
        ...

    def backward(
        self, hidden_S: torch.Tensor, targets_S: torch.Tensor, columns: Columns, loss: TokenLoss[torch.Tensor]
    ) -> LossResult:
        """The loss; its gradient goes on through `hidden_S` and into the head's parameters."""
        ...


@dataclass(frozen=True, slots=True)
class ValueHead:
    """One number a token, float32, from the linear layer of a token-classification model."""

    linear: nn.Linear

    def forward(self, hidden_S: torch.Tensor, targets_S: torch.Tensor, entropy: bool) -> Outputs[torch.Tensor]:
        return Outputs(values_S=self.linear(hidden_S).float().squeeze(-1))

    def backward(
        self, hidden_S: torch.Tensor, targets_S: torch.Tensor, columns: Columns, loss: TokenLoss[torch.Tensor]
    ) -> LossResult:
        outputs = self.forward(hidden_S, targets_S, entropy=False)
        value, metrics = loss(outputs, columns)
        value.backward()
        return LossResult.of(value, metrics, outputs)


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """Log-probs and entropy of softmax(logits / temperature); the softmax is float32 whatever the weights are."""

    linear: nn.Linear
    gradient_of: GradientOf
    temperature: float = 1.0
    logits_per_chunk: int = 2**25
    """Bounds the memory: two float32 numbers each. A chunk holds at least one token."""

    @torch.no_grad()
    def forward(self, hidden_S: torch.Tensor, targets_S: torch.Tensor, entropy: bool) -> Outputs[torch.Tensor]:
        outputs = _empty(len(hidden_S), hidden_S.device, entropy)
        for cut, workspace in self._chunks(hidden_S):
            self._evaluate(hidden_S[cut], targets_S[cut], outputs.slice(cut.start, cut.stop), workspace)
        return outputs

    def backward(
        self, hidden_S: torch.Tensor, targets_S: torch.Tensor, columns: Columns, loss: TokenLoss[torch.Tensor]
    ) -> LossResult:
        one_pass = loss.token_local or len(hidden_S) <= self._tokens_per_chunk
        with torch.no_grad():
            grad_hidden_S, result = (self._one_pass if one_pass else self._two_passes)(
                hidden_S.detach(), targets_S, columns, loss
            )
        hidden_S.backward(grad_hidden_S)
        return result

    def _one_pass(
        self, hidden_S: torch.Tensor, targets_S: torch.Tensor, columns: Columns, loss: TokenLoss[torch.Tensor]
    ) -> tuple[torch.Tensor, LossResult]:
        grad_hidden_S = torch.empty_like(hidden_S)
        outputs = _empty(len(hidden_S), hidden_S.device, entropy=True)
        value = torch.zeros((), device=hidden_S.device)
        metrics: dict[str, torch.Tensor] = {}
        for cut, workspace in self._chunks(hidden_S):
            outputs_C = outputs.slice(cut.start, cut.stop)
            self._evaluate(hidden_S[cut], targets_S[cut], outputs_C, workspace)
            value_C, metrics_C, slopes_C = _differentiate(loss, outputs_C, columns.slice(cut.start, cut.stop))
            self._add_gradient(hidden_S[cut], targets_S[cut], outputs_C, slopes_C, workspace, grad_hidden_S[cut])
            value = value + value_C
            metrics = {name: metrics[name] + metric if metrics else metric for name, metric in metrics_C.items()}
        return grad_hidden_S, LossResult.of(value, metrics, outputs)

    def _two_passes(
        self, hidden_S: torch.Tensor, targets_S: torch.Tensor, columns: Columns, loss: TokenLoss[torch.Tensor]
    ) -> tuple[torch.Tensor, LossResult]:
        grad_hidden_S = torch.empty_like(hidden_S)
        outputs = self.forward(hidden_S, targets_S, entropy=True)
        value, metrics, slopes = _differentiate(loss, outputs, columns)
        for cut, workspace in self._chunks(hidden_S):
            outputs_C = outputs.slice(cut.start, cut.stop)
            self._evaluate(hidden_S[cut], targets_S[cut], Outputs(), workspace)
            slopes_C = slopes.slice(cut.start, cut.stop)
            self._add_gradient(hidden_S[cut], targets_S[cut], outputs_C, slopes_C, workspace, grad_hidden_S[cut])
        return grad_hidden_S, LossResult.of(value, metrics, outputs)

    @property
    def _tokens_per_chunk(self) -> int:
        return max(1, self.logits_per_chunk // self.linear.out_features)

    def _chunks(self, hidden_S: torch.Tensor) -> Iterator[tuple[slice, Workspace]]:
        """Equal cuts of the tokens, each with the same memory to work in: fresh pages cost as much as arithmetic."""
        tokens = len(hidden_S)
        size = max(1, math.ceil(tokens / max(1, math.ceil(tokens / self._tokens_per_chunk))))
        shape = (2, min(size, tokens), self.linear.out_features)
        buffer = torch.empty(shape, dtype=torch.float32, device=hidden_S.device)
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            yield slice(start, stop), (buffer[0, : stop - start], buffer[1, : stop - start])

    def _evaluate(
        self, hidden_C: torch.Tensor, targets_C: torch.Tensor, outputs_C: Outputs[torch.Tensor], workspace: Workspace
    ) -> None:
        """Leave softmax and log-softmax in `workspace`, and fill the outputs that are asked for."""
        softmax_CV, log_softmax_CV = workspace
        logits_CV = self._logits(hidden_C, softmax_CV)
        torch.log_softmax(logits_CV, -1, dtype=torch.float32, out=log_softmax_CV)
        torch.exp(log_softmax_CV, out=softmax_CV)
        if outputs_C.logprobs_S is not None:
            torch.gather(log_softmax_CV, 1, targets_C[:, None], out=outputs_C.logprobs_S[:, None])
        if outputs_C.entropy_S is not None:
            negative = torch.bmm(softmax_CV[:, None, :], log_softmax_CV[:, :, None]).view(-1)
            torch.neg(negative, out=outputs_C.entropy_S)

    def _logits(self, hidden_C: torch.Tensor, out_CV: torch.Tensor) -> torch.Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        if weight.dtype == torch.float32:
            torch.mm(hidden_C, weight.t(), out=out_CV)
        else:
            out_CV.copy_(hidden_C @ weight.t())
        if bias is not None:
            out_CV.add_(bias)
        return out_CV if self.temperature == 1 else out_CV.div_(self.temperature)

    def _add_gradient(
        self,
        hidden_C: torch.Tensor,
        targets_C: torch.Tensor,
        outputs_C: Outputs[torch.Tensor],
        slopes_C: Outputs[torch.Tensor],
        workspace: Workspace,
        grad_hidden_C: torch.Tensor,
    ) -> None:
        """Turn `workspace` into the gradient of the logits; pass it to `grad_hidden_C` and the parameters."""
        softmax_CV, log_softmax_CV = workspace
        assert slopes_C.logprobs_S is not None and outputs_C.entropy_S is not None
        by_logprob_C = slopes_C.logprobs_S[:, None] / self.temperature
        if slopes_C.entropy_S is None:
            grad_CV = softmax_CV.mul_(-by_logprob_C)
        else:
            by_entropy_C = slopes_C.entropy_S[:, None] / self.temperature
            factor_CV = log_softmax_CV.add_(outputs_C.entropy_S[:, None]).mul_(-by_entropy_C).sub_(by_logprob_C)
            grad_CV = softmax_CV.mul_(factor_CV)
        grad_CV.scatter_add_(1, targets_C[:, None], by_logprob_C)
        weight, bias = self.linear.weight, self.linear.bias
        torch.mm(grad_CV.to(weight.dtype), weight, out=grad_hidden_C)
        grad_weight = self.gradient_of(weight)
        if grad_weight is not None:
            grad_weight.addmm_(grad_CV.t(), hidden_C.float())
        grad_bias = None if bias is None else self.gradient_of(bias)
        if grad_bias is not None:
            grad_bias.add_(grad_CV.sum(0))


def _empty(tokens: int, device: torch.device, entropy: bool) -> Outputs[torch.Tensor]:
    logprobs_S = torch.empty(tokens, dtype=torch.float32, device=device)
    return Outputs(logprobs_S, torch.empty_like(logprobs_S) if entropy else None)


def _differentiate(
    loss: TokenLoss[torch.Tensor], outputs: Outputs[torch.Tensor], columns: Columns
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Outputs[torch.Tensor]]:
    """The loss, its metrics, and its derivative by each log-prob and (where the loss has one) each entropy."""
    assert outputs.logprobs_S is not None and outputs.entropy_S is not None
    logprobs_S, entropy_S = outputs.logprobs_S.detach(), outputs.entropy_S.detach()
    leaves = [logprobs_S.requires_grad_(), *([entropy_S.requires_grad_()] if loss.entropy_gradient else [])]
    with torch.enable_grad():
        value, metrics = loss(Outputs(logprobs_S, entropy_S), columns)
    slopes = torch.autograd.grad(value, leaves)
    return value.detach(), metrics, Outputs(slopes[0], slopes[1] if loss.entropy_gradient else None)
