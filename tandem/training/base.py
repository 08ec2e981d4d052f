"""The seam: micro-batches -> log-probs, values, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tandem.types import MicroBatch, TokenColumns


@dataclass(slots=True)
class Outputs:
    """What the model says of the scored tokens; `_S` as in MicroBatch. What was not asked for is None."""

    logprobs_S: torch.Tensor | None = None
    """float32: log softmax(logits / temperature) at the token that was chosen."""
    entropy_S: torch.Tensor | None = None
    """float32: entropy of softmax(logits / temperature), nats."""
    values_S: torch.Tensor | None = None
    """float32: the value head."""

    def slice(self, start: int, stop: int) -> Outputs:
        def cut(column: torch.Tensor | None) -> torch.Tensor | None:
            return None if column is None else column[start:stop]

        return Outputs(cut(self.logprobs_S), cut(self.entropy_S), cut(self.values_S))


class TokenLoss(Protocol):
    """A loss that is a sum over tokens: (outputs, columns) of some scored tokens -> (their loss, their metrics).

    Called on whole micro-batches, and where `token_local` is True on any slice of one: a token's term may then depend
    on that token's outputs and columns alone. Loss and metrics of all slices are summed.
    """

    token_local: bool
    needs_entropy: bool

    def __call__(
        self, outputs: Outputs, columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


@dataclass(slots=True)
class LossResult:
    """What a forward_backward pass leaves behind; tensors are detached."""

    loss: float
    metrics: dict[str, float]
    outputs: Outputs


class TrainEngine(Protocol):
    """A model and its optimizer on this rank's share of the devices. It knows tensors, not algorithms.

    Order of calls: any number of `forward`; `forward_backward` once or more, then `optimizer_step`, which consumes
    the gradients. After `offload`, only `onload`, `save` and `named_weights` are legal.
    """

    def forward(self, micro_batch: MicroBatch, *, entropy: bool = False) -> Outputs:
        """Log-probs (and entropy on request) of a policy, or values of a critic, of the scored tokens; no gradient."""
        ...

    def forward_backward(self, micro_batch: MicroBatch, loss: TokenLoss) -> LossResult:
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
