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
    """Rows alternate: chosen, rejected, chosen, …; D pairs, `[T]` as everywhere."""

    trajectories_T: Tensor
    mask_T: Tensor
    margins_D: Tensor
    """By how much the chosen answer should be better, as the data says."""
    ref_logprobs_T: Tensor | None = None
    desirable_D: Tensor | None = None
    """KTO: which answers are good, bool; the rows alternate then between an answer and one of another row."""

    def by_row(self, values_T: Tensor, mean: bool = False) -> tuple[Tensor, Tensor]:
        """Sum (or mean) over the trained tokens of the chosen and of the rejected rows, two `[D]`."""
        rows = 2 * len(self.margins_D)
        values_B = values_T.new_zeros(rows).index_add(0, self.trajectories_T[self.mask_T], values_T[self.mask_T])
        if mean:
            values_B = values_B / torch.bincount(self.trajectories_T[self.mask_T], minlength=rows)
        return values_B[0::2], values_B[1::2]


class PairLoss(ABC):
    """Mean of the pairs' losses, from a score for each token."""

    @abstractmethod
    def compare(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        """(loss, margin) of each pair, `[D]`; the margin is how much better the chosen answer already is."""

    def __call__(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, float]]:
        """Gradient of the loss by each token's score, float32 `[T]`; loss, margin and accuracy."""
        scores_T = scores_T.double().requires_grad_()
        losses_D, margins_D = self.compare(scores_T, pairs)
        (gradients_T,) = torch.autograd.grad(losses_D.mean(), scores_T)
        means = {"loss": losses_D, "margin": margins_D, "accuracy": (margins_D > 0).double()}
        return gradients_T.float(), {name: values_D.mean().item() for name, values_D in means.items()}


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
        chosen_D, rejected_D = pairs.by_row(scores_T, mean=config.length_normalized or config.loss != "dpo")
        margin_D = config.beta * (chosen_D - rejected_D)
        match config.loss:
            case "dpo":
                smoothing = config.label_smoothing
                loss_D = -(1 - smoothing) * logsigmoid(margin_D) - smoothing * logsigmoid(-margin_D)
            case "ipo":
                loss_D = (chosen_D - rejected_D - 1 / (2 * config.beta)).square()
            case _:
                loss_D = -logsigmoid(margin_D - config.target_margin)
        return loss_D, margin_D


class ORPOLoss(PairLoss):
    """Likelihood of the chosen answers, and the odds of both (Hong et al. 2024, equations 3 to 7):

        -log p(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected)),  odds(y) = P(y) / (1 - P(y))

    P(y) is the geometric mean of the probabilities of the answer's tokens. The likelihood is a mean over the tokens of
    all chosen answers of the step, as in supervised fine-tuning. The margin is the log of the odds' ratio.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config

    def compare(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        chosen_D, rejected_D = pairs.by_row(scores_T, mean=True)
        odds_ratio_D = _log_odds(chosen_D) - _log_odds(rejected_D)
        tokens = (pairs.mask_T & (pairs.trajectories_T % 2 == 0)).sum() / len(pairs.margins_D)
        likelihood_D = pairs.by_row(scores_T)[0] / tokens
        return -likelihood_D - self._config.beta * logsigmoid(odds_ratio_D), odds_ratio_D


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
        config, good_D = self._config, pairs.desirable_D
        assert pairs.ref_logprobs_T is not None and good_D is not None
        matched_D, mismatched_D = pairs.by_row(scores_T - pairs.ref_logprobs_T)
        kl = mismatched_D.mean().clamp(min=0).detach()
        margin_D = config.beta * (matched_D - kl) * torch.where(good_D, 1.0, -1.0)
        weight_D = torch.where(good_D, config.desirable_weight, config.undesirable_weight)
        return weight_D * (1 - margin_D.sigmoid()), margin_D


def preference_loss(config: PreferenceConfig) -> PairLoss:
    """The loss that `preference.loss` names."""
    kinds: dict[str, Callable[[PreferenceConfig], PairLoss]] = {"orpo": ORPOLoss, "kto": KTOLoss}
    return kinds.get(config.loss, DPOLoss)(config)


def _log_odds(logprobs_D: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, which is kept below 0, where it has no bound."""
    below_D = logprobs_D.clamp(max=-1e-12)
    return below_D - (-below_D.expm1()).log()


class BradleyTerryLoss(PairLoss):
    """-log sigmoid(r_chosen - r_rejected - margin), r a row's one score (Touvron et al. 2023, equation 2)."""

    def compare(self, scores_T: Tensor, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        chosen_D, rejected_D = pairs.by_row(scores_T)
        return -logsigmoid(chosen_D - rejected_D - pairs.margins_D), chosen_D - rejected_D


class LinearScoreLoss:
    """The function whose derivative by each token's log-prob, or by a critic's value, is `columns.loss_weights`."""

    token_local = True

    def __call__(self, outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        scores_S = outputs.values_S if outputs.logprobs_S is None else outputs.logprobs_S
        assert scores_S is not None and columns.loss_weights is not None
        return (columns.loss_weights * scores_S).sum(), {}
