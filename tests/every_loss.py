"""Every policy loss, and a batch that has the columns any of them reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import TypeAdapter

from tandem.algorithms import make_algorithm
from tandem.config.algorithms import BUILTIN, AlgorithmConfig, LossConfig
from tandem.types import Batch, TokenLoss

MAX_RESPONSE_TOKENS, KL_COEFFICIENT = 16, 0.2


def every_loss() -> dict[str, TokenLoss[Any]]:
    """By `algorithm.loss.type`, each with an entropy bonus and KL to a reference."""
    losses: dict[str, TokenLoss[Any]] = {}
    for name in BUILTIN.sections(LossConfig):
        settings = {
            "type": "grpo",
            "minibatches": 2,
            "loss": {"type": name},
            "entropy_coefficient": 0.1,
            "kl": {"place": "loss", "estimator": "k3", "coefficient": KL_COEFFICIENT},
        }
        config = TypeAdapter[Any](AlgorithmConfig).validate_python(settings)
        losses[name] = make_algorithm(config, MAX_RESPONSE_TOKENS).loss
    return losses


def fill_columns(batch: Batch) -> Batch:
    """Fill what any policy loss reads; the advantages are one a row, and the old policy is near a fresh one."""
    random, tokens = np.random.default_rng(1), len(batch.response_ids)

    def logprobs() -> Any:
        return (-3 + 0.1 * random.standard_normal(tokens)).astype(np.float32)

    columns = batch.tokens
    columns.old_logprobs, columns.rollout_logprobs, columns.ref_logprobs = logprobs(), logprobs(), logprobs()
    columns.advantages = random.standard_normal(len(batch)).astype(np.float32)[batch.row_of_token]
    columns.importance_weights = random.uniform(0.5, 1.5, tokens).astype(np.float32)
    columns.selected = random.random(tokens) < 0.3
    return batch
