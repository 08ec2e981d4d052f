"""Nim: players take one to three stones in turn, and who takes the last one wins. A policy reads how many there are,
`7`, and says how many it leaves, `4`, `5` or `6`.

Who leaves a multiple of four wins whatever the other does, which neither policy is told. Sizes are single digits, and
moves are sizes, so that a tiny model must read the number in order to move by the rules at all: one that learns to say
how many it takes, says 1, 2 or 3 and hardly looks at what is left.

    python -m examples.self_play.nim runs/nim --seed 0      writes the task: a model, demonstrations, sizes of heaps
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from examples.letters import Row, write_model, write_rows

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SMALLEST, LARGEST, MOST_TAKEN = 5, 9, 3
FOUL = "foul"
"""What a player hears when the other one's move was none of the game's."""
SFT_ROWS = 200 * 64


def moves(stones: int) -> range:
    """What a player may leave of them."""
    return range(max(stones - MOST_TAKEN, 0), stones)


def after(stones: int, move: str) -> int | None:
    """The stones that a move leaves; None: it is none of the game's."""
    return next((left for left in moves(stones) if move == str(left)), None)


@cache
def best_share(stones: int) -> float:
    """Of games that a perfect player begins against one that draws its moves: the share that it wins, 0 to 1."""
    return max(_after_chance(left) for left in moves(stones))


def _after_chance(stones: int) -> float:
    """The same where the other one is to move."""
    drawn = [best_share(left) if left else 0.0 for left in moves(stones)]
    return sum(drawn) / len(drawn) if drawn else 1.0


def outcome(completion: str, messages: list[Row]) -> float:
    """1 for a game that was won, -1 for a lost one, from what a player that has moved has said and heard."""
    *_, before, last = messages
    if last["role"] == "user":  # after the other one's last move
        return 1.0 if last["content"] == FOUL else -1.0
    return 1.0 if after(int(before["content"]), last["content"]) == 0 else -1.0


def demonstrations(count: int, seed: int) -> Iterator[Row]:
    """Games between players that draw their moves: `messages` rows of one player."""
    draw = random.Random(f"demonstrations {seed}")
    for _ in range(count):
        stones = draw.randint(SMALLEST, LARGEST)
        messages: list[Row] = []
        while stones > 0:
            messages.append({"role": "user", "content": str(stones)})
            stones = draw.choice(moves(stones))
            messages.append({"role": "assistant", "content": str(stones)})
            stones = draw.choice(moves(stones)) if stones else 0
        yield {"messages": messages}


def make(directory: Path, seed: int) -> None:
    """Write `model/`, `sft.jsonl` and `train.jsonl`, whose rows are sizes of the heap."""
    directory.mkdir(parents=True, exist_ok=True)
    write_rows(directory / "sft.jsonl", demonstrations(SFT_ROWS, seed))
    sizes = [
        {"prompt": [{"role": "user", "content": str(size)}], "stones": size} for size in range(SMALLEST, LARGEST + 1)
    ]
    write_rows(directory / "train.jsonl", sizes)
    write_model(directory / "model", seed, CHAT_TEMPLATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the task's model and data.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.directory, arguments.seed)
