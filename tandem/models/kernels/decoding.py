"""What a decoding pass of a GPU does besides products of matrices. Each operator is one kernel, attention is two where
rows are few.

Suffixes: `_N` tokens of the pass, of which each is a row's last one.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from tandem.models.kernels import with_triton


@torch.library.custom_op("tandem::add_and_norm_", mutates_args=("hidden_N",))
def add_and_norm_(hidden_N: Tensor, added_N: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add `added_N` to `hidden_N`, `[N, hidden]`; returns its RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    if with_triton(hidden_N):
        from tandem.models.kernels import decoding_triton

        return decoding_triton.add_and_norm_(hidden_N, added_N, weight, epsilon)
    if added_N is not None:
        hidden_N.add_(added_N)
    return torch.rms_norm(hidden_N, weight.shape, weight, epsilon)


@torch.library.custom_op("tandem::gated", mutates_args=())
def gated(gate_up_N: Tensor) -> Tensor:
    """`silu(gate) * up` of `[N, 2 * width]` (Shazeer 2020, arXiv:2002.05202)."""
    if with_triton(gate_up_N):
        from tandem.models.kernels import decoding_triton

        return decoding_triton.gated(gate_up_N)
    gate_N, up_N = gate_up_N.chunk(2, -1)
    return functional.silu(gate_N) * up_N


@torch.library.custom_op("tandem::places", mutates_args=())
def places(table_N: Tensor, position_N: Tensor, page: int) -> Tensor:
    """Where in the pages, as one list of tokens, each row's token at `position_N` stands, int64; `table_N` as in
    `attend_pages`, pages of `page` tokens."""
    if with_triton(table_N):
        from tandem.models.kernels import decoding_triton

        return decoding_triton.places(table_N, position_N, page)
    page_N = table_N.gather(1, (position_N // page)[:, None])[:, 0]
    return page_N.long() * page + position_N % page


@torch.library.custom_op("tandem::rotate_and_store_", mutates_args=("packed_N", "keys", "values"))
def rotate_and_store_(
    packed_N: Tensor,
    cosines_N: Tensor,
    sines_N: Tensor,
    place_N: Tensor,
    keys: Tensor,
    values: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
) -> None:
    """Norm and rotate the queries of `packed_N` where they are, and the keys into pages, where values go, too.

    `packed_N` `[N, heads + 2 kv_heads, head_dim]`; `cosines_N`, `sines_N` `[N, head_dim / 2]` (Su et al. 2021,
    arXiv:2104.09864); `place_N` int64: where in the pages, as one list of tokens; `keys`, `values` `[pages, page,
    kv_heads, head_dim]`; norms `[head_dim]`, or None.
    """
    if with_triton(packed_N):
        from tandem.models.kernels import decoding_triton

        decoding_triton.rotate_and_store_(
            packed_N, cosines_N, sines_N, place_N, keys, values, query_norm, key_norm, epsilon
        )
        return
    kv_heads = keys.shape[2]
    query_N, key_N, value_N = packed_N.split((packed_N.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    for norm, x_N in ((query_norm, query_N), (key_norm, key_N)):
        if norm is not None:
            x_N.copy_(torch.rms_norm(x_N, norm.shape, norm, epsilon))
        low_N, high_N = (half.float() for half in x_N.chunk(2, -1))
        cos_N, sin_N = cosines_N[:, None].float(), sines_N[:, None].float()
        x_N.copy_(torch.cat((low_N * cos_N - high_N * sin_N, high_N * cos_N + low_N * sin_N), -1))
    keys.flatten(0, 1).index_copy_(0, place_N, key_N)
    values.flatten(0, 1).index_copy_(0, place_N, value_N)


@torch.library.custom_op("tandem::attend_pages", mutates_args=())
def attend_pages(
    query_N: Tensor,
    keys: Tensor,
    values: Tensor,
    table_N: Tensor,
    position_N: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of each row's last token, at `position_N`, to itself and those before it: `[N, heads, head_dim]`.

    `query_N` `[N, heads, head_dim]`, any strides but the last; `keys`, `values` `[pages, page, kv_heads, head_dim]`;
    `table_N` int32 `[N, most]`: the pages of each row; the rest is `Scoring`'s. Scores and sums are float32.
    """
    if with_triton(query_N):
        from tandem.models.kernels import decoding_triton

        return decoding_triton.attend_pages(query_N, keys, values, table_N, position_N, scale, window, cap, sinks)
    page, kv_heads = keys.shape[1:3]
    longest = table_N.shape[1] * page
    place_NL = (table_N.long()[:, :, None] * page + torch.arange(page, device=keys.device)).flatten(1)
    key_NL, value_NL = (pages.flatten(0, 1)[place_NL].float() for pages in (keys, values))
    query = query_N.float().unflatten(1, (kv_heads, -1))
    scores = torch.einsum("nkgd,nlkd->nkgl", query, key_NL) * scale
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    at = torch.arange(longest, device=keys.device)
    seen_NL = at <= position_N[:, None]
    if window is not None:
        seen_NL &= at > position_N[:, None] - window
    scores = scores.masked_fill(~seen_NL[:, None, None], -math.inf)
    if sinks is not None:
        of_rows = sinks.float().view(1, kv_heads, -1, 1).expand(len(query), -1, -1, -1)
        scores = torch.cat((scores, of_rows), -1)
    weights = scores.softmax(-1)[..., :longest]
    return torch.einsum("nkgl,nlkd->nkgd", weights, value_NL).flatten(1, 2).to(query_N.dtype)


add_and_norm_.register_fake(lambda hidden_N, *_: torch.empty_like(hidden_N))
gated.register_fake(lambda gate_up_N: gate_up_N.new_empty(len(gate_up_N), gate_up_N.shape[1] // 2))
places.register_fake(lambda table_N, position_N, page: torch.empty_like(position_N))
rotate_and_store_.register_fake(lambda *_: None)
attend_pages.register_fake(lambda query_N, keys, values, *_: query_N.new_empty(*query_N.shape[:2], values.shape[-1]))
