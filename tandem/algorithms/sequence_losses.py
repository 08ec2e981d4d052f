"""Losses on the ratio of whole responses, r_seq = (product of the tokens' ratios) ** (1 / number of tokens).

They need all tokens of a row at once: `columns.rows` says which belong together.
"""

import torch
from torch import Tensor

from tandem.algorithms.policy_losses import PolicyLoss, Tokens, bounded_exp, clipped_surrogate
from tandem.config.algorithms import GMPOLossConfig, GSPOLossConfig


class GSPOLoss(PolicyLoss[GSPOLossConfig]):
    """max(-A s, -A clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high)) with s = [r_seq] pi / [pi] (Zheng et al. 2025).

    This is the token form (equations 13 and 14). Where a row has one advantage, its value and gradient are those of the
    sequence form (equation 5).
    """

    token_local = False

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        log_ratio_S = row_mean(tokens.log_ratio_S.detach(), tokens)
        ratio_S = bounded_exp(log_ratio_S + tokens.logprobs_S - tokens.logprobs_S.detach())
        return clipped_surrogate(self.config, ratio_S, tokens.advantages_S)


class GMPOLoss(PolicyLoss[GMPOLossConfig]):
    """-A exp(row mean of log r), log r cut at ± clip_log_ratio where A pushes it further out (Zhao et al. 2025).

    A row must have one advantage.
    """

    token_local = False

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        sign_S = tokens.advantages_S.sign()
        log_ratio_S = sign_S * (sign_S * tokens.log_ratio_S).clamp(max=self.config.clip_log_ratio)
        clipped_S = sign_S * tokens.log_ratio_S > self.config.clip_log_ratio
        return -tokens.advantages_S * bounded_exp(row_mean(log_ratio_S, tokens)), clipped_S


def row_mean(values_S: Tensor, tokens: Tokens) -> Tensor:
    """At each token the mean over its row."""
    rows_S = tokens.columns.rows
    assert rows_S is not None
    count_R = torch.bincount(rows_S).clamp(min=1)
    return (values_S.new_zeros(len(count_R)).index_add(0, rows_S, values_S) / count_R)[rows_S]
