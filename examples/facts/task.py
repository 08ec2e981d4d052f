"""facts: invented words and what they stand for, which no model can know, and a search tool that finds them.

A user asks `kuzo?`, and `kuzo: mira` is right if that is what the corpus says. Supervised fine-tuning on conversations
of which a share does not search, or searches for something else, gives a model that is sometimes right; reinforcement
learning then finds that searching for the very word pays. No word is asked for twice, in fine-tuning, training or
validation, so there is nothing to learn by heart. All of it follows from one seed.

    python -m examples.facts.task runs/facts/task --seed 0
"""

from __future__ import annotations

import argparse
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.letters import Row, write_model, write_rows
from examples.one_tool import CALL_TAGS, CHAT_TEMPLATE, call_and_result, opening
from tandem.search.index import Hit, Passage, shown

TRAIN, VAL, OTHER = 4000, 128, 4128
SFT_ROWS = 600 * 64
WITHOUT_SEARCH, WRONG_QUERY = 0.35, 0.30
"""Shares of the demonstrations; the rest is right."""
LETTERS = 4
"""Of a word."""


def words(count: int, draw: random.Random) -> list[str]:
    """Invented words, all different."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn["".join(draw.choices(string.ascii_lowercase, k=LETTERS))] = None
    return list(drawn)


def passages(invented: Iterator[str], count: int) -> list[Passage]:
    """Facts: one word stands for another."""
    return [Passage(str(number), "", f"{next(invented)}: {next(invented)}") for number in range(count)]


def word_of(fact: Passage) -> str:
    """The word that a user asks for."""
    return fact.text[:LETTERS]


def demonstrations(facts: Sequence[Passage], draw: random.Random) -> Iterator[Row]:
    """`messages` rows: conversations of one turn or two."""
    for fact in facts:
        yield {"messages": [*opening("search", f"{word_of(fact)}?"), *_turns(fact, draw)]}


def _turns(fact: Passage, draw: random.Random) -> Iterator[Row]:
    kind, said = draw.random(), "unknown"
    if WITHOUT_SEARCH <= kind < WITHOUT_SEARCH + WRONG_QUERY:
        yield from call_and_result("search", "query", _wrong(word_of(fact), draw), shown([]))
    elif kind >= WITHOUT_SEARCH + WRONG_QUERY:
        yield from call_and_result("search", "query", word_of(fact), shown([Hit(fact, 1.0)]))
        said = fact.text
    yield {"role": "assistant", "content": said}


def _wrong(word: str, draw: random.Random) -> str:
    """The word cut short, or with another letter."""
    place = draw.randrange(1, LETTERS)
    if draw.random() < 0.5:
        return word[:place]
    return word[:place] + draw.choice(string.ascii_lowercase.replace(word[place], "")) + word[place + 1 :]


def questions(facts: Sequence[Passage]) -> Iterator[Row]:
    for fact in facts:
        message = {"role": "user", "content": f"{word_of(fact)}?"}
        yield {"data_source": "facts", "prompt": [message], "ground_truth": fact.text}


def corpus(facts: Sequence[Passage]) -> Iterator[Row]:
    """Rows for `tandem search index`."""
    return ({"id": fact.id, "text": fact.text} for fact in facts)


def make(directory: Path, seed: int, sft_rows: int = SFT_ROWS) -> None:
    """Write `model/`, `sft.jsonl`, `train.jsonl`, `val.jsonl`, and two corpora: `corpus.jsonl`, with the facts of all
    questions, and `irrelevant.jsonl`, with none of them."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    invented = iter(words(2 * (TRAIN + VAL + OTHER + sft_rows), draw))
    asked, irrelevant = passages(invented, TRAIN + VAL), passages(invented, OTHER)
    write_rows(directory / "corpus.jsonl", corpus(asked))
    write_rows(directory / "irrelevant.jsonl", corpus(irrelevant))
    write_rows(directory / "train.jsonl", questions(asked[:TRAIN]))
    write_rows(directory / "val.jsonl", questions(asked[TRAIN:]))
    write_rows(directory / "sft.jsonl", demonstrations(passages(invented, sft_rows), draw))
    write_model(directory / "model", seed, CHAT_TEMPLATE, CALL_TAGS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the task's model, questions and corpora.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.directory, arguments.seed)
