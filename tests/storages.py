"""The memory of tensors, seen by torch's dispatcher: counted, not measured, on every device, the meta device too."""

from typing import Any
from weakref import finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """The bytes of every tensor that is made in it; a number that is asked for is 0 on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        """Of tensors that are still there."""
        self.largest = self.most = 0
        """One tensor, and all together."""
        self._known: dict[int, object] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0.0
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and not _shares_memory(tensor, args):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        size, number = storage.nbytes(), id(storage)
        if number in self._known:
            return
        self._known[number] = finalize(storage, self._forget, number, size)
        self.held += size
        self.largest, self.most = max(self.largest, size), max(self.most, self.held)

    def _forget(self, number: int, size: int) -> None:
        del self._known[number]
        self.held -= size


def _shares_memory(tensor: torch.Tensor, inputs: Any) -> bool:
    known = [x for x in inputs if isinstance(x, torch.Tensor)]
    return any(x.untyped_storage()._cdata == tensor.untyped_storage()._cdata for x in known)
