"""What is alive on a device, by who made it, while code runs on fake or real tensors."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Site = tuple[str, str]
"""Cause (a field of `planning.fsdp_memory.Memory`), and the line that made it: `training/head.py:55 forward`."""
_FSDP = "/torch/distributed/fsdp/"
_HEADS = ("training/head.py", "training/tiled_head.py")
_LARGE = 2**20
"""Bytes of a tensor whose site counts how many there are."""


@dataclass(slots=True)
class Peak:
    """The moment of a phase at which the most was alive."""

    total: int = 0
    by_site: Counter[Site] = field(default_factory=Counter)
    most_alive: Counter[Site] = field(default_factory=Counter)
    """By site: how many storages that it made were alive at once, in the phase."""

    def by_cause(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for (cause, _), size in self.by_site.items():
            totals[cause] += size
        return dict(totals)


class Ledger(TorchDispatchMode):
    """Counts storages from the operation that makes them to their end.

    On fake tensors nothing has a value: what Python asks a tensor for is answered by 1.0, True or 0.
    """

    def __init__(self, device: str, fake: bool = True) -> None:
        super().__init__()
        self._device = device
        self._fake = fake
        self._known: dict[int, tuple[int, Site, Any]] = {}
        self._live: Counter[Site] = Counter()
        self._alive: Counter[Site] = Counter()
        self._now = 0
        self._peak = Peak()
        self._of_parameters: set[tuple[int, ...]] = set()
        self.operations: Counter[str] = Counter()

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return self._now

    def phase(self, run: Callable[[], object]) -> Peak:
        """The peak while `run` runs."""
        self._peak = Peak(self._now, Counter(self._live), Counter(self._alive))
        run()
        return self._peak

    def enter(self, tensors: Iterable[torch.Tensor], cause: str) -> None:
        """Tensors that were made before the ledger looked, or whose cause is known better."""
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            if storage._cdata in self._known:
                size, site, reference = self._known[storage._cdata]
                self._change(site, -size, -1)
                self._known[storage._cdata] = (size, (cause, ""), reference)
                self._change((cause, ""), size, 1)
            else:
                self._add(tensor, (cause, ""))

    def expect_gradients_of(self, parameters: Iterable[torch.Tensor]) -> None:
        """What has the shape of one of these, and is made by a backward pass, is its gradient."""
        self._of_parameters |= {tuple(parameter.shape) for parameter in parameters if parameter.ndim > 1}

    def __enter__(self) -> Any:
        real, ledger = torch.UntypedStorage.resize_, self
        self._resize = real

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            changed = real(storage, size)
            ledger._resized(storage)
            return changed

        setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010 - FSDP frees and takes memory by it
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[str(func)] += 1
        if self._fake and func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self._add(result)
        return results

    def _add(self, tensor: torch.Tensor, site: Site | None = None) -> None:
        tensor = _local(tensor)
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        site = site or _site(sys._getframe(2), tuple(tensor.shape) in self._of_parameters)
        ending = weakref.ref(storage, lambda _: self._ended(key))
        self._known[key] = (size, site, ending)
        self._change(site, size, 1)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            size, site, reference = self._known[storage._cdata]
            self._known[storage._cdata] = (storage.nbytes(), site, reference)
            self._change(site, storage.nbytes() - size, 0)

    def _ended(self, key: int) -> None:
        size, site, _ = self._known.pop(key)
        self._change(site, -size, -1)

    def _change(self, site: Site, size: int, count: int) -> None:
        self._now += size
        self._live[site] += size
        if abs(size) >= _LARGE:
            self._alive[site] += count
            self._peak.most_alive[site] = max(self._peak.most_alive[site], self._alive[site])
        if self._now > self._peak.total:
            self._peak.total, self._peak.by_site = self._now, Counter(self._live)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _site(frame: FrameType | None, like_a_parameter: bool) -> Site:
    """Of the innermost frame that is Tandem's, transformers' or FSDP's."""
    node = torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]
    backward = node is not None
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if _FSDP in path and name != "allocate":
            return _of_fsdp(name), f"fsdp {name}"
        _, here, file = path.rpartition("/tandem/")
        if here and not file.startswith("planning/"):
            place = f"{file}:{frame.f_lineno} {name}"
            if like_a_parameter and (backward or file in _HEADS):
                return "gradients", place
            return _of_tandem(file, name), place
        if "/transformers/" in path:
            break
        frame = frame.f_back
    if backward and like_a_parameter:
        return "gradients", node.name()
    if frame is None:
        return "activations", node.name() if backward else "?"
    return "activations", f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"


def _of_fsdp(name: str) -> str:
    gradients = (
        "foreach_reduce",
        "reduce_scatter",
        "to_accumulated_grad",
        "accumulate_unsharded_grad",
        "post_backward",
    )
    return "gradients" if any(part in name for part in gradients) else "gathered"


def _of_tandem(file: str, name: str) -> str:
    if file == "training/optimizer.py":
        return "gradients" if name in ("step", "_publish") else "optimizer"
    if file.startswith("training/optimizers/steps/"):
        return "optimizer" if name in ("__init__", "_scales") else "buffers"
    if file == "training/layout.py":
        return "gradients" if name == "_reduce" else "gathered"
    if file in _HEADS:
        return "logits"
    return "buffers" if file in ("models/lora.py",) else "activations"
