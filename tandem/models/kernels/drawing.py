"""The next token of each row: temperature, then top-k, then top-p, by inverse-CDF sampling.

Tokens are drawn in the order of their ids; where top-k or top-p leave some out, in that of falling probability, and
equally probable ones in that of their ids. So the allowed tokens are the first `top_k` in this order, and of these
every one before which less than `top_p` of their probability stands (Holtzman et al. 2020, arXiv:1904.09751).

Suffixes: `_B` rows, `_V` vocabulary, `_K` the tokens of a row that may be drawn, in falling order, `_1` one column.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.models.kernels import with_triton

FIELDS = ("token", "position", "lag", "made", "stream", "temperature", "top_k", "top_p")
"""A row's state on the device, each an int64 or the bits of a float64: its last token, where that stands in the row, by
how much the position that is encoded differs, how many tokens it has made, or -1 where it is no row and its state
stays, its random stream, and how its tokens are chosen."""

_BLOCK = 128
"""Tokens whose probabilities are added up before a large vocabulary's cumulative sum: that sum is not vectorised."""
_MARGIN = 1 - 2.0**-20
"""More than rounding can do to `lowest`."""


@torch.library.custom_op("tandem::choose_", mutates_args=("state_8B", "chosen_B2"))
def choose_(logits_BV: Tensor, state_8B: Tensor, chosen_B2: Tensor, never: Tensor | None) -> None:
    """Choose the next token of each row, write it and its log-prob into `chosen_B2`, float64, and take the rows one
    token on, so that the next pass needs nothing of the host.

    `state_8B`: `FIELDS`; random number `made` of a row's stream chooses. `never` as in `TokenChoice`. A row depends on
    no other row.
    """
    if with_triton(logits_BV):
        from tandem.models.kernels import drawing_triton

        drawing_triton.choose_(logits_BV, state_8B, chosen_B2, never)
        return
    last_B, position_B, _, made_B, stream_B, temperature_B, top_k_B, top_p_B = state_8B.unbind()
    choice = TokenChoice.of(temperature_B.view(torch.float64), top_k_B, top_p_B.view(torch.float64))
    token_B, logprob_B = choice(logits_BV.to(torch.float32, copy=True), _uniforms(stream_B, made_B)[:, None], never)
    chosen_B2.copy_(torch.stack((token_B, logprob_B), dim=1))
    goes_on_B = (made_B >= 0).long()
    last_B.copy_(token_B)
    position_B += goes_on_B
    made_B += goes_on_B


choose_.register_fake(lambda *_: None)


