"""Log-probs and entropy from logits whose vocabulary is spread over the tensor-parallel ranks, never gathered.

With z the logits, m their maximum over all ranks and s = sum exp(z - m), sums over ranks give a token's

    log p[y] = z[y] - m - log s        H = m + log s - sum p z        sum p^2 = sum exp(2 (z - m)) / s^2
    d log p[y] / dz = onehot(y) - p    dH / dz = -p * (log p + H)

Suffixes: `_C` tokens of a chunk, `_V` this rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup


class TokenStatistics(Function):
    """(float32 logits `[C, V]`, targets `[C]`, first token id of this rank, group) -> log-probs, entropy and
    sum of squared probabilities, `[C]`; the last without gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits_CV: Tensor, targets_C: Tensor, first: int, group: ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        maximum_C = logits_CV.amax(-1)
        dist.all_reduce(maximum_C, dist.ReduceOp.MAX, group)
        shifted_CV = logits_CV - maximum_C[:, None]
        softmax_CV = shifted_CV.exp()
        local_C = targets_C - first
        absent_C = (local_C < 0) | (local_C >= logits_CV.shape[1])
        local_C = local_C.masked_fill(absent_C, 0)
        chosen_C = shifted_CV.gather(1, local_C[:, None])[:, 0].masked_fill(absent_C, 0)
        weighted_C, squares_C = (torch.einsum("cv,cv->c", softmax_CV, other) for other in (shifted_CV, softmax_CV))
        sums = torch.stack((softmax_CV.sum(-1), weighted_C, squares_C, chosen_C))
        dist.all_reduce(sums, group=group)
        total_C, weighted_C, squares_C, chosen_C = sums
        log_total_C = total_C.log()
        entropy_C = log_total_C - weighted_C / total_C
        ctx.save_for_backward(
            softmax_CV.div_(total_C[:, None]), shifted_CV.sub_(log_total_C[:, None]), entropy_C, local_C, absent_C
        )
        squares_C = squares_C / total_C.square()
        ctx.mark_non_differentiable(squares_C)
        return chosen_C - log_total_C, entropy_C, squares_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_CV, log_softmax_CV, entropy_C, local_C, absent_C = ctx.saved_tensors
        by_logprob_C, by_entropy_C, _ = gradients
        factor_CV = (log_softmax_CV + entropy_C[:, None]) * -by_entropy_C[:, None] - by_logprob_C[:, None]
        grad_CV = softmax_CV * factor_CV
        grad_CV.scatter_add_(1, local_C[:, None], by_logprob_C.masked_fill(absent_C, 0)[:, None])
        return grad_CV, None, None, None
