"""Models with random weights in the shapes of published ones, batches for them, and what a training step needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tandem.batching.packing import demonstrations_to_batch, token_shares
from tandem.config.training import FsdpTrainingConfig
from tandem.models.attention import ATTENTION
from tandem.models.lean import make_lean
from tandem.planning.fsdp_memory import FsdpSizes, phases
from tandem.planning.model_shape import shape_of
from tandem.training.fsdp import FsdpEngine
from tandem.training.layout import Whole
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, Demonstration, MicroBatch, Outputs, TokenColumns

SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, int]]] = {
    "Qwen2.5-0.5B": (
        Qwen2Config,
        {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
         "intermediate_size": 4864, "vocab_size": 151_936},
    ),
    "Qwen3-0.6B": (
        Qwen3Config,
        {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936},
    ),
    "tiny": (
        Qwen3Config,
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "intermediate_size": 128, "vocab_size": 512},
    ),
}  # fmt: skip


def config_of(shape: str, **more: Any) -> PreTrainedConfig:
    kind, sizes = SHAPES[shape]
    return kind(**{**sizes, "tie_word_embeddings": True, "max_position_embeddings": 131_072, **more})


def model_of(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    make_lean(model)
    return model.eval()


def engine_of(
    model: PreTrainedModel, training: FsdpTrainingConfig, lr: float = 1e-6, layout: Whole | None = None
) -> FsdpEngine:
    return FsdpEngine(model, training, AdamWConfig(lr=lr), total_steps=100, layout=layout)


class PolicyLoss:
    """A policy gradient with an entropy bonus: sum of weight * (-log-prob - 0.01 * entropy)."""

    token_local = True

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.logprobs_S is not None and outputs.entropy_S is not None and columns.loss_weights is not None
        return (columns.loss_weights * (-outputs.logprobs_S - 0.01 * outputs.entropy_S)).sum(), {}


class Imitation:
    """Cross-entropy: sum of weight * -log-prob."""

    token_local = True

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.logprobs_S is not None and columns.loss_weights is not None
        return -(columns.loss_weights * outputs.logprobs_S).sum(), {}


def batch_of(prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray], groups: Sequence[int]) -> Batch:
    """A row for each prompt and its answer, all of whose tokens are learned from alike."""
    rows = [
        Demonstration(0, prompt.astype(np.int32), answer.astype(np.int32), np.ones(len(answer), np.bool_))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    batch = demonstrations_to_batch(rows, np.asarray(groups))
    shares = token_shares(batch.loss_mask)
    batch.tokens = TokenColumns(loss_weights=shares, shares=shares)
    return batch


def skewed_rows(tokens: int, prompt: int, vocabulary: int) -> Batch:
    """`tokens` in all; answers of lognormal length, each with a prompt of its own of `prompt` tokens."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths) - prompt * (len(lengths) + 1)) > 0:
        lengths.append(int(min(left, max(1, random.lognormal(np.log(2 * prompt), 0.7)))))
    prompts = [random.integers(0, vocabulary, prompt) for _ in lengths]
    return batch_of(prompts, [random.integers(0, vocabulary, length) for length in lengths], range(len(lengths)))


def long_row(tokens: int, vocabulary: int, rows: int = 1) -> Batch:
    """Rows of `tokens` tokens each, of which all but the first are learned from."""
    random = np.random.default_rng(0)
    drawn = [random.integers(0, vocabulary, tokens) for _ in range(rows)]
    return batch_of([row[:1] for row in drawn], [row[1:] for row in drawn], range(rows))


def tokens_of(packed: Sequence[MicroBatch]) -> int:
    return sum(len(micro_batch.token_ids) for micro_batch in packed)


def needed_flop(config: PreTrainedConfig, packed: Sequence[MicroBatch]) -> float:
    """Of the matrix products that a step needs, forward once and backward twice: every layer's matrices on every token,
    the output layer's on scored tokens, attention of each token to itself and those before it."""
    shape = shape_of(config.to_dict())
    forward = 0.0
    for micro_batch in packed:
        lengths = np.diff(micro_batch.offsets)
        before = np.zeros_like(lengths)
        for segment, prefix in enumerate(micro_batch.prefixes.tolist()):
            before[segment] = before[prefix] + lengths[prefix] if prefix >= 0 else 0
        seen = float((lengths.astype(float) * (lengths / 2 + before)).sum())
        forward += 2 * shape.all_layers * float(lengths.sum()) + 2 * shape.embedding * len(micro_batch.targets)
        forward += 4 * shape.layers * shape.attention.query * seen
    return 3 * forward


def planned_gib(config: PreTrainedConfig, packed: Sequence[MicroBatch], training: FsdpTrainingConfig) -> float:
    """What `tandem plan` says that a GPU holds at most in a step on these micro-batches, context and gaps aside."""
    largest = max(packed, key=lambda micro_batch: len(micro_batch.token_ids))
    sizes = FsdpSizes(
        shape_of(config.to_dict()),
        tokens=len(largest.token_ids),
        scored=len(largest.targets),
        shared_prompts=bool((largest.prefixes >= 0).any()),
        optimizer=AdamWConfig(),
        checkpointing=bool(training.activation_checkpointing),
        keeps_attention=training.activation_checkpointing == "selective",
    )
    return max(memory.total for phase, memory in phases(sizes).items() if phase != "publish") / 2**30
