"""Does the kernel at hand do what pieces rely on? Asked when an engine starts on a GPU, with the model's own shapes.

Nobody can test a kernel on every GPU, driver and version of torch; each is tested where it is used, in milliseconds.
"""

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from transformers import PreTrainedConfig

from tandem.errors import EngineError
from tandem.models.attention.kernel_choice import kernel_for
from tandem.models.attention.kernels import Flash, ReferenceKernel
from tandem.models.attention.pieces import KernelCall, Piece, attend, gathered, shared_prefixes

LARGEST = 10.0
"""By what factor of rounding a kernel may be off: right ones are by 1 to 3, mistaken ones by 50 and more."""
_OFFSETS = np.array([0, 150, 151, 152, 285, 352, 353, 493])
_PREFIXES = np.array([-1, -1, 0, 0, 0, 1, 1])
"""A long prompt and one of a token; answers of 1, 133 and 67 tokens to the first, of 1 and 140 to the second."""

Kernel = Callable[[Piece, torch.device], KernelCall]


def check_attention(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    """EngineError where the kernel that computes this model's attention on this GPU gives other numbers than it should.

    Nothing is asked on a CPU, whose kernels the tests hold to the reference.
    """
    if device.type != "cuda":
        return
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    cap = getattr(text, "attn_logit_softcapping", None)
    kernel = kernel_for(device, dtype, width, cap, longest=1)
    if kernel is Flash:
        windows = {None, getattr(text, "sliding_window", None)}
        shape = heads, kv_heads, -(-width // 8) * 8
        _check_flash(shape, dtype, device, frozenset(windows), current_flash_attention_impl() or "FA2")


@cache
def _check_flash(
    heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, windows: frozenset[int | None], version: str
) -> None:
    off = error_of(Flash, heads, dtype, device, windows)
    if not off <= LARGEST:
        raise EngineError(
            f"attention on {torch.cuda.get_device_name(device)} with torch {torch.__version__}: {version} is off "
            f"by {off:.3g} times the rounding of {str(dtype).removeprefix('torch.')}, with {heads[0]} and {heads[1]} "
            f"heads of {heads[2]} numbers; use another training.attention, another version of torch, or "
            "model.dtype=float32 with short rows"
        )


@torch.inference_mode(False)
@torch.enable_grad()  # whoever starts the engine may do without
def error_of(
    kernel: Kernel,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    windows: Iterable[int | None] = (None,),
) -> float:
    """The worst error of output or gradients over rounding: the reference's distance in `dtype` from float64.

    `heads`: of queries, of keys and values, and the numbers in each. Sinks take part, too.
    """
    query_heads, kv_heads, width = heads
    generator = torch.Generator().manual_seed(0)
    counts = (query_heads, kv_heads, kv_heads, query_heads)
    drawn = [torch.randn(int(_OFFSETS[-1]), n, width, generator=generator).to(device, dtype) for n in counts]
    sinks = torch.linspace(-1, 3, query_heads, device=device)
    worst = 0.0
    for window in windows:
        pieces = shared_prefixes(_OFFSETS, _PREFIXES) if window is None else gathered(_OFFSETS, _PREFIXES, window)
        exact = _run(ReferenceKernel, pieces, [x.double() for x in drawn], sinks.double())
        rounded, found = (_run(by, pieces, drawn, sinks) for by in (ReferenceKernel, kernel))
        for e, r, f in zip(exact, rounded, found, strict=True):
            off, rounding = (float((x.double() - e).norm()) for x in (f, r))
            worst = max(worst, off / max(rounding, 1e-9 * float(e.norm())) if off == off else float("inf"))
    return worst


def _run(kernel: Kernel, pieces: list[Piece], drawn: list[Tensor], sinks: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    query, key, value, grad = drawn
    leaves = [x.detach().requires_grad_() for x in (query, key, value, sinks)]
    query, key, value, sinks = leaves
    calls = [kernel(piece, grad.device) for piece in pieces]
    output = attend(query, key, value, calls, grad.shape[-1] ** -0.5, sinks)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]
