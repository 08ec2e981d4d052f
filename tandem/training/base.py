"""The seam: micro-batches -> log-probs, values, gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from torch import Tensor

from tandem.types import MicroBatch, Outputs, TokenLoss


@dataclass(frozen=True, slots=True)
class LossResult:
    """What a forward_backward pass leaves behind; tensors are detached."""

    loss: float
    """Summed, as are the metrics, over all micro-batches of all ranks."""
    metrics: dict[str, float]
    outputs: list[Outputs[Tensor]]
    """One for each of this rank's micro-batches."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, dict[str, Tensor]]], outputs: Outputs[Tensor]) -> Self:
        """The sum of what the loss returned for each part of one micro-batch."""
        loss, metrics = sum_parts([(value.item(), {k: x.item() for k, x in part.items()}) for value, part in parts])
        return cls(loss, metrics, [outputs])


def sum_parts(parts: Sequence[tuple[float, dict[str, float]]]) -> tuple[float, dict[str, float]]:
    """Losses and metrics, summed; a part without a metric counts as 0 there."""
    names = dict.fromkeys(name for _, metrics in parts for name in metrics)
    return sum(loss for loss, _ in parts), {name: sum(m.get(name, 0.0) for _, m in parts) for name in names}


class TrainEngine(Protocol):
    """A model and its optimizer on this rank's share of the devices. It knows tensors, not algorithms.

    All ranks of the model call the same verbs in the same order. A pass takes all of a rank's micro-batches at once;
    their number may differ between ranks and be 0, and changes neither losses, metrics nor gradients.

    Order of calls: any number of `forward`; `forward_backward` once or more, then `optimizer_step`, which consumes
    the gradients. After `offload`, only `onload`, `save` and `named_weights` are legal.
    """

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs[Tensor]]:
        """Log-probs and entropy of a policy, or values of a critic, of each's scored tokens; no gradient."""
        ...

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: TokenLoss[Tensor]) -> LossResult:
        """Add the gradient of `loss`, summed over all micro-batches of all ranks, to the gradients."""
        ...

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, zero the gradients, advance the schedule; returns `grad_norm` (before clipping), `lr` (used) and
        what else an engine measures.

        A gradient norm that is not finite raises EngineError before anything is changed.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor), one at a time, to be read only; with adapters what they can change."""
        ...

    def offload(self) -> None:
        """Move parameters and optimizer to host memory. Safe to repeat."""
        ...

    def onload(self) -> None:
        """Undo `offload`. Safe to repeat."""
        ...

    def save(self, directory: Path) -> None:
        """Write `model/` (a Hugging Face directory) and `state/` (what `load` needs) into an existing directory."""
        ...

    def load(self, directory: Path, new_schedule: bool = False) -> None:
        """Continue exactly where the `save` into `directory` was; UserError when that was of another model.

        With `new_schedule` only the learning-rate schedule is at its beginning.
        """
        ...