def _uniforms(stream_B: Tensor, made_B: Tensor) -> Tensor:
    """Number `made` of each row's stream: float64 in [0, 1), 53 bits (splitmix64, Steele et al. 2014)."""
    z = stream_B + (made_B + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return _shifted(z ^ _shifted(z, 31), 11).double() * 2.0**-53


def _shifted(z: Tensor, bits: int) -> Tensor:
    """As if it had no sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class TokenChoice:
    """How the next tokens of some rows are chosen, pass after pass: what they have in common is looked up once, as on a
    CPU that takes as long as choosing."""

    divisor_B1: Tensor | None
    """Temperatures, 1 for greedy rows; None: all are 1."""
    greedy_B1: Tensor | None
    """Which rows take their most probable token; None: none does."""
    all_greedy: bool
    filtered: Tensor
    """The rows of which some tokens may not be drawn, int64."""
    top_k: Tensor
    """Theirs, int64; 0: all tokens."""
    top_p: Tensor
    """Theirs, float64."""

    @classmethod
    def of(cls, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> "TokenChoice":
        """`temperature_B`, `top_p_B` float64; a temperature of 0 is that of greedy rows."""
        greedy_B = temperature_B == 0
        divisor_B = temperature_B.masked_fill(greedy_B, 1).float()
        filtered = (((top_k_B > 0) | (top_p_B < 1)) & ~greedy_B).nonzero()[:, 0]
        return cls(
            divisor_B[:, None] if bool((divisor_B != 1).any()) else None,
            greedy_B[:, None] if bool(greedy_B.any()) else None,
            bool(greedy_B.all()),
            filtered,
            top_k_B[filtered],
            top_p_B[filtered],
        )

    def __call__(self, logits_BV: Tensor, uniform_B1: Tensor | None, never: Tensor | None) -> tuple[Tensor, Tensor]:
        """int64 `[B]` tokens and float32 `[B]` log softmax(logits / temperature) of them, before top-k and top-p.

        The logits may be overwritten. `uniform_B1`: float64 random numbers in [0, 1), needed unless `all_greedy`.
        `never`: tokens that are not drawn, though they have their share in the log-probs of the others.
        """
        logits_BV = logits_BV.float()
        if self.divisor_B1 is not None:
            logits_BV = logits_BV.div_(self.divisor_B1)
        probs_BV = logits_BV.softmax(-1)
        if never is not None:
            probs_BV = probs_BV.index_fill_(1, never, 0)
            logits_BV = logits_BV.index_fill_(1, never, -torch.inf)
        if uniform_B1 is None or self.all_greedy:
            token_B1 = logits_BV.argmax(-1, keepdim=True)
        else:
            token_B1 = self._drawn(logits_BV, probs_BV, uniform_B1)
        return token_B1.squeeze(1), probs_BV.gather(1, token_B1).log_().squeeze(1)

    def _drawn(self, logits_BV: Tensor, probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
        token_B1 = draw(probs_BV, uniform_B1)
        if len(self.filtered):
            rows = self.filtered
            token_B1[rows] = draw_filtered(probs_BV[rows], uniform_B1[rows], self.top_k, self.top_p)
        if self.greedy_B1 is not None:
            token_B1 = torch.where(self.greedy_B1, logits_BV.argmax(-1, keepdim=True), token_B1)
        return token_B1


def draw(probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Tokens `[B, 1]`, each with its probability: the one at which the cumulative sum passes `uniform`."""
    vocabulary = probs_BV.shape[1]
    if vocabulary <= 4 * _BLOCK:
        return _pick(probs_BV, uniform_B1)
    if vocabulary % _BLOCK:
        probs_BV = pad(probs_BV, (0, -vocabulary % _BLOCK))
    blocks = probs_BV.unflatten(1, (-1, _BLOCK))
    block_B1, rest_B1 = _pick_with_rest(blocks.sum(-1), uniform_B1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block_B1[:, 0]]
    return block_B1 * _BLOCK + _pick(inside, rest_B1)


def draw_filtered(probs_BV: Tensor, uniform_B1: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Tokens `[B, 1]` of those that may be drawn, by their share of these."""
    weights_BK, token_BK = allowed(probs_BV, top_k_B, top_p_B)
    return token_BK.gather(1, _pick(weights_BK, uniform_B1))


def allowed(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn, and behind them others of weight 0: float64 `[B, K]` probabilities and int64 ids.

    Only tokens that may be among them are sorted: of a peaked distribution few.
    """
    ranked_B1 = (top_k_B > 0)[:, None]
    total_B1 = probs_BV.new_ones(len(probs_BV), 1) if ranked_B1.all() else probs_BV.sum(-1, True, dtype=torch.float64)
    found = _first(probs_BV, top_k_B) if ranked_B1.all() else None
    probs_BK, token_BK = found or _sorted(probs_BV, _lowest(probs_BV, total_B1, top_k_B, top_p_B))
    rank_K = torch.arange(probs_BK.shape[1], device=probs_BV.device)
    weights_BK = probs_BK.double().masked_fill_(ranked_B1 & (rank_K >= top_k_B[:, None]), 0)
    cumulative_BK = weights_BK.cumsum(-1)
    share_B1 = top_p_B[:, None] * torch.where(ranked_B1, cumulative_BK[:, -1:], total_B1)
    return weights_BK.masked_fill(cumulative_BK - weights_BK >= share_B1, 0), token_BK


def _first(probs_BV: Tensor, top_k_B: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `_sorted`, of rows that all have a top-k; None where a token beyond one is as probable as the last within."""
    most = min(int(top_k_B.max()), probs_BV.shape[1] - 1)
    probs_BK, token_BK = probs_BV.topk(most + 1)
    last_B1 = top_k_B.clamp(max=most)[:, None]
    beyond_B1 = probs_BK.gather(1, last_B1)
    if bool(((probs_BK.gather(1, last_B1 - 1) == beyond_B1) & (beyond_B1 > 0)).any()):
        return None
    token_BK, order_BK = token_BK.sort(dim=-1)
    probs_BK, order_BK = probs_BK.gather(1, order_BK).sort(dim=-1, descending=True, stable=True)
    return probs_BK, token_BK.gather(1, order_BK)


def _lowest(probs_BV: Tensor, total_B1: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """`[B, 1]`: less probable tokens are surely not drawn. With a top-k it is the probability of the last of these;
    without, all tokens below `(1 - top_p) / vocabulary` of the total have together less than what top-p leaves out."""
    vocabulary = probs_BV.shape[1]
    lowest_B1 = ((1 - top_p_B)[:, None] * total_B1 * (_MARGIN / vocabulary)).float()
    top_k_B = top_k_B.clamp(max=vocabulary)
    if not (most := int(top_k_B.max())):
        return lowest_B1
    of_rank_B1 = probs_BV.topk(most).values.gather(1, (top_k_B[:, None] - 1).clamp(min=0))
    return torch.where(top_k_B[:, None] > 0, of_rank_B1, lowest_B1)


def _sorted(probs_BV: Tensor, lowest_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The positive probabilities from `lowest_B1` on, falling, and the ids, `[B, K]`; what is behind a row's is 0."""
    rows, tokens = ((probs_BV >= lowest_B1) & (probs_BV > 0)).nonzero(as_tuple=True)
    count_B = rows.bincount(minlength=len(probs_BV))
    places = torch.arange(len(rows), device=rows.device) - (count_B.cumsum(0) - count_B)[rows]
    shape = len(probs_BV), max(1, int(count_B.max()))
    probs_BK, token_BK = probs_BV.new_zeros(shape), tokens.new_zeros(shape)
    probs_BK[rows, places], token_BK[rows, places] = probs_BV[rows, tokens], tokens
    probs_BK, order_BK = probs_BK.sort(dim=-1, descending=True, stable=True)
    return probs_BK, token_BK.gather(1, order_BK)


def _pick(weights: Tensor, uniform_B1: Tensor) -> Tensor:
    """A column of each row, `[B, 1]`, with probability proportional to its weight.

    The column's weight is positive: rounding keeps `uniform * total` below `total` as `uniform` is below 1.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return _column(cumulative, uniform_B1 * cumulative.narrow(1, -1, 1))


def _pick_with_rest(weights: Tensor, uniform_B1: Tensor) -> tuple[Tensor, Tensor]:
    """What `_pick` returns, and what is left of the random number."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniform_B1 * cumulative[:, -1:]
    column = _column(cumulative, target)
    weight = weights.gather(1, column).double()
    rest = (target - cumulative.gather(1, column) + weight) / weight
    return column, rest.clamp_(0, 1 - 2.0**-53)


def _column(cumulative: Tensor, target: Tensor) -> Tensor:
    # The clamp matters to rows of NaN alone, which the engine refuses.
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
