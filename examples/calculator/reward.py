"""Right is what the policy says last: the number alone, or a sentence whose last number it is."""

import re

NUMBER = re.compile(r"\d+")


def exact(completion: str, ground_truth: str, messages: list[dict]) -> dict[str, float]:
    """1 where the last turn is the product."""
    right = float(messages[-1]["role"] == "assistant" and messages[-1]["content"] == ground_truth)
    return {"score": right, "acc": right}


def last_number(completion: str, ground_truth: str, messages: list[dict]) -> dict[str, float]:
    """1 where the last number of the last turn is the product."""
    numbers = NUMBER.findall(messages[-1]["content"]) if messages[-1]["role"] == "assistant" else []
    right = float(numbers[-1:] == [ground_truth])
    return {"score": right, "acc": right}
