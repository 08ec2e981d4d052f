"""What a tile of tokens x vocabulary is reduced to, and its gradient. On a GPU each reads the tile once, where torch's
own operators take eight sweeps over a float32 copy of it.

Suffixes: `_C` tokens of the tile, `_W` its part of the vocabulary.
"""

import torch
from torch import Tensor

from tandem.models.kernels import with_triton
from tandem.models.logits import Bend


@torch.library.custom_op("tandem::add_vocabulary_tile", mutates_args=("sums_5C",))
def add_tile(
    sums_5C: Tensor, numbers_CW: Tensor, place_C: Tensor, temperature: float, factor: float, cap: float | None
) -> None:
    """Take up a further tile of logits z: `sums_5C`, float32, holds of each token the largest logit so far m, of all so
    far sum exp(z - m), sum (z - m) exp(z - m) and sum exp(2 (z - m)), and the logit of the token that was chosen.
    Milakov and Gimelshein 2018, arXiv:1805.02867.

    `numbers_CW`: of the output layer; `place_C`: the column of the chosen token, or one that is not there; `factor`,
    `cap`: the `Bend` that makes logits of the numbers.
    """
    if with_triton(numbers_CW):
        from tandem.models.kernels import vocabulary_triton

        vocabulary_triton.add_tile(sums_5C, numbers_CW, place_C, temperature, factor, cap)
        return
    logits_CW, _ = Bend(factor, cap).logits_(numbers_CW.to(torch.float32, copy=True), temperature)
    largest_C, total_C, weighted_C, squares_C, chosen_C = sums_5C.unbind()
    here_C, elsewhere_C = inside(place_C, logits_CW)
    chosen_C.copy_(torch.where(elsewhere_C, chosen_C, logits_CW.gather(1, here_C[:, None])[:, 0]))
    maximum_C = torch.maximum(largest_C, logits_CW.amax(-1))
    moved_C = largest_C - maximum_C
    scale_C = moved_C.exp()
    shifted_CW = logits_CW.sub_(maximum_C[:, None])
    exp_CW = shifted_CW.exp()
    weighted_C.add_(moved_C * total_C).mul_(scale_C)
    squares_C.mul_(scale_C.square()).add_(torch.linalg.vector_norm(exp_CW, dim=-1).square())
    total_C.mul_(scale_C).add_(exp_CW.sum(-1))
    weighted_C.add_(exp_CW.mul_(shifted_CW).sum(-1))
    largest_C.copy_(maximum_C)


@torch.library.custom_op("tandem::vocabulary_gradient_", mutates_args=("numbers_CW",))
def gradient_(
    numbers_CW: Tensor,
    place_C: Tensor,
    log_total_C: Tensor,
    entropy_C: Tensor,
    by_chosen_C: Tensor,
    by_logprob_C: Tensor,
    by_entropy_C: Tensor | None,
    temperature: float,
    factor: float,
    cap: float | None,
) -> None:
    """Put the gradient of the output layer's numbers in their place: with p = softmax(z) of the logits z and its
    entropy H, that of z is `by_chosen` onehot(chosen) - p (`by_logprob` + `by_entropy` (log p + H)).

    Of each token: `place_C` as in `add_tile`; `log_total_C`, log sum exp of all
    logits; `by_chosen_C`, the loss's derivative by the chosen one's log-prob, `by_logprob_C`, by that and the log-probs
    of all others that the loss reads, `by_entropy_C`, by the entropy: float32.
    """
    if with_triton(numbers_CW):
        from tandem.models.kernels import vocabulary_triton

        vocabulary_triton.gradient_(
            numbers_CW, place_C, log_total_C, entropy_C, by_chosen_C, by_logprob_C, by_entropy_C,
            temperature, factor, cap,
        )  # fmt: skip
        return
    logits_CW, slope_CW = Bend(factor, cap).logits_(numbers_CW.to(torch.float32, copy=True), temperature)
    log_softmax_CW = logits_CW.sub_(log_total_C[:, None])
    grad_CW = log_softmax_CW.exp()
    if by_entropy_C is None:
        grad_CW.mul_(-by_logprob_C[:, None])
    else:
        log_softmax_CW.add_(entropy_C[:, None]).mul_(-by_entropy_C[:, None])
        grad_CW.mul_(log_softmax_CW.sub_(by_logprob_C[:, None]))
    here_C, elsewhere_C = inside(place_C, grad_CW)
    grad_CW.scatter_add_(1, here_C[:, None], by_chosen_C.masked_fill(elsewhere_C, 0)[:, None])
    if slope_CW is not None:
        grad_CW.mul_(slope_CW)
    numbers_CW.copy_(grad_CW.mul_(factor / temperature))


def inside(place_C: Tensor, tile_CW: Tensor) -> tuple[Tensor, Tensor]:
    """The places, 0 for those that are not in the tile, and which these are."""
    elsewhere_C = (place_C < 0) | (place_C >= tile_CW.shape[1])
    return place_C.masked_fill(elsewhere_C, 0), elsewhere_C


for operator in (add_tile, gradient_):
    operator.register_fake(lambda *_: None)
