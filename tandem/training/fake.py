"""A training engine without a network, for tests: what follows a token depends on that token alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import EngineError, UserError
from tandem.training.base import LossResult
from tandem.types import MicroBatch, Outputs, TokenLoss


class FakeTrainEngine:
    """A table of logits (or values), one row a preceding token, trained by plain gradient descent."""

    def __init__(self, vocabulary: int, lr: float = 0.1, *, values: bool = False, temperature: float = 1.0) -> None:
        """`values`: be a critic. The table starts at zero: every token equally likely, every value 0."""
        self.table = torch.zeros(vocabulary, 1 if values else vocabulary, requires_grad=True)
        self._values = values
        self._lr = lr
        self._temperature = temperature

    @torch.no_grad()
    def forward(self, micro_batch: MicroBatch, *, entropy: bool = False) -> Outputs[torch.Tensor]:
        outputs = self._outputs(micro_batch)
        return outputs if entropy else Outputs(outputs.logprobs_S, None, outputs.values_S)

    def forward_backward(self, micro_batch: MicroBatch, loss: TokenLoss[torch.Tensor]) -> LossResult:
        outputs = self._outputs(micro_batch)
        value, metrics = loss(outputs, micro_batch.columns.map(torch.from_numpy))
        value.backward()
        return LossResult.of(value, metrics, outputs)

    def optimizer_step(self) -> dict[str, float]:
        gradient = torch.zeros_like(self.table) if self.table.grad is None else self.table.grad
        norm = gradient.norm().item()
        if not np.isfinite(norm):
            raise EngineError(f"gradient norm is {norm} in table")
        with torch.no_grad():
            self.table.sub_(self._lr * gradient)
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
            save_file({"table": self.table.detach()}, directory / part / "model.safetensors")
        (directory / "model" / "config.json").write_text(json.dumps({"model_type": "tandem-fake"}), encoding="utf-8")

    def load(self, directory: Path) -> None:
        table = load_file(directory / "state" / "model.safetensors")["table"]
        if table.shape != self.table.shape:
            raise UserError(f"{directory}: table is {list(table.shape)} there and {list(self.table.shape)} here")
        with torch.no_grad():
            self.table.copy_(table)

    def _outputs(self, micro_batch: MicroBatch) -> Outputs[torch.Tensor]:
        rows_SV = self.table[torch.from_numpy(micro_batch.token_ids[micro_batch.scored].astype(np.int64))]
        if self._values:
            return Outputs(values_S=rows_SV.squeeze(1))
        targets_S = torch.from_numpy(micro_batch.token_ids[micro_batch.scored + 1].astype(np.int64))
        logprobs_SV = torch.log_softmax(rows_SV / self._temperature, -1)
        entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
        return Outputs(logprobs_SV.gather(1, targets_S[:, None]).squeeze(1), entropy_S)
