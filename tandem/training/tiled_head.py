"""The vocabulary head of a GPU: logits exist for one tile of tokens x vocabulary at a time, twice.

A first sweep over the tiles keeps five numbers a token: the maximum m of the logits z so far, s = sum exp(z - m),
t = sum (z - m) exp(z - m), sum exp(2 (z - m)), and the logit of the token that was chosen. From these

    log p[y] = z[y] - m - log s        H = log s - t / s        sum p^2 = sum exp(2 (z - m)) / s^2

A second sweep makes each tile's logits again, and its gradient by the closed form of `head.py`. So there is one
product of tokens x vocabulary x hidden more than where whole rows are kept, and no memory that grows with tokens
times vocabulary, nor any float32 copy of the layer's weight but its gradient. What is done to a tile is an operator of
`tandem.models.kernels`.

Suffixes: `_S` predicted tokens of a micro-batch, `_C` tokens of a tile, `_W` the tile's part of the vocabulary, `_K`
some tokens of it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tandem.models.kernels import vocabulary
from tandem.models.logits import NO_BEND, Bend
from tandem.training.base import LossResult, TopTokens
from tandem.training.head import Columns, asked_tokens, differentiate, empty_outputs, float32_gradient, set_top
from tandem.types import Outputs, TokenLoss


@dataclass(frozen=True, slots=True)
class TiledVocabularyHead:
    """Answers what `VocabularyHead` does. Beside the gradients a sweep holds a tile in the weights' dtype, and float32
    `[tile_tokens, hidden]` and `[tile_vocabulary, hidden]`; three float32 tiles more where there is no kernel."""

    linear: nn.Linear
    temperature: float = 1.0
    bend: Bend = NO_BEND
    tile_tokens: int = 8192
    tile_vocabulary: int = 8192
    """Both large enough that a GPU's products run at full speed: a tile in bfloat16 has 128 MiB."""
    top: TopTokens | None = None
    """What `forward` tells of the most probable tokens."""

    @torch.no_grad()
    def forward(self, hidden_S: Tensor, targets_S: Tensor) -> Outputs[Tensor]:
        """`hidden_S` `[S, hidden]`; `targets_S` int64, the tokens that were chosen."""
        return self._outputs(hidden_S, targets_S, None, self.top)[0]

    @torch.no_grad()
    def backward(self, hidden_S: Tensor, targets_S: Tensor, columns: Columns, loss: TokenLoss[Tensor]) -> LossResult:
        """The loss; its gradient goes on through `hidden_S` and into the layer's parameters."""
        asked_SK = asked_tokens(columns)
        outputs, log_total_S = self._outputs(hidden_S, targets_S, asked_SK, None)
        outputs.squared_probs_S = None  # no loss reads it
        grad_hidden_S = torch.empty_like(hidden_S)
        if not len(hidden_S):  # no loss is asked about no tokens
            hidden_S.backward(grad_hidden_S)
            return LossResult.of([], outputs)
        value, metrics, gradients = differentiate(loss, outputs, columns)
        for cut in self._tokens(hidden_S):
            at = _Tokens(
                hidden_S[cut], targets_S[cut], None if asked_SK is None else asked_SK[cut], log_total_S[cut],
                outputs.slice(cut.start, cut.stop), gradients.slice(cut.start, cut.stop),
            )  # fmt: skip
            grad_hidden_S[cut] = self._add_gradient(at)
        hidden_S.backward(grad_hidden_S)
        return LossResult.of([(value, metrics)], outputs)

    def _outputs(
        self, hidden_S: Tensor, targets_S: Tensor, asked_SK: Tensor | None, top: TopTokens | None
    ) -> tuple[Outputs[Tensor], Tensor]:
        """What the head answers, and log sum exp of the logits, `[S]`; with the log-probs of the tokens that are asked
        about, or of the most probable ones."""
        outputs = empty_outputs(hidden_S)
        outputs.squared_probs_S, log_total_S = hidden_S.new_empty(2, len(hidden_S), dtype=torch.float32)
        assert outputs.logprobs_S is not None and outputs.entropy_S is not None
        if asked_SK is not None:
            outputs.top_logprobs_S = torch.empty_like(asked_SK, dtype=torch.float32)
        top_CK: list[tuple[Tensor, Tensor]] = []
        for cut in self._tokens(hidden_S):
            sums = _Sums(self.bend, self.temperature, targets_S[cut], None if asked_SK is None else asked_SK[cut], top)
            for part in self._vocabulary():
                sums.add(self._numbers(hidden_S[cut], part), part)
            maximum_C, total_C, weighted_C, squares_C, chosen_C = sums.sums_5C
            log_total_S[cut] = maximum_C + total_C.log()
            outputs.logprobs_S[cut] = chosen_C - log_total_S[cut]
            outputs.entropy_S[cut] = total_C.log() - weighted_C / total_C
            outputs.squared_probs_S[cut] = squares_C / total_C.square()
            if outputs.top_logprobs_S is not None and sums.asked_logits_CK is not None:
                outputs.top_logprobs_S[cut] = sums.asked_logits_CK - log_total_S[cut, None]
            if sums.best_CK is not None:
                top_CK.append((sums.best_CK[0] - log_total_S[cut, None], sums.best_CK[1]))
        if top is not None:
            set_top(outputs, hidden_S, top, top_CK)
        return outputs, log_total_S

    def _add_gradient(self, at: "_Tokens") -> Tensor:
        """Add the gradient of the parameters that learn; returns that of the hidden states, in their dtype."""
        grad_hidden_C = torch.zeros_like(at.hidden_C, dtype=torch.float32)
        weight, bias = self.linear.weight, self.linear.bias
        for part in self._vocabulary():
            grad_CW = self._grad_numbers(at, part)
            if bias is not None and bias.requires_grad:
                float32_gradient(bias)[part].add_(grad_CW.sum(0, dtype=torch.float32))
            grad_hidden_C.add_(float32_product(grad_CW, weight[part]))
            if weight.requires_grad:
                float32_gradient(weight)[part].add_(float32_product(grad_CW.t(), at.hidden_C))
            del grad_CW  # before the next tile is made
        return grad_hidden_C.to(at.hidden_C.dtype)

    def _grad_numbers(self, at: "_Tokens", part: slice) -> Tensor:
        """The gradient of the layer's numbers, `[C, W]` in their dtype."""
        numbers_CW, gradients_C = self._numbers(at.hidden_C, part), at.gradients_C
        assert gradients_C.logprobs_S is not None and at.outputs_C.entropy_S is not None
        by_logprob_C, by_asked_CK, slope_CK = gradients_C.logprobs_S, gradients_C.top_logprobs_S, None
        if by_asked_CK is not None and at.asked_CK is not None:
            by_logprob_C = by_logprob_C + by_asked_CK.sum(-1)
            place_CK, elsewhere_CK = vocabulary.inside(at.asked_CK - part.start, numbers_CW)
            _, slope_CK = self.bend.logits_(numbers_CW.gather(1, place_CK).float(), self.temperature)
            by_asked_CK = by_asked_CK.masked_fill(elsewhere_CK, 0) * (self.bend.factor / self.temperature)
            by_asked_CK = by_asked_CK if slope_CK is None else by_asked_CK * slope_CK
        vocabulary.gradient_(
            numbers_CW, at.targets_C - part.start, at.log_total_C, at.outputs_C.entropy_S,
            gradients_C.logprobs_S, by_logprob_C, gradients_C.entropy_S,
            self.temperature, self.bend.factor, self.bend.cap,
        )  # fmt: skip
        if by_asked_CK is not None and at.asked_CK is not None:
            numbers_CW.scatter_add_(1, place_CK, by_asked_CK.to(numbers_CW.dtype))
        return numbers_CW

    def _numbers(self, hidden_C: Tensor, part: slice) -> Tensor:
        """The layer's, for a part of the vocabulary: `[C, W]`."""
        bias = None if self.linear.bias is None else self.linear.bias[part]
        return nn.functional.linear(hidden_C, self.linear.weight[part], bias)

    def _tokens(self, hidden_S: Tensor) -> list[slice]:
        return [slice(start, start + self.tile_tokens) for start in range(0, len(hidden_S), self.tile_tokens)]

    def _vocabulary(self) -> list[slice]:
        width, words = self.tile_vocabulary, self.linear.out_features
        return [slice(start, start + width) for start in range(0, words, width)]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What the gradient of a row of tiles is made of."""

    hidden_C: Tensor
    targets_C: Tensor
    asked_CK: Tensor | None
    log_total_C: Tensor
    outputs_C: Outputs[Tensor]
    gradients_C: Outputs[Tensor]
    """The loss's, by log-prob and entropy."""


