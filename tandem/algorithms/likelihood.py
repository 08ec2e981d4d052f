"""Maximum likelihood: the loss of supervised fine-tuning."""

from __future__ import annotations

import torch

from tandem.types import Outputs, TokenColumns


class NextTokenLoss:
    """sum(weights * -log p(token)); with `weights` = 1 / N the mean cross-entropy of N tokens, nats."""

    token_local = True
    entropy_gradient = False

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.logprobs_S is not None and columns.weights is not None
        loss = -(columns.weights * outputs.logprobs_S).sum()
        return loss, {"sft/loss": loss.detach()}
