"""`trainer.max_staleness`: the bound that holds on every trained token, and what a batch of mixed versions tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.tree import SftConfig, TrainConfig
from tandem.controller.dataflow import describe_batch
from tandem.types import Batch
from tests.cluster_workers import ragged_batch


def settings(max_staleness: int, **algorithm: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": Path("m")},
            "data": {"prompts_per_step": 4},
            "algorithm": {"type": "grpo", "group_size": 2, **algorithm},
            "trainer": {"run_dir": "r", "steps": 1, "max_staleness": max_staleness},
        }
    )


def mixed_batch() -> Batch:
    """Rows of versions 4 4 | 2 3 4 | 3 | 4 4 4 4."""
    batch = ragged_batch([2, 3, 1, 4])
    batch.versions = np.array([4, 4, 2, 3, 4, 3, 4, 4, 4, 4], np.int32)
    return batch


def test_no_trained_token_is_staler_than_the_bound() -> None:
    batch = mixed_batch()
    assert describe_batch(batch, settings(2), version=4)["rollout/staleness/mean"] == pytest.approx(0.4)
    with pytest.raises(AssertionError) as raised:
        describe_batch(batch, settings(1), version=4)
    message = "step 5, row 1: a token of version 2 is trained on version 4, with trainer.max_staleness: 1"
    assert str(raised.value) == message
    batch.loss_mask[2] = False  # it is not trained on
    describe_batch(batch, settings(1), version=4)


def test_no_trained_token_is_of_weights_to_come() -> None:
    with pytest.raises(AssertionError, match="step 4, row 0: a token of version 4 is trained on version 3"):
        describe_batch(mixed_batch(), settings(7), version=3)


def test_what_generates_nothing_has_no_staleness() -> None:
    tree = {"model": {"path": "m"}, "data": {"train_files": ["a.parquet"]}}
    with pytest.raises(ValueError, match="max_staleness: 1, but this command generates no answers"):
        SftConfig.model_validate({**tree, "trainer": {"run_dir": "r", "steps": 1, "max_staleness": 1}})
