"""Which kernel computes attention."""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch

from tandem.errors import EngineError
from tandem.models.attention.kernels import Flash
from tandem.models.attention.pieces import KernelCall, Piece
from tandem.models.attention.rectangles import Cpu, Plain

_LOG = logging.getLogger(__name__)
_LONGEST = 4096
"""Tokens of a row that `Plain` takes on a GPU, where its scores are 64 MiB a head."""


def kernel_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, cap: float | None, longest: int
) -> Callable[[Piece, torch.device], KernelCall]:
    """EngineError where no flash kernel of a GPU knows what is asked for, and a row is too long for `Plain`."""
    reason = _against_flash(device, dtype, head_dim, cap)
    if reason is None:
        return Cpu if device.type == "cpu" else Flash
    _say(reason)
    if device.type == "cuda" and longest > _LONGEST:
        raise EngineError(
            f"attention over a row of {longest} tokens: {reason}, and plain products, which could do it, take rows of "
            f"{_LONGEST} tokens at most on a GPU; use model.dtype=bfloat16, another model or shorter rows"
        )
    return partial(Plain, cap=cap)


def _against_flash(device: torch.device, dtype: torch.dtype, head_dim: int, cap: float | None) -> str | None:
    """Why the flash kernels of this device cannot compute it."""
    if cap is not None:
        return f"the model caps attention scores ({cap}), which flash kernels do not"
    if device.type == "cpu":
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256:
        return f"flash kernels take heads of at most 256 numbers, not {head_dim}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"flash kernels need a GPU of the Ampere generation or later, not {torch.cuda.get_device_name(device)}"
    return None


@cache
def _say(reason: str) -> None:
    """Once a process."""
    _LOG.info("attention is computed by plain products: %s", reason)
