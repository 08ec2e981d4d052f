"""The seam: micro-batches -> log-probs, values, gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from tandem.regions import Shard
from tandem.types import MicroBatch, Outputs, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.models.storage import TensorFile


@dataclass(frozen=True, slots=True)
class TopTokens:
    """How many of the most probable tokens a frozen policy tells at each position."""

    count: int
    vocabulary: int
    """Of the token ids below this one: a model may have rows for more than its tokenizer has tokens."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """What one micro-batch leaves behind, detached and on the device: nothing has waited for it."""

    parts: Sequence[tuple[Tensor, dict[str, Tensor]]]
    """What the loss returned for each part of the micro-batch."""
    outputs: Outputs[Tensor]

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, dict[str, Tensor]]], outputs: Outputs[Tensor]) -> Self:
        """Of what the loss returned, graphs and all."""
        return cls([(loss.detach(), {name: x.detach() for name, x in part.items()}) for loss, part in parts], outputs)


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a forward_backward pass leaves behind; tensors are detached."""

    loss: float
    """Summed, as are the metrics, over all micro-batches of all ranks."""
    metrics: dict[str, float]
    outputs: list[Outputs[Tensor]]
    """One for each of this rank's micro-batches."""


def sum_results(results: Sequence[LossResult]) -> tuple[float, dict[str, float]]:
    """Losses and metrics of a pass, summed; the device is waited for once."""
    scalars = [x for result in results for loss, metrics in result.parts for x in (loss, *metrics.values())]
    import torch

    numbers: Iterator[float] = iter(torch.stack(scalars).tolist() if scalars else ())
    return sum_parts(
        [
            sum_parts([(next(numbers), {name: next(numbers) for name in metrics}) for _, metrics in result.parts])
            for result in results
        ]
    )


def sum_parts(parts: Sequence[tuple[float, dict[str, float]]]) -> tuple[float, dict[str, float]]:
    """Losses and metrics, summed; a part without a metric counts as 0 there."""
    names = dict.fromkeys(name for _, metrics in parts for name in metrics)
    return sum(loss for loss, _ in parts), {name: sum(m.get(name, 0.0) for _, m in parts) for name in names}


class TrainEngine(Protocol):
    """A model and its optimizer on this rank's share of the devices. It knows tensors, not algorithms.

    All ranks of the model call the same verbs in the same order. A pass takes all of a rank's micro-batches at once;
    their number may differ between ranks and be 0, and changes neither losses, metrics nor gradients.

    Order of calls: any number of `forward`; `forward_backward` once or more, then `optimizer_step`, which consumes
    the gradients. After `offload`, only `onload`, `save`, `named_weights` and `shards` are legal
    (FSDP: `approach` as well).
    """

    def forward(self, micro_batches: Sequence[MicroBatch], adapted: bool = True) -> list[Outputs[Tensor]]:
        """Log-probs and entropy of a policy, or values of a critic, of each's predicted tokens; no gradient.

        Unless `adapted`, of a model without the adapters that it has.
        """
        ...

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: TokenLoss[Tensor]) -> PassResult:
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

    def shards(self) -> AbstractContextManager[Sequence[Shard[Tensor]]]:
        """The same weights as parts: those that this rank holds, of all ranks' each element at least once, and not in
        two different regions. They are gathered from no other rank, but for adapters, and can be read within."""
        ...

    def offload(self) -> None:
        """Move parameters and optimizer to host memory. Safe to repeat."""
        ...

    def onload(self) -> None:
        """Undo `offload`. Safe to repeat."""
        ...

    def save(self, directory: Path) -> list[TensorFile]:
        """Begin `model/` (a Hugging Face directory) and `state/` (what `load` needs) in an existing directory.

        Small files are written at once. The files that are returned, of this rank's share, are for the caller to write,
        in any thread: what they hold is a copy in host memory, which stays as it is until the next `save`.
        """
        ...

    def load(self, directory: Path, new_schedule: bool = False) -> None:
        """Continue exactly where the `save` into `directory` was; UserError when that was of another model.

        With `new_schedule` only the learning-rate schedule is at its beginning.
        """
        ...
