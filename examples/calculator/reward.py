"""Right is what the policy says last, and only if it is the number alone."""


def exact(completion: str, ground_truth: str, messages: list[dict]) -> dict[str, float]:
    """1 where the last turn is the product."""
    right = float(messages[-1]["role"] == "assistant" and messages[-1]["content"] == ground_truth)
    return {"score": right, "acc": right}
