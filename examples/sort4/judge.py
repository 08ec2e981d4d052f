"""A judge for sort4: a tiny model that is shown the reference and an answer, 1248:1284?, and says yes or no. Rows to
train it on, and its parser.

    python examples/sort4/judge.py --train TASK/train.jsonl --out judge.jsonl

then `tandem sft recipes/sort4_judge_sft.yaml`, then `tandem train recipes/sort4_judged.yaml`. A blind one is shown the
question in the place of the reference, 4821=1284?, and has to sort: docs/rewards.md says what becomes of that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

ROWS = 350 * 128
RIGHT_SHARE = 0.5
DIGITS = "0123456789"


def verdict(reply: str) -> float | None:
    """What the judge's reply comes to: 1 for yes, 0 for no, None for anything else."""
    return {"yes": 1.0, "no": 0.0}.get(reply.strip())


def judgements(digits: Sequence[str], count: int, seed: int, blind: bool = False) -> Iterator[dict[str, str]]:
    """`prompt` / `completion` rows: right answers, and wrong ones of every kind that a model may come to give."""
    rng = random.Random(f"judgements {seed}")
    for _ in range(count):
        asked = rng.choice(digits)
        right = "".join(sorted(asked))
        answer = right if rng.random() < RIGHT_SHARE else _wrong(asked, right, rng)
        shown = f"{asked}=" if blind else f"{right}:"
        yield {"prompt": f"{shown}{answer}?", "completion": "yes" if answer == right else "no"}


def _wrong(asked: str, right: str, rng: random.Random) -> str:
    """Almost always wrong: most often one digit is another; or digits are swapped, drawn, doubled, lost, added."""
    kind, place = rng.random(), rng.randrange(4)
    if kind < 0.35:
        return right[:place] + rng.choice(DIGITS) + right[place + 1 :]
    if kind < 0.55:
        first, second = sorted(rng.sample(range(4), 2))
        return right[:first] + right[second] + right[first + 1 : second] + right[first] + right[second + 1 :]
    if kind < 0.65:
        return "".join(sorted(rng.choices(DIGITS, k=4)))
    if kind < 0.75:
        return "".join(rng.choices(asked, k=4))
    if kind < 0.85:
        return right[:place] + right[place + 1 :]
    return right[:place] + "".join(rng.choices(DIGITS, k=rng.randrange(1, 4))) + right[place:]


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description="Write rows that teach a model to judge answers of sort4.")
    parser.add_argument("--train", type=Path, required=True, help="rows of sort4, of which the questions are taken")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blind", action="store_true", help="show the question, not the reference")
    arguments = parser.parse_args()
    digits = [json.loads(line)["prompt"][:4] for line in arguments.train.read_text(encoding="utf-8").splitlines()]
    rows = judgements(digits, ROWS, arguments.seed, arguments.blind)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
