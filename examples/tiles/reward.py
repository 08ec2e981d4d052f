"""Are all four colours named, in their order?"""


def compute_score(solution_str: str, ground_truth: str) -> dict[str, float]:
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}
