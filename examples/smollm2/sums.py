"""Sums to learn, each a question: python sums.py DIRECTORY, which gets train.jsonl and val.jsonl.

A number below 20 and one below 10, 200 sums; every fourth, drawn once, is held out. Answers are to be the number only.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"\d+")


def main(directory: Path) -> None:
    sums = [(a, b) for a in range(20) for b in range(10)]
    random.Random(0).shuffle(sums)
    directory.mkdir(parents=True, exist_ok=True)
    held_out = len(sums) // 4
    for name, part in (("train", sums[held_out:]), ("val", sums[:held_out])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row(a, b)) + "\n" for a, b in part))


def row(a: int, b: int) -> dict[str, Any]:
    question = f"What is {a} + {b}? Answer with the number only."
    return {"prompt": [{"role": "user", "content": question}], "data_source": "sums", "ground_truth": str(a + b)}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """1 where the last number of the answer is the sum, else 0."""
    numbers = NUMBER.findall(solution_str)
    prediction = numbers[-1] if numbers else ""
    right = float(prediction == ground_truth)
    return {"score": right, "acc": right, "pred": prediction}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
