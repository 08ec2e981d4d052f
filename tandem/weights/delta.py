"""Weights as what changed since they were sent last: exact, at the price of a copy of all of them on either side."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.weights.shared_memory import fingerprint

_PLACES, _VALUES, _CHECKSUM = ":places", ":values", ":checksum"
_PLACE_BYTES = 4


def encode(weights: Iterable[tuple[str, Tensor]], sent: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as three (places, values, checksum), or whole where that is shorter. `sent` holds what the other side
    has, and is brought up to date."""
    for name, tensor in weights:
        now = tensor.detach().cpu().contiguous().view(-1)
        before = sent.get(name)
        places = None if before is None else (_bits(now) != _bits(before)).nonzero().squeeze(1)
        if before is None or places is None or len(places) * (_PLACE_BYTES + now.itemsize) >= now.nbytes:
            sent[name] = now.clone()
            yield name, tensor
            continue
        before[places] = now[places]
        yield name + _PLACES, places.to(torch.int32)
        yield name + _VALUES, now[places]
        yield name + _CHECKSUM, torch.tensor([fingerprint(now) - 2**63])


def decode(stream: Iterable[tuple[str, Tensor]], held: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that went into `encode`; `held` keeps them. EngineError when one comes out as another."""
    places = torch.zeros(0, dtype=torch.int32)
    for key, tensor in stream:
        name, _, part = key.partition(":")
        if not part:
            held[name] = tensor
        elif key.endswith(_PLACES):
            places = tensor
            continue
        elif key.endswith(_VALUES):
            held[name].view(-1)[places.long()] = tensor
            continue
        elif fingerprint(held[name]) - 2**63 != int(tensor):
            raise EngineError(f"weight {name}, patched with what changed, is not what was sent")
        yield name, held[name]


def _bits(tensor: Tensor) -> Tensor:
    """NaN differs from itself, 0 is equal to -0: integers have neither."""
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
