"""Things to say in a form that can be checked: python form.py DIRECTORY, which gets train.jsonl and val.jsonl.

Forms as IFEval has them (Zhou et al. 2023, arXiv:2311.07911): case, length, bullet points, JSON, last words, no commas.
Every form is asked of every subject; every fifth subject, drawn once, is held out.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUBJECTS = """the sea; a bicycle; rain; bread; the moon; a library; winter; coffee; a train station; mountains; a
cat; the post office; honey; a lighthouse; football; the city at night; a garden; salt; a violin; the desert; a
bridge; chess; spring; an umbrella; the market; a river; tea; a forest; the school day; a kitchen; snow; a museum;
swimming; the wind; an old house; paper; a birthday; the harbour; clouds; a dictionary; an apple; the stars; a farm;
a hospital; sleep; the radio; an island; a clock; wood; the weekend""".replace("\n", " ").split("; ")
BULLET = re.compile(r"[*-] +\S")


def in_lowercase(answer: str) -> bool:
    return answer == answer.lower() != answer.upper()


def in_capitals(answer: str) -> bool:
    return answer == answer.upper() != answer.lower()


def in_few_words(answer: str) -> bool:
    return 3 <= len(answer.split()) <= 10


def as_three_points(answer: str) -> bool:
    lines = [line for line in answer.splitlines() if line.strip()]
    return len(lines) == 3 and all(map(BULLET.match, lines))


def as_json(answer: str) -> bool:
    try:
        said = json.loads(answer)
    except ValueError:
        return False
    return (
        isinstance(said, dict)
        and set(said) == {"title", "text"}
        and all(isinstance(v, str) and v for v in said.values())
    )


def with_last_words(answer: str) -> bool:
    return answer.endswith("That is all.") and len(answer.split()) > 5


def without_commas(answer: str) -> bool:
    return "," not in answer and len(answer.split()) >= 5


FORMS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "lowercase": ("Use lowercase letters only.", in_lowercase),
    "capitals": ("Use CAPITAL LETTERS only.", in_capitals),
    "words": ("Use between 3 and 10 words.", in_few_words),
    "points": ("Write exactly three lines, each beginning with an asterisk and a space.", as_three_points),
    "json": ('Answer with a JSON object alone, which has two texts, "title" and "text".', as_json),
    "last": ("End with the words: That is all.", with_last_words),
    "commas": ("Use no commas.", without_commas),
}
"""By its name: what is asked, and whether an answer, without the spaces around it, keeps to it."""


def main(directory: Path) -> None:
    subjects = list(SUBJECTS)
    random.Random(0).shuffle(subjects)
    directory.mkdir(parents=True, exist_ok=True)
    held_out = len(subjects) // 5
    for name, part in (("train", subjects[held_out:]), ("val", subjects[:held_out])):
        rows = (row(subject, form) for subject in part for form in FORMS)
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(made) + "\n" for made in rows))


def row(subject: str, form: str) -> dict[str, Any]:
    question = f"Say something about {subject}, in one or two short sentences. {FORMS[form][0]}"
    if form in ("points", "json"):
        question = f"Say something about {subject}. {FORMS[form][0]}"
    return {"prompt": [{"role": "user", "content": question}], "data_source": "form", "ground_truth": form}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """1 where the answer has the form of this name, else 0."""
    kept = float(FORMS[ground_truth][1](solution_str.strip()))
    return {"score": kept, "acc": kept, ground_truth: kept}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
