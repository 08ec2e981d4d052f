"""Nim: players take one to three stones in turn, and who takes the last one wins. A policy reads `7 left`, says `3`.

Who leaves a multiple of four wins whatever the other does, which neither policy is told.

    python -m examples.self_play.nim runs/nim --seed 0      writes the task: a model, demonstrations, sizes of heaps
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from examples.letters import Row, write_model, write_rows

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SMALLEST, LARGEST, MOST_TAKEN = 5, 15, 3
FOUL = "foul"
"""What a player hears when the other one's move was none of the game's."""
SFT_ROWS = 200 * 64


def asked(stones: int) -> str:
    return f"{stones} left"


def after(stones: int, move: str) -> int | None:
    """The stones that a move leaves; None: it is none of the game's."""
    taken = int(move) if move in ("1", "2", "3") else 0
    return stones - taken if 0 < taken <= stones else None


def outcome(completion: str, messages: list[Row]) -> float:
    """1 for a game that was won, -1 for a lost one, from what one player has said and heard."""
    *_, before, last = messages
    if last["role"] == "user":  # after the other one's last move
        return 1.0 if last["content"] == FOUL else -1.0
    return 1.0 if last["content"] == before["content"].partition(" ")[0] else -1.0


def demonstrations(count: int, seed: int) -> Iterator[Row]:
    """Games between players that draw their moves: `messages` rows of one player."""
    draw = random.Random(f"demonstrations {seed}")
    for _ in range(count):
        stones = draw.randint(SMALLEST, LARGEST)
        messages: list[Row] = []
        while stones > 0:
            move = draw.randint(1, min(MOST_TAKEN, stones))
            messages += [{"role": "user", "content": asked(stones)}, {"role": "assistant", "content": str(move)}]
            stones -= move
            stones -= min(draw.randint(1, MOST_TAKEN), stones)
        yield {"messages": messages}


def make(directory: Path, seed: int) -> None:
    """Write `model/`, `sft.jsonl` and `train.jsonl`, whose rows are sizes of the heap."""
    directory.mkdir(parents=True, exist_ok=True)
    write_rows(directory / "sft.jsonl", demonstrations(SFT_ROWS, seed))
    sizes = [
        {"prompt": [{"role": "user", "content": asked(size)}], "stones": size} for size in range(SMALLEST, LARGEST + 1)
    ]
    write_rows(directory / "train.jsonl", sizes)
    write_model(directory / "model", seed, CHAT_TEMPLATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the task's model and data.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.directory, arguments.seed)
