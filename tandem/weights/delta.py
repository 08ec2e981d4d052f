"""Messages as what changed since the last ones: exact, at the price of a copy of all of them on either side."""

from typing import Any

import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.weights.shared_memory import fingerprint

_PLACE_BYTES = 4
_CHECKSUM_BYTES = 8


class DeltaCache:
    """One end's copies of the messages that went last, by a key that is the same at both ends. Bytes on the CPU."""

    def __init__(self) -> None:
        self._last: dict[Any, Tensor] = {}

    def encode(self, key: Any, message: Tensor, itemsize: int) -> Tensor:
        """Bytes to send in the place of `message`, uint8 `[bytes]`, of elements of `itemsize` bytes: checksum, places
        and values, or all of it where that is no longer."""
        last = self._last.get(key)
        if last is None:
            self._last[key] = message.clone()
            return message
        now, before = _words(message, itemsize), _words(last, itemsize)
        places = (now != before).nonzero().squeeze(1)
        if _CHECKSUM_BYTES + len(places) * (_PLACE_BYTES + now.itemsize) >= len(message):
            last.copy_(message)
            return message
        before[places] = now[places]
        checksum = torch.tensor([fingerprint(message) - 2**63])
        return torch.cat([part.view(torch.uint8) for part in (checksum, places.to(torch.int32), now[places])])

    def decode(self, key: Any, encoded: Tensor, message: Tensor, itemsize: int) -> None:
        """Fill `message`. EngineError when it comes out as another than went into `encode`."""
        if len(encoded) == len(message):
            message.copy_(encoded)
            self._last[key] = encoded
            return
        last = self._last[key]
        words = _words(last, itemsize)
        count = (len(encoded) - _CHECKSUM_BYTES) // (_PLACE_BYTES + words.itemsize)
        checksum, places, values = encoded.split([_CHECKSUM_BYTES, count * _PLACE_BYTES, count * words.itemsize])
        words[places.view(torch.int32).long()] = values.clone().view(words.dtype)
        if fingerprint(last) - 2**63 != int(checksum.view(torch.int64)):
            raise EngineError("weights, patched with what changed, are not what was sent")
        message.copy_(last)


def _words(message: Tensor, itemsize: int) -> Tensor:
    """NaN differs from itself, 0 is equal to -0: integers have neither."""
    return message.view(torch.int16 if itemsize == 2 else torch.int32)
