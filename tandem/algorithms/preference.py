"""Losses on pairs of answers: what one answer's score should have over the other's. KTO's pairs are an answer and, for
the KL, another row's answer to the same prompt.

A pair's loss needs the scores of both answers, which may be trained on different ranks. So all scores are taken first,
and the loss is differentiated by them here; the pass that trains then descends along that gradient
(`LinearScoreLoss`). Dropouts are 0, so both passes see the same scores, and the gradient is exact.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
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
    desirable_P: Tensor | None = None
    """KTO: which answers are good, bool; the rows alternate then between an answer and one of another row."""

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
            case _:
                loss_P = -logsigmoid(margin_P - config.target_margin)
        return loss_P, margin_P


class ORPOLoss(PairLoss):
    """Likelihood of the chosen answers, and the odds of both (Hong et al. 2024, equations 3 to 7):

        -log p(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected)),  odds(y) = P(y) / (1 - P(y))

    P(y) is the geometric mean of the probabilities of the answer's tokens. The likelihood is a mean over the tokens of
    all chosen answers of the step, as in supervised fine-tuning. The margin is the log of the odds' ratio.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config

    def compare(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        chosen_P, rejected_P = pairs.by_row(scores_T, mean=True)
        odds_ratio_P = _log_odds(chosen_P) - _log_odds(rejected_P)
        tokens = (pairs.mask_T & (pairs.rows_T % 2 == 0)).sum() / len(pairs.margins_P)
        likelihood_P = pairs.by_row(scores_T)[0] / tokens
        return -likelihood_P - self._config.beta * logsigmoid(odds_ratio_P), odds_ratio_P


class KTOLoss(PairLoss):
    """Answers that are good or bad each for itself (Ethayarajh et al. 2024, equations 6 to 8). With r = log pi - log
    pi_ref of an answer, and z the KL between the two policies:

        desirable_weight (1 - sigmoid(beta (r - z))) of a good answer, undesirable_weight (1 - sigmoid(beta (z - r)))
        of a bad one

    z is estimated as in the paper: the mean of r over the prompts of the step, each with the answer of another row, at
    least 0; no gradient goes through it. The margin is beta (r - z), of bad answers beta (z - r).
    """

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config

    def compare(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        config, good_P = self._config, pairs.desirable_P
        assert pairs.ref_logprobs_T is not None and good_P is not None
        matched_P, mismatched_P = pairs.by_row(scores_T - pairs.ref_logprobs_T)
        kl = mismatched_P.mean().clamp(min=0).detach()
        margin_P = config.beta * (matched_P - kl) * torch.where(good_P, 1.0, -1.0)
        weight_P = torch.where(good_P, config.desirable_weight, config.undesirable_weight)
        return weight_P * (1 - margin_P.sigmoid()), margin_P


def preference_loss(config: PreferenceConfig) -> PairLoss:
    """The loss that `preference.loss` names."""
    kinds: dict[str, Callable[[PreferenceConfig], PairLoss]] = {"orpo": ORPOLoss, "kto": KTOLoss}
    return kinds.get(config.loss, DPOLoss)(config)


def _log_odds(logprobs_P: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, which is kept below 0, where it has no bound."""
    below_P = logprobs_P.clamp(max=-1e-12)
    return below_P - (-below_P.expm1()).log()


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
