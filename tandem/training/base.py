"""The seam: micro-batches -> log-probs, values, gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tandem.types import MicroBatch, Outputs, TokenLoss


@dataclass(slots=True)
class LossResult:
    """What a forward_backward pass leaves behind; tensors are detached."""

    loss: float
    metrics: dict[str, float]
    outputs: Outputs[torch.Tensor]

    @classmethod
    def of(cls, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor], outputs: Outputs[torch.Tensor]) -> LossResult:
        """What the loss returned, off its graph."""
        columns = (outputs.logprobs_S, outputs.entropy_S, outputs.values_S)
        detached = Outputs(*(None if column is None else column.detach() for column in columns))
        return cls(loss.detach().item(), {name: metric.item() for name, metric in metrics.items()}, detached)


class TrainEngine(Protocol):
    """A model and its optimizer on this rank's share of the devices. It knows tensors, not algorithms.

    Order of calls: any number of `forward`; `forward_backward` once or more, then `optimizer_step`, which consumes
    the gradients. After `offload`, only `onload`, `save` and `named_weights` are legal.
    """

    def forward(self, micro_batch: MicroBatch, *, entropy: bool = False) -> Outputs[torch.Tensor]:
        """Log-probs (and entropy on request) of a policy, or values of a critic, of the scored tokens; no gradient."""
        ...

    def forward_backward(self, micro_batch: MicroBatch, loss: TokenLoss[torch.Tensor]) -> LossResult:
        """Add the gradient of `loss` to the gradients."""
        ...

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, zero the gradients, advance the schedule; returns `grad_norm` (before clipping) and `lr` (used).

        A gradient norm that is not finite raises EngineError before anything is changed.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor), one at a time; the tensors are the engine's own, to be read only."""
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

    def load(self, directory: Path) -> None:
        """Continue exactly where the `save` into `directory` was."""
        ...
