"""The shipped test double: the native engine on a Markov chain instead of a network."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from tandem.generation.native import NativeEngine
from tandem.models.attention import ATTENTION


class FakeEngine(NativeEngine):
    """The next token depends on the token before alone, so that a test knows every answer and every log-prob.

    A row of logits with one 0 among -inf scripts what follows; a finite row lets the seed decide.
    """

    def __init__(self, logits: Tensor | list[list[float]], *, max_tokens: int = 4096, tokenizer: Any = None) -> None:
        """`logits[token]` are those of the token after it; `max_tokens`: the longest prompt and response together."""
        chain: Any = _Chain(torch.as_tensor(logits, dtype=torch.float32), max_tokens)
        super().__init__(chain, max_running=256, tokenizer=tokenizer)


class _Chain(torch.nn.Module):
    """What the native engine asks of a model."""

    def __init__(self, logits_VV: Tensor, max_tokens: int) -> None:
        super().__init__()
        self.logits_VV = torch.nn.Parameter(logits_VV)
        settings: dict[str, Any] = {"max_position_embeddings": max_tokens, "attn_implementation": ATTENTION}
        self.config = PreTrainedConfig(**settings, vocab_size=len(logits_VV))  # pyright: ignore[reportCallIssue]
        self.device = logits_VV.device

    def forward(self, token_1N: Tensor, logits_to_keep: int | Tensor, **_: object) -> CausalLMOutput:
        last_1N = token_1N if isinstance(logits_to_keep, int) else token_1N[:, logits_to_keep]
        return CausalLMOutput(logits=self.logits_VV[last_1N])  # type: ignore[arg-type]
