"""The PyTorch engine: one rank, plain torch, any Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.config.tree import FsdpTrainingConfig, OptimizerConfig
from tandem.training.base import LossResult
from tandem.training.body import check_output_layer, check_packed_hidden_states, packed_hidden_states
from tandem.training.head import Head, ValueHead, VocabularyHead
from tandem.training.optimizer import MasterAdamW
from tandem.types import MicroBatch, Outputs, TokenLoss


class FsdpEngine:
    """A TrainEngine over a model in this process; it trains the model's own parameters, in place.

    Generation may share them: their storage is never replaced while they stay on one device.
    """

    def __init__(self, model: PreTrainedModel, head: Head, optimizer: MasterAdamW | None, checkpointing: bool) -> None:
        self.model = model.eval()
        self._head = head
        self._optimizer = optimizer
        self._checkpointing = checkpointing
        self._home = model.device
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.no_grad():
            check_packed_hidden_states(model)

    @classmethod
    def policy(
        cls,
        model: PreTrainedModel,
        config: FsdpTrainingConfig,
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
        temperature: float = 1.0,
    ) -> FsdpEngine:
        """Log-probs and entropy at `temperature`; without `optimizer` a frozen one, for `forward` only."""
        adamw = _optimizer(model, optimizer, total_steps)
        layer: Any = model.get_output_embeddings()
        head = VocabularyHead(layer, adamw.gradient_of if adamw else _no_gradient, temperature)
        engine = cls(model, head, adamw, config.activation_checkpointing)
        with torch.no_grad():
            check_output_layer(model)
        return engine

    @classmethod
    def critic(
        cls,
        model: PreTrainedModel,
        config: FsdpTrainingConfig,
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
    ) -> FsdpEngine:
        """Values, from a token-classification model with one label."""
        layer = next(module for module in model.children() if isinstance(module, nn.Linear))
        adamw = _optimizer(model, optimizer, total_steps)
        return cls(model, ValueHead(layer), adamw, config.activation_checkpointing)

    @torch.no_grad()
    def forward(self, micro_batch: MicroBatch, *, entropy: bool = False) -> Outputs[torch.Tensor]:
        return self._head.forward(self._hidden(micro_batch), self._targets(micro_batch), entropy)

    def forward_backward(self, micro_batch: MicroBatch, loss: TokenLoss[torch.Tensor]) -> LossResult:
        columns = micro_batch.columns.map(self._tensor)
        if not self._checkpointing:
            return self._head.backward(self._hidden(micro_batch), self._targets(micro_batch), columns, loss)
        self.model.train()  # where transformers checkpoints; every dropout is 0
        try:
            return self._head.backward(self._hidden(micro_batch), self._targets(micro_batch), columns, loss)
        finally:
            self.model.eval()

    def optimizer_step(self) -> dict[str, float]:
        return self._trained.step()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self._home)

    def save(self, directory: Path) -> None:
        self.model.save_pretrained(directory / "model")
        (directory / "state").mkdir(exist_ok=True)
        self._trained.save(directory / "state")

    def load(self, directory: Path) -> None:
        self._trained.load(directory / "state")

    @property
    def _trained(self) -> MasterAdamW:
        assert self._optimizer is not None, "this engine was made without an optimizer: it is frozen"
        return self._optimizer

    def _hidden(self, micro_batch: MicroBatch) -> torch.Tensor:
        """`[S, hidden]`. The last token of a row predicts nothing that is scored, so it does not enter the model."""
        last = micro_batch.offsets[1:] - 1
        offsets = micro_batch.offsets - np.arange(len(micro_batch.offsets))
        hidden = packed_hidden_states(self.model, np.delete(micro_batch.token_ids, last), offsets)
        scored_S = micro_batch.scored - np.searchsorted(last, micro_batch.scored)
        return hidden.index_select(0, self._tensor(scored_S))

    def _targets(self, micro_batch: MicroBatch) -> torch.Tensor:
        return self._tensor(micro_batch.token_ids[micro_batch.scored + 1].astype(np.int64))

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._home)

    def _move(self, device: torch.device) -> None:
        if self._optimizer is not None:
            self._optimizer.move(device)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.to(device)


def _optimizer(model: PreTrainedModel, config: OptimizerConfig | None, total_steps: int) -> MasterAdamW | None:
    if config is None:
        model.requires_grad_(False)
        return None
    return MasterAdamW(model, config, total_steps)


def _no_gradient(parameter: torch.Tensor) -> None:
    return None
