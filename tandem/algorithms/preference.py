"""Losses on pairs of answers: what one answer's score should have over the other's.

A pair's loss needs the scores of both answers, which may be trained on different ranks. So all scores are taken first,
and the loss is differentiated by them here; the pass that trains then descends along that gradient
(`LinearScoreLoss`). Dropouts are 0, so both passes see the same scores, and the gradient is exact.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tandem.config.algorithms import PreferenceConfig
from tandem.types import Outputs, TokenColumns


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Rows alternate: chosen, rejected, chosen, …; P pairs, `[T]` as everywhere."""

    rows_T: Tensor
    mask_T: Tensor
    margins_P: Tensor
    """By how much the chosen answer should be better, as the data says."""
    ref_logprobs_T: Tensor | None = None

    def by_row(self, values_T: Tensor, mean: bool = False) -> tuple[Tensor, Tensor]:
        """Sum (or mean) over the trained tokens of the chosen and of the rejected rows, two `[P]`."""
        rows = 2 * len(self.margins_P)
        values_B = values_T.new_zeros(rows).index_add(0, self.rows_T[self.mask_T], values_T[self.mask_T])
        if mean:
            values_B = values_B / torch.bincount(self.rows_T[self.mask_T], minlength=rows)
        return values_B[0::2], values_B[1::2]


class PairLoss(ABC):
    """Mean of the pairs' losses, from a score for each token."""

    @abstractmethod
    def compare(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        """(loss, margin) of each pair, `[P]`; the margin is how much better the chosen answer already is."""

    def __call__(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, float]]:
        """Gradient of the loss by each token's score, float32 `[T]`; loss, margin and accuracy."""
        scores_T = scores_T.double().requires_grad_()
        losses_P, margins_P = self.compare(scores_T, pairs)
        (gradients_T,) = torch.autograd.grad(losses_P.mean(), scores_T)
        means = {"loss": losses_P, "margin": margins_P, "accuracy": (margins_P > 0).double()}
        return gradients_T.float(), {name: values_P.mean().item() for name, values_P in means.items()}


class DPOLoss(PairLoss):
    """Scores are log-probs. With h = (log pi - log pi_ref of the chosen) - (the same of the rejected answer):

        dpo     -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)     (Rafailov et al. 2023, equation 7; label
                smoothing s is conservative DPO, Mitchell 2023)
        ipo     (h - 1 / (2 beta))^2                                      (Azar et al. 2023, equation 17)
        simpo   -log sigmoid(beta h - target_margin), without pi_ref      (Meng et al. 2024, equation 6)

    Log-probs of an answer are summed over its tokens, with `length_normalized` averaged; ipo and simpo always average.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config

    def compare(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        config = self._config
        if pairs.ref_logprobs_T is not None:
            scores_T = scores_T - pairs.ref_logprobs_T
        chosen_P, rejected_P = pairs.by_row(scores_T, mean=config.length_normalized or config.loss != "dpo")
        margin_P = config.beta * (chosen_P - rejected_P)
        match config.loss:
            case "dpo":
                smoothing = config.label_smoothing
                loss_P = -(1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)
            case "ipo":
                loss_P = (chosen_P - rejected_P - 1 / (2 * config.beta)).square()
            case "simpo":
                loss_P = -logsigmoid(margin_P - config.target_margin)
        return loss_P, margin_P


class BradleyTerryLoss(PairLoss):
    """-log sigmoid(r_chosen - r_rejected - margin), r a row's one score (Touvron et al. 2023, equation 2)."""

    def compare(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        chosen_P, rejected_P = pairs.by_row(scores_T)
        return -logsigmoid(chosen_P - rejected_P - pairs.margins_P), chosen_P - rejected_P


class LinearScoreLoss:
    """The function whose derivative by each token's log-prob, or by a critic's value, is `columns.weights`."""

    token_local = True

    def __call__(self, outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        scores_S = outputs.values_S if outputs.logprobs_S is None else outputs.logprobs_S
        assert scores_S is not None and columns.weights is not None
        return (columns.weights * scores_S).sum(), {}
