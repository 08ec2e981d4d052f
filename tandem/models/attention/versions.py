"""Which FlashAttention torch's flash operators are on a GPU: the one that comes with torch, or a later one."""

import logging
from typing import Literal, NamedTuple

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

from tandem.errors import UserError

Version = Literal["auto", "fa2", "fa3", "fa4"]
_LOG = logging.getLogger(__name__)


class _Later(NamedTuple):
    name: str
    """Torch's."""
    package: str
    capabilities: tuple[int, ...]
    """Major ones of the GPUs that it runs on."""


_LATER: dict[str, _Later] = {
    "fa3": _Later("FA3", "flash-attn-3 (the module flash_attn_interface)", (9,)),
    "fa4": _Later("FA4", "flash-attn-4 (the module flash_attn.cute)", (9, 10)),
}
_OF_ITSELF = {9: "fa3", 10: "fa4"}
"""What `auto` takes on which GPUs, where it is installed."""


def choose_version(wanted: Version, device: torch.device) -> None:
    """Make it what this process computes attention with. UserError where it is not there."""
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    activate_version(wanted, capability)


def activate_version(wanted: Version, capability: int | None) -> None:
    """`capability`: the major one of the GPU, None where there is none."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    name = _OF_ITSELF.get(capability or 0, "fa2") if wanted == "auto" else wanted
    if name == "fa2":
        return
    later = _LATER[name]
    refused = _activated(later) if capability in later.capabilities else _wrong_device(later, capability)
    if refused is None:
        _LOG.info("attention is computed by %s", later.name)
    elif wanted == "auto":
        _LOG.info("attention is computed by FA2: %s", refused)
    else:
        raise UserError(f"training.attention: {wanted}, but {refused}; take auto, or fa2, which torch has")


def _activated(later: _Later) -> str | None:
    """Why it could not be."""
    try:
        activate_flash_attention_impl(later.name)
    except (ImportError, RuntimeError) as error:
        return f"{later.package} is not installed as torch wants it ({error})"
    return None


def _wrong_device(later: _Later, capability: int | None) -> str:
    found = "there is none" if capability is None else f"this one's is {capability}"
    wanted = " or ".join(map(str, later.capabilities))
    return f"{later.name} runs on GPUs of compute capability {wanted}, and {found}"
