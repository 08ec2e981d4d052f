"""The distance of the student's distribution to a teacher's of which only the likeliest tokens are known."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from tandem.algorithms.builtin.clip import ClipLoss

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.types import Outputs, TokenColumns

LEAST_REST = 1e-7
"""What a sum of float32 probabilities resolves: a rest below it is taken to be as large, without gradient."""


def top_k_reverse_kl(logprobs_SK: Tensor, teacher_logprobs_SK: Tensor) -> Tensor:
    """KL(student || teacher) of the distributions over K tokens and all others taken as one, nats; `[S]`.

        sum over v in K of p(v) (log p(v) - log q(v)) + p' (log p' - log q'),    p' = 1 - sum over v in K of p(v)

    with p the student, which `logprobs_SK` are of, q the teacher, and K the teacher's likeliest tokens (TA-OPD,
    arXiv:2608.14728; without the rest the student may put its probability there). It is at most the KL over the whole
    vocabulary, by the log-sum inequality, and is it where K is all tokens. Where `teacher_logprobs_SK` is minus
    infinity, K has one token less.
    """
    log_p_SK, log_q_SK = logprobs_SK.double(), teacher_logprobs_SK.double()
    in_k_SK = log_q_SK > -inf
    p_SK = log_p_SK.exp() * in_k_SK
    rest_S = (1 - p_SK.sum(-1)).clamp(min=LEAST_REST)
    teacher_rest_S = (1 - log_q_SK.exp().sum(-1)).clamp(min=LEAST_REST)
    kl_S = (p_SK * (log_p_SK - log_q_SK.where(in_k_SK, 0))).sum(-1) + rest_S * (rest_S / teacher_rest_S).log()
    return kl_S.to(logprobs_SK.dtype)


@dataclass(frozen=True, slots=True)
class TopKDistillationLoss(ClipLoss):
    """coefficient * `top_k_reverse_kl` beside the clipped surrogate of the advantages, which come of rewards alone.

    Contexts are the student's own, and take no gradient. Columns: `teacher_top_ids` and `teacher_top_logprobs` besides.
    """

    coefficient: float = 1.0

    acts_without_advantage = True

    def __call__(self, outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = ClipLoss.__call__(self, outputs, columns)
        logprobs_SK, teacher_SK, weights_S = outputs.top_logprobs_S, columns.teacher_top_logprobs, columns.loss_weights
        assert logprobs_SK is not None and teacher_SK is not None
        assert weights_S is not None and columns.shares is not None
        kl_S = top_k_reverse_kl(logprobs_SK, teacher_SK)
        metrics["teacher/kl"] = (columns.shares * kl_S.detach()).sum()
        return loss + self.coefficient * (weights_S * kl_S).sum(), metrics
