"""aten's flash operators for CUDA, as a CPU can run them: their real schema, behind it a strict implementation.

It checks what the C++ checks (flash_api.cpp), and refuses what the kernels would silently do wrongly.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.models.attention.kernels import ReferenceKernel
from tandem.models.attention.pieces import Piece

CPU = torch.device("cpu")


@contextmanager
def flash_operators_on_the_cpu(dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16)) -> Iterator[None]:
    """`dtypes`: those that are taken; a test of exactness takes float64, which no GPU does."""
    library = torch.library.Library("aten", "IMPL")
    operators = _Operators(tuple(dtypes))
    library.impl("_flash_attention_forward", operators.forward, "CPU")
    library.impl("_flash_attention_backward", operators.backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


class _Operators:
    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        self._dtypes = dtypes

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float, **options: Any) -> Any:
        *bounds, dropout, causal, debug = rest
        assert dropout == 0 and not debug
        call = self._call(query, key, value, bounds, causal, **options)
        output, lse = call.forward(query, key, value, scale)
        state = torch.zeros(2, dtype=torch.uint64)
        return output, lse, state, state[:0].clone(), query.new_empty(0)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        *rest: Any,
        scale: float,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        *bounds, dropout, causal, _, _ = rest
        assert dropout == 0
        call = self._call(query, key, value, bounds, causal, **options)
        if not grad.dtype == output.dtype == query.dtype or not grad.shape == output.shape == query.shape:
            raise RuntimeError("query, out and dout must have the same dtype and shape")
        wide = torch.promote_types(query.dtype, torch.float32)
        if lse.shape != query.shape[1::-1] or not lse.is_contiguous() or lse.dtype != wide:
            raise RuntimeError("the log-sum-exps are read as contiguous float32 [heads, total_q], unchecked")
        parts = call.backward(grad, query, key, value, output, lse, scale)
        return tuple(gradient for _, gradient in parts)

    def _call(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: list[Any], causal: bool, **window: int
    ) -> ReferenceKernel:
        starts_q, starts_k, longest_q, longest_k = bounds
        if not query.dtype == key.dtype == value.dtype or query.dtype not in self._dtypes:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if not starts_q.dtype == starts_k.dtype == torch.int32 or len(starts_q) != len(starts_k):
            raise RuntimeError("cu_seqlens_q and cu_seqlens_k must have dtype int32 and one length")
        if any(x.dim() != 3 or x.stride(-1) != 1 for x in (query, key, value)):
            raise RuntimeError("Input tensor must have contiguous last dimension")
        if key.shape != value.shape or query.shape[1] % key.shape[1]:
            raise RuntimeError("Number of heads in key/value must divide number of heads in query")
        if query.shape[2] != key.shape[2] or query.shape[2] % 8 or query.shape[2] > 256:
            raise RuntimeError("head_size must be a multiple of 8, at most 256, and one for query, key and value")
        lengths_q, lengths_k = starts_q.diff().long().numpy(), starts_k.diff().long().numpy()
        if lengths_q.max() > longest_q or lengths_k.max() > longest_k:
            raise RuntimeError("a segment is longer than max_seqlen: the kernel would leave out its end")
        if min(lengths_q.min(), lengths_k.min()) < 1:
            raise RuntimeError("an empty segment: its log-sum-exp would be +inf")
        if (starts_q[0], starts_k[0]) != (0, 0) or (starts_q[-1], starts_k[-1]) != (len(query), len(key)):
            raise RuntimeError("tokens outside the segments: their outputs would be unset memory")
        left, right = window["window_size_left"], 0 if causal else window["window_size_right"]
        if right not in (-1, 0) or (right == -1 and left != -1):
            raise RuntimeError("a window to the right, or one to the left that is not causal")
        width = None if left == -1 else left + 1
        whole = slice(0, len(query)), slice(0, len(key))
        return ReferenceKernel(Piece(*whole, lengths_q, lengths_k, right == 0, width), CPU)
