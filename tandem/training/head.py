"""Hidden states of predicted tokens -> log-probs, entropy, values, and the gradient of a loss on them.

Logits exist for one chunk of tokens at a time. The loss is asked for its derivative by each token's log-prob and
entropy; from these and the chunk's softmax the gradient of the logits follows in closed form, with p = softmax(z),
H = -sum p log p:

    d log p[y] / dz = onehot(y) - p        dH / dz = -p * (log p + H)

The log-probs of further tokens, `columns.teacher_top_ids`, are treated as that of the one that was chosen.

A token-local loss is differentiated chunk by chunk while the chunk's logits are there; any other loss needs all
log-probs first, and the logits are computed a second time.

Suffixes: `_S` predicted tokens of a micro-batch, `_C` tokens of a chunk, `_V` vocabulary, `_K` some tokens of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.models.logits import NO_BEND, Bend
from tandem.training.base import LossResult, TopTokens
from tandem.types import Outputs, TokenColumns, TokenLoss

Columns = TokenColumns[Tensor]


@dataclass(frozen=True, slots=True)
class ValueHead:
    """One number a token, float32, from the linear layer of a token-classification model."""

    linear: nn.Linear

    def forward(self, hidden_S: Tensor, targets_S: Tensor) -> Outputs[Tensor]:
        return Outputs(values_S=self.linear(hidden_S).float().squeeze(-1))

    def backward(self, hidden_S: Tensor, targets_S: Tensor, columns: Columns, loss: TokenLoss[Tensor]) -> LossResult:
        values_S = self.linear(hidden_S).float().squeeze(-1)
        parts = [loss(Outputs(values_S=values_S), columns)] if len(values_S) else []
        (parts[0][0] if parts else values_S.sum()).backward()
        return LossResult.of(parts, Outputs(values_S=values_S.detach()))


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """Log-probs and entropy of softmax(logits / temperature); the softmax is float32 whatever the weights are."""

    linear: nn.Linear
    temperature: float = 1.0
    logits_per_chunk: int = 2**25
    """Bounds the memory: two float32 numbers each. A chunk holds at least one token."""
    bend: Bend = NO_BEND
    """From the layer's numbers to logits."""
    top: TopTokens | None = None
    """What `forward` tells of the most probable tokens."""

    @torch.no_grad()
    def forward(self, hidden_S: Tensor, targets_S: Tensor) -> Outputs[Tensor]:
        """`hidden_S` `[S, hidden]`; `targets_S` int64, the tokens that were chosen."""
        outputs = empty_outputs(hidden_S)
        outputs.squared_probs_S = squares_S = hidden_S.new_empty(len(hidden_S), dtype=torch.float32)
        top_CK: list[tuple[Tensor, Tensor]] = []
        for cut in self._chunks(hidden_S):
            softmaxes = self._evaluate(hidden_S[cut], targets_S[cut], outputs.slice(cut.start, cut.stop))
            squares_S[cut] = torch.linalg.vector_norm(softmaxes[0], dim=-1).square()
            if self.top is not None:
                top_CK.append(softmaxes[1][:, : self.top.vocabulary].topk(self.top.count))
            del softmaxes  # before the next chunk's are made
        if self.top is not None:
            set_top(outputs, hidden_S, self.top, top_CK)
        return outputs

    @torch.no_grad()
    def backward(self, hidden_S: Tensor, targets_S: Tensor, columns: Columns, loss: TokenLoss[Tensor]) -> LossResult:
        """The loss; its gradient goes on through `hidden_S` and into the layer's parameters."""
        outputs, gradients, asked_SK = empty_outputs(hidden_S), None, asked_tokens(columns)
        chunks = self._chunks(hidden_S)
        parts: list[tuple[Tensor, dict[str, Tensor]]] = []
        if not loss.token_local and len(chunks) > 1:
            assert asked_SK is None, "a loss that reads the log-probs of further tokens is token-local"
            outputs = self.forward(hidden_S, targets_S)
            outputs.squared_probs_S = None  # no loss reads it
            value, metrics, gradients = differentiate(loss, outputs, columns)
            parts.append((value, metrics))
        if asked_SK is not None:
            outputs.top_logprobs_S = torch.empty_like(asked_SK, dtype=torch.float32)
        grad_hidden_S = torch.empty_like(hidden_S)
        for cut in chunks:
            outputs_C = outputs.slice(cut.start, cut.stop)
            softmaxes = self._evaluate(hidden_S[cut], targets_S[cut], outputs_C)
            asked_CK = None if asked_SK is None else asked_SK[cut]
            if asked_CK is not None and outputs_C.top_logprobs_S is not None:
                torch.gather(softmaxes[1], 1, asked_CK, out=outputs_C.top_logprobs_S)
            if gradients is None:
                value, metrics, gradients_C = differentiate(loss, outputs_C, columns.slice(cut.start, cut.stop))
                parts.append((value, metrics))
            else:
                gradients_C = gradients.slice(cut.start, cut.stop)
            grad_logits_CV = self._grad_logits(softmaxes, targets_S[cut], asked_CK, outputs_C, gradients_C)
            grad_hidden_S[cut] = self._add_gradient(grad_logits_CV, hidden_S[cut])
            del softmaxes, grad_logits_CV  # before the next chunk's are made
        hidden_S.backward(grad_hidden_S)
        return LossResult.of(parts, outputs)

    def _chunks(self, hidden_S: Tensor) -> list[slice]:
        size = max(1, self.logits_per_chunk // self.linear.out_features)
        return [slice(start, start + size) for start in range(0, len(hidden_S), size)]

    def _evaluate(
        self, hidden_C: Tensor, targets_C: Tensor, outputs_C: Outputs[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """softmax, log-softmax and the bend's slope, float32 `[C, V]`; writes log-probs and entropy to `outputs_C`."""
        logits_CV, slope_CV = self.bend.logits_(self.linear(hidden_C).float(), self.temperature)
        log_softmax_CV = torch.log_softmax(logits_CV, -1)
        softmax_CV = torch.exp(log_softmax_CV, out=logits_CV)
        assert outputs_C.logprobs_S is not None and outputs_C.entropy_S is not None
        torch.gather(log_softmax_CV, 1, targets_C[:, None], out=outputs_C.logprobs_S[:, None])
        torch.neg(torch.bmm(softmax_CV[:, None, :], log_softmax_CV[:, :, None]).view(-1), out=outputs_C.entropy_S)
        return softmax_CV, log_softmax_CV, slope_CV

    def _grad_logits(
        self,
        softmaxes: tuple[Tensor, Tensor, Tensor | None],
        targets_C: Tensor,
        asked_CK: Tensor | None,
        outputs_C: Outputs[Tensor],
        gradients_C: Outputs[Tensor],
    ) -> Tensor:
        """Of the layer's numbers, `[C, V]`, in the memory of `softmaxes`."""
        softmax_CV, log_softmax_CV, slope_CV = softmaxes
        assert gradients_C.logprobs_S is not None and outputs_C.entropy_S is not None
        factor = self.bend.factor / self.temperature
        by_chosen_C = by_logprob_C = gradients_C.logprobs_S[:, None] * factor
        by_asked_CK = None if gradients_C.top_logprobs_S is None else gradients_C.top_logprobs_S * factor
        if by_asked_CK is not None:
            by_logprob_C = by_chosen_C + by_asked_CK.sum(-1, keepdim=True)
        if gradients_C.entropy_S is None:
            grad_CV = softmax_CV.mul_(-by_logprob_C)
        else:
            by_entropy_C = gradients_C.entropy_S[:, None] * factor
            factor_CV = log_softmax_CV.add_(outputs_C.entropy_S[:, None]).mul_(-by_entropy_C).sub_(by_logprob_C)
            grad_CV = softmax_CV.mul_(factor_CV)
        grad_CV.scatter_add_(1, targets_C[:, None], by_chosen_C)
        if by_asked_CK is not None and asked_CK is not None:
            grad_CV.scatter_add_(1, asked_CK, by_asked_CK)
        return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)

    def _add_gradient(self, grad_CV: Tensor, hidden_C: Tensor) -> Tensor:
        """Add the gradient of the parameters that learn, return that of the hidden states."""
        weight, rounded_CV = self.linear.weight, grad_CV.to(self.linear.weight.dtype)
        if weight.requires_grad and weight.is_cuda and weight.dtype != torch.float32:
            # A float32 product would cost as much as the rest of the step; this one is summed in float32, too.
            float32_gradient(weight).add_(torch.mm(rounded_CV.t(), hidden_C, out_dtype=torch.float32))
        elif weight.requires_grad:
            float32_gradient(weight).addmm_(grad_CV.t(), hidden_C.float())
        if self.linear.bias is not None and self.linear.bias.requires_grad:
            float32_gradient(self.linear.bias).add_(grad_CV.sum(0))
        return rounded_CV @ weight


def empty_outputs(hidden_S: Tensor) -> Outputs[Tensor]:
    """Room for log-probs and entropy, to be written."""
    return Outputs(*hidden_S.new_empty(2, len(hidden_S), dtype=torch.float32))


def asked_tokens(columns: Columns) -> Tensor | None:
    """int64 `[S, K]`: the further tokens whose log-probs a loss reads."""
    return None if columns.teacher_top_ids is None else columns.teacher_top_ids.long()


def set_top(outputs: Outputs[Tensor], hidden_S: Tensor, top: TopTokens, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Fill the most probable tokens from the log-probs and ids of the parts, head to tail."""
    empty = hidden_S.new_empty(0, top.count, dtype=torch.float32)
    outputs.top_logprobs_S = torch.cat([empty, *(logprobs for logprobs, _ in parts)])
    outputs.top_ids_S = torch.cat([empty.long(), *(ids for _, ids in parts)])


def differentiate(
    loss: TokenLoss[Tensor], outputs: Outputs[Tensor], columns: Columns
) -> tuple[Tensor, dict[str, Tensor], Outputs[Tensor]]:
    """The loss, its metrics, and its derivative by each log-prob, entropy and value that the loss reads."""
    names = ("logprobs_S", "entropy_S", "values_S", "top_logprobs_S")
    filled = {name: column for name in names if (column := getattr(outputs, name)) is not None}
    leaves = {name: column.detach().requires_grad_() for name, column in filled.items()}
    with torch.enable_grad():
        value, metrics = loss(Outputs(**leaves), columns)
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return value, metrics, Outputs(**dict(zip(leaves, gradients, strict=True)))


def float32_gradient(parameter: Tensor) -> Tensor:
    """What autograd gathers the parameter's gradient in; a parameter of another dtype needs a `grad_dtype` for it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.grad
