"""Products to ask a calculator for: python -m examples.smollm2.products DIRECTORY makes sft, train and val.jsonl.

Two numbers of two digits, which the model cannot multiply. `sft.jsonl` shows how a call is written and what is said of
its result. In half of its rows another number is called with than was asked for, or the result is copied wrongly: what
is left to learn is to do both rightly.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from examples.calculator.tools import calculate

Row = dict[str, Any]
WRONG = 0.5


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    products = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    draw.shuffle(products)
    write(directory / "val.jsonl", (row(*product) for product in products[:64]))
    write(directory / "train.jsonl", (row(*product) for product in products[64:1064]))
    write(directory / "sft.jsonl", demonstrations(products[1064:1704], draw))


def write(file: Path, rows: Iterable[Row]) -> None:
    file.write_text("".join(json.dumps(made) + "\n" for made in rows))


def asked(a: int, b: int) -> Row:
    return {"role": "user", "content": f"What is {a} times {b}?"}


def row(a: int, b: int) -> Row:
    return {"prompt": [asked(a, b)], "data_source": "products", "ground_truth": str(a * b)}


def demonstrations(products: Iterable[tuple[int, int]], draw: random.Random) -> Iterator[Row]:
    tools = [get_json_schema(calculate)]
    for a, b in products:
        kind = draw.random()
        called = (a, b) if kind > WRONG / 2 else draw.choice([(draw.randint(11, 99), b), (a, draw.randint(11, 99))])
        result = calculate(f"{called[0]}*{called[1]}")
        said = result if kind < WRONG / 2 or kind > WRONG else str(int(result) + draw.choice([-100, -10, 10, 100]))
        arguments = {"expression": f"{called[0]}*{called[1]}"}
        call = {"id": "call_0", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
        yield {
            "messages": [
                asked(a, b),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "calculate", "tool_call_id": "call_0", "content": result},
                {"role": "assistant", "content": f"{a} times {b} is {said}."},
            ],
            "tools": tools,
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
