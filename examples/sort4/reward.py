"""The reward of sort4, in the signature that verl's users write."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """1 when the response, up to a space (where the skewed variant's filler starts), is the answer; 0 otherwise."""
    prediction = solution_str.partition(" ")[0]
    right = float(prediction == ground_truth)
    return {"score": right, "acc": right, "pred": prediction}
