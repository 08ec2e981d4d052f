"""The shipped test double: the fsdp engine on a model without layers, so that a test knows what depends on what."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from tandem.config.training import FsdpTrainingConfig
from tandem.training.fsdp import FsdpEngine
from tandem.training.optimizers.adamw import AdamWConfig


class FakeTrainEngine(FsdpEngine):
    """What follows a token (a critic's: its value) depends on that token alone; the same numbers every time."""

    def __init__(self, vocabulary: int, *, values: bool = False) -> None:
        config = Qwen2Config(vocab_size=vocabulary, hidden_size=16, num_hidden_layers=0, num_attention_heads=1)
        config.num_labels = 1
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Qwen2ForTokenClassification(config) if values else Qwen2ForCausalLM(config)
        super().__init__(model, FsdpTrainingConfig(), AdamWConfig(lr=0.01))
