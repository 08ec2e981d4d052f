"""What the ratio of the loss is to, and which pass tells the trainer's log-probs: a row a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.algorithms import make_algorithm
from tandem.config.ratio import Anchor, RatioPlan, TrainerPass
from tandem.config.tree import TrainConfig
from tandem.controller.learning import placed_step
from tests.cluster_workers import ragged_batch

ENGINE = RatioPlan(Anchor.ENGINE, TrainerPass.FIRST_STEP)
ENGINE_ALONE = RatioPlan(Anchor.ENGINE, TrainerPass.NONE)
TRAINER = RatioPlan(Anchor.TRAINER, TrainerPass.BEFORE_UPDATE)
OWN_PASS = RatioPlan(Anchor.OWN_PASS, TrainerPass.FIRST_STEP)
SKIPS, COMPUTES = ({"rollout_correction": {"skip_old_logprobs": skips}} for skips in (True, False))
TRUNCATES = {"rollout_correction": {"type": "truncate"}}
FIRST_WARMS_UP = {"type": "ppo", "critic_warmup_steps": 1}

PLANS: list[tuple[int, dict[str, Any], RatioPlan]] = [
    (0, {}, OWN_PASS),
    (0, {"kl": {"place": "loss"}}, OWN_PASS),
    (0, {"type": "ppo"}, OWN_PASS),
    (0, {"minibatches": 2}, TRAINER),
    (0, {"epochs": 2}, TRAINER),
    (0, {"kl": {"place": "reward"}}, TRAINER),
    (0, {"minibatches": 2, "loss": {"type": "kl_cov"}}, TRAINER),
    (0, {"loss": {"type": "clip_cov"}}, TRAINER),
    (0, {"type": "otb"}, TRAINER),
    (0, {"type": "on_policy_distillation"}, TRAINER),
    (0, {"type": "on_policy_distillation", "top_k": 2}, OWN_PASS),
    (0, TRUNCATES, TRAINER),
    (0, SKIPS, ENGINE),
    (0, {"minibatches": 2, **SKIPS}, ENGINE),
    (0, {"kl": {"place": "reward"}, **SKIPS}, ENGINE),
    (0, FIRST_WARMS_UP, TRAINER),
    (0, {**FIRST_WARMS_UP, **SKIPS}, ENGINE_ALONE),
    (1, {}, ENGINE),
    (1, FIRST_WARMS_UP, ENGINE_ALONE),
    (4, {"minibatches": 2}, ENGINE),
    (4, {"type": "ppo", "kl": {"place": "reward"}}, ENGINE),
    (4, TRUNCATES, TRAINER),
    (4, {"rollout_correction": {"type": "mask", "skip_old_logprobs": False}}, TRAINER),
    (4, {"type": "dppo"}, ENGINE),
    (4, {"type": "dppo", **COMPUTES}, TRAINER),
    (4, {"type": "otb", **TRUNCATES}, TRAINER),
]


@pytest.mark.parametrize(("max_staleness", "algorithm", "plan"), PLANS)
def test_the_first_step_of_a_configuration_has_this_plan(
    max_staleness: int, algorithm: dict[str, Any], plan: RatioPlan
) -> None:
    learns_from_teacher = algorithm.get("type") == "on_policy_distillation"
    config = TrainConfig.model_validate(
        {
            "model": {"path": Path("m")} | ({"teacher_path": Path("t")} if learns_from_teacher else {}),
            "data": {"prompts_per_step": 4},
            "algorithm": {"type": "grpo", "group_size": 2, **algorithm},
            "trainer": {"run_dir": "r", "steps": 2, "max_staleness": max_staleness},
        }
    )
    batch = ragged_batch([2, 3, 1, 4])
    batch.tokens.rollout_logprobs = np.full(len(batch.response_ids), -1, np.float32)
    with placed_step(batch, make_algorithm(config.algorithm, 8), config, 1) as placed:
        assert placed.ratio_plan == plan
