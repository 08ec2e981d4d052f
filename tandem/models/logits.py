"""What models do with the output layer's numbers before they are logits."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Bend:
    """`logits = factor * x`, or `cap * tanh(x / cap)` where there is a cap, of the output layer's numbers x."""

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Bend":
        """As transformers' families name it: Gemma, nanochat and others cap, Cohere multiplies, Granite divides."""
        options = config.get_text_config().to_dict()
        factor = (options.get("logit_scale") or 1.0) / (options.get("logits_scaling") or 1.0)
        return cls(factor, options.get("final_logit_softcapping"))

    def logits_(self, x: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """Logits / temperature in the memory of `x`, and cap's derivative where there is one: float32, shaped as x."""
        if self.cap is None:
            return x.div_(temperature / self.factor), None
        bent = x.div_(self.cap).tanh_()
        slope = bent.square().neg_().add_(1)
        return bent.mul_(self.cap * self.factor / temperature), slope


NO_BEND = Bend()
