"""calculator: two-digit products, which a tiny model cannot compute, and a tool that can. A user asks `34*78=`.

Supervised fine-tuning on conversations of which a share answers without the tool, asks it for something else or
copies its result wrongly gives a model that is sometimes right; reinforcement learning then finds that asking rightly
and copying rightly pays. All of it follows from one seed.

    python -m examples.calculator.task runs/calculator/task --seed 0
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from examples.calculator.tools import calculate
from examples.letters import Row, write_model, write_rows
from examples.one_tool import CALL_TAGS, CHAT_TEMPLATE, call_and_result, opening

SFT_ROWS = 600 * 64
WITHOUT_TOOL, WRONG_CALL, WRONG_COPY = 0.40, 0.15, 0.15
"""Shares of the demonstrations; the rest is right."""


def problem(draw: random.Random) -> str:
    return f"{draw.randint(32, 99)}*{draw.randint(32, 99)}"


def demonstrations(count: int, seed: int) -> Iterator[Row]:
    """`messages` rows: conversations of one turn or two."""
    draw = random.Random(f"demonstrations {seed}")
    for _ in range(count):
        asked = problem(draw)
        yield {"messages": [*opening("calculate", f"{asked}="), *_turns(asked, draw)]}


def _turns(asked: str, draw: random.Random) -> Iterator[Row]:
    kind = draw.random()
    if kind < WITHOUT_TOOL:
        yield {"role": "assistant", "content": str(draw.randint(100, 9999))}
        return
    if kind < WITHOUT_TOOL + WRONG_CALL:
        asked = _with_another_digit(asked, draw.choice([0, 1, 3, 4]), "123456789", draw)
    result = said = calculate(asked)
    if WITHOUT_TOOL + WRONG_CALL <= kind < WITHOUT_TOOL + WRONG_CALL + WRONG_COPY:
        said = _with_another_digit(result, draw.randrange(len(result)), "0123456789", draw)
    yield from call_and_result("calculate", "expression", asked, result)
    yield {"role": "assistant", "content": said}


def _with_another_digit(text: str, place: int, digits: str, draw: random.Random) -> str:
    return text[:place] + draw.choice(digits) + text[place + 1 :]


def questions(count: int, draw: random.Random) -> Iterator[Row]:
    for _ in range(count):
        asked = problem(draw)
        message = {"role": "user", "content": f"{asked}="}
        yield {"data_source": "calculator", "prompt": [message], "ground_truth": calculate(asked)}


def make(directory: Path, seed: int) -> None:
    """Write `model/`, `sft.jsonl`, `train.jsonl` and `val.jsonl`."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    write_rows(directory / "sft.jsonl", demonstrations(SFT_ROWS, seed))
    write_rows(directory / "train.jsonl", questions(4000, draw))
    write_rows(directory / "val.jsonl", questions(128, draw))
    write_model(directory / "model", seed, CHAT_TEMPLATE, CALL_TAGS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the task's model and data.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.directory, arguments.seed)