@dataclass(slots=True)
class _Sums:
    """What is known of each token's logits z after some tiles."""

    bend: Bend
    temperature: float
    targets_C: Tensor
    asked_CK: Tensor | None
    top: TopTokens | None
    asked_logits_CK: Tensor | None = field(init=False, default=None)
    best_CK: tuple[Tensor, Tensor] | None = field(init=False, default=None)
    """The largest logits so far, and whose they are; at most `top.count`."""
    sums_5C: Tensor = field(init=False)
    """`tandem.models.kernels.vocabulary.add_tile`'s."""

    def __post_init__(self) -> None:
        self.sums_5C = torch.zeros(5, len(self.targets_C), device=self.targets_C.device)
        self.sums_5C[0] = torch.finfo(torch.float32).min
        if self.asked_CK is not None:
            self.asked_logits_CK = torch.zeros_like(self.asked_CK, dtype=torch.float32)

    def add(self, numbers_CW: Tensor, part: slice) -> None:
        """Another tile of the output layer's numbers."""
        bend = self.temperature, self.bend.factor, self.bend.cap
        vocabulary.add_tile(self.sums_5C, numbers_CW, self.targets_C - part.start, *bend)
        if self.asked_CK is not None and self.asked_logits_CK is not None:
            place_CK, elsewhere_CK = vocabulary.inside(self.asked_CK - part.start, numbers_CW)
            asked_CK = self._logits(numbers_CW.gather(1, place_CK))
            self.asked_logits_CK = torch.where(elsewhere_CK, self.asked_logits_CK, asked_CK)
        if self.top is not None and part.start < self.top.vocabulary:
            self._add_best(self.top, numbers_CW[:, : self.top.vocabulary - part.start], part)

    def _logits(self, numbers: Tensor) -> Tensor:
        """Logits / temperature, float32."""
        return self.bend.logits_(numbers.float(), self.temperature)[0]

    def _add_best(self, top: TopTokens, numbers_CW: Tensor, part: slice) -> None:
        numbers_CK, places_CK = numbers_CW.topk(min(top.count, numbers_CW.shape[1]))
        values_CK, ids_CK = self._logits(numbers_CK), places_CK + part.start
        if self.best_CK is not None:
            values_CK, ids_CK = torch.cat((self.best_CK[0], values_CK), 1), torch.cat((self.best_CK[1], ids_CK), 1)
        values_CK, order_CK = values_CK.topk(min(top.count, values_CK.shape[1]))
        self.best_CK = values_CK, ids_CK.gather(1, order_CK)


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of two matrices of one dtype, summed and answered in float32."""
    if left.dtype == torch.float32 or left.device.type == "cpu":
        return left.float() @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)
