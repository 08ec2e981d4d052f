"""The seam: trained weights -> the weights that an engine in other processes serves."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor  # which a replica's process is free to do without

Weights = Iterable[tuple[str, "Tensor"]]
"""(Hugging Face name, full tensor), one at a time; each is to be used before the next one is asked for."""


@dataclass(frozen=True, slots=True)
class BucketHalf:
    """Tensors that lie in memory which sender and engine share; the engine copies them before it answers."""

    memory: Any
    """What `weights.shared_memory.attach` takes."""
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    """Name, dtype, shape, first byte."""
    checksums: tuple[int, ...] = ()
    """One for each tensor, where they are to be compared."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory of safetensors with all weights."""

    path: Path


@dataclass(frozen=True, slots=True)
class Commit:
    """The last part: all weights are there, serve them as `version`, and forget what older ones left in caches."""

    version: int


Part = BucketHalf | Directory | Commit
Deliver = Callable[[Part], Callable[[], None]]
"""Sends a part to every engine; the function that it returns waits until all have taken it."""


class WeightSync(Protocol):
    """A way from a stream of weights into engines."""

    def publish(self, version: int, weights: Weights | None, deliver: Deliver) -> None:
        """The engines serve `weights` as `version`; None: those that they have. Returns when all of them do."""
        ...

    def repeat(self, version: int, deliver: Deliver) -> bool:
        """Publish the last weights again, to engines that were started since; False: they are kept nowhere."""
        ...

    def close(self) -> None:
        """Free what it holds between publishes."""
        ...
