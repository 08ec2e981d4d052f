"""A training engine without a network, for tests: what follows a token depends on that token alone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import EngineError, UserError
from tandem.training.base import LossResult
from tandem.types import MicroBatch, Outputs, TokenLoss


class FakeTrainEngine:
    """A table of logits (a critic's: `values`), one row a preceding token, zero at first; plain gradient descent."""

    def __init__(self, vocabulary: int, lr: float = 0.1, *, values: bool = False) -> None:
        self.table = torch.zeros(vocabulary, 1 if values else vocabulary, requires_grad=True)
        self._values = values
        self._lr = lr

    @torch.no_grad()
    def forward(self, micro_batch: MicroBatch) -> Outputs[torch.Tensor]:
        return self._outputs(micro_batch)

    def forward_backward(self, micro_batch: MicroBatch, loss: TokenLoss[torch.Tensor]) -> LossResult:
        value, metrics = loss(self._outputs(micro_batch), micro_batch.columns.map(torch.from_numpy))
        value.backward()
        return LossResult.of([(value, metrics)], self.forward(micro_batch))

    def optimizer_step(self) -> dict[str, float]:
        gradient = torch.zeros_like(self.table) if self.table.grad is None else self.table.grad
        norm = gradient.norm().item()
        if not np.isfinite(norm):
            raise EngineError(f"gradient norm is {norm} in table")
        self.table.detach().sub_(self._lr * gradient)
        self.table.grad = None
        return {"grad_norm": norm, "lr": self._lr}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "table", self.table.detach()

    def offload(self) -> None:
        """The table is in host memory already."""

    def onload(self) -> None:
        """The table never left."""

    def save(self, directory: Path) -> None:
        for part in ("model", "state"):
            (directory / part).mkdir(exist_ok=True)
            save_file(dict(self.named_weights()), directory / part / "model.safetensors")

    def load(self, directory: Path) -> None:
        path = directory / "state" / "model.safetensors"
        table = load_file(path)["table"]
        if table.shape != self.table.shape:
            raise UserError(f"{path} is not a training state of this model (its table is {list(table.shape)})")
        self.table.detach().copy_(table)

    def _outputs(self, micro_batch: MicroBatch) -> Outputs[torch.Tensor]:
        rows_SV = self.table[torch.from_numpy(micro_batch.token_ids[micro_batch.scored].astype(np.int64))]
        if self._values:
            return Outputs(values_S=rows_SV.squeeze(1))
        choice = torch.distributions.Categorical(logits=rows_SV)
        return Outputs(choice.log_prob(torch.from_numpy(micro_batch.targets)), choice.entropy())
