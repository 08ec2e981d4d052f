"""The loss of supervised fine-tuning."""

from torch import Tensor

from tandem.types import Outputs, TokenColumns


class NextTokenLoss:
    """Maximum likelihood, the loss of supervised fine-tuning: term = -log p(token), nats."""

    token_local = True

    def __call__(self, outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.logprobs_S is not None and columns.loss_weights is not None
        loss = -(columns.loss_weights * outputs.logprobs_S).sum()
        return loss, {"sft/loss": loss.detach()}
