"""Losses against values that verl's own functions gave on the same numbers (`core_algos.py` of 22 August 2026).

Each was called with `token-mean`, `seq-mean-token-mean` and `seq-mean-token-sum` as its mode of aggregation: GSPO, SAPO
and GMPO gave one value for all three, for they have an aggregation of their own.
"""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter

from tandem.algorithms import make_algorithm
from tandem.config.algorithms import AlgorithmConfig
from tandem.types import Outputs, TokenColumns

OLD = [[-0.5, -1.0, -0.2, -1.5], [-0.7, -0.3], [-1.2]]
RATIOS = [[1.1, 0.8, 1.3, 0.95], [0.9, 1.25], [1.04]]
IMPORTANCE = [[0.5, 1.5, 2.0, 0.9], [1.2, 0.6], [0.7]]
ADVANTAGES = [[1.0] * 4, [-1.0] * 2, [0.5]]
RANGE = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
LOSSES = {
    "gspo": {"type": "gspo", **RANGE},
    "sapo": {"type": "sapo"},
    "gmpo": {"type": "gmpo", "clip_log_ratio": 0.05},
    "clip": {"type": "clip", **RANGE, "dual_clip": 3.0},
    "clip by sequence": {"type": "clip", **RANGE, "aggregation": "sequence_mean_token_mean"},
    "clip, summed": {"type": "clip", **RANGE, "aggregation": "sequence_mean_token_sum"},
}


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row]).double()


def loss_of(settings: dict[str, object], importance: torch.Tensor | None = None) -> float:
    config = TypeAdapter(AlgorithmConfig).validate_python({"type": "grpo", "loss": settings})
    algorithm = make_algorithm(config, 4)
    rows = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    weights = algorithm.weights(torch.ones(7, dtype=torch.bool), rows).double()
    columns = TokenColumns(
        old_logprobs=flat(OLD), advantages=flat(ADVANTAGES), loss_weights=weights, shares=weights, trajectories=rows
    )
    columns.importance_weights = importance
    return algorithm.loss(Outputs(flat(OLD) + flat(RATIOS).log(), torch.zeros(7)), columns)[0].item()


@pytest.mark.parametrize(
    ("name", "plain", "corrected"),
    [
        ("gspo", -0.1601224141, -0.2200547947),
        ("sapo", -0.3593308987, -0.5034869772),
        ("gmpo", -0.1289661152, -0.1568851235),
        ("clip", -0.3099999973, -0.4505714128),
        ("clip by sequence", -0.1274999929, -0.1963333124),
        ("clip, summed", -0.7233333270, -1.0513332966),
    ],
)
def test_values_of_verl(name: str, plain: float, corrected: float) -> None:
    """Without and with importance weights of a rollout correction."""
    assert loss_of(LOSSES[name]) == pytest.approx(plain, rel=1e-6)
    assert loss_of(LOSSES[name], flat(IMPORTANCE)) == pytest.approx(corrected, rel=1e-6)


@pytest.mark.parametrize("name", ["gspo", "sapo", "gmpo"])
def test_here_the_aggregation_may_be_changed(name: str) -> None:
    assert loss_of({**LOSSES[name], "aggregation": "token_mean"}) != pytest.approx(loss_of(LOSSES[name]), rel=0.1)
