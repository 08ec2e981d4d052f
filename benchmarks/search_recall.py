"""Passages that are found for questions whose gold passages are known: by words, and by a sentence-embedding model.

    python benchmarks/search_recall.py CORPUS QUESTIONS [--dense MODEL] [--k 2 3 5 10 20]

CORPUS is what `tandem search index` takes, QUESTIONS a file of rows of `question` and `gold_doc_ids`, gzipped or not.
A line for each ranker: the share of gold passages among the first k, the share of questions with at least one of theirs
among them, seconds of CPU time to index a thousand passages, and milliseconds of it a query, median.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from command_line import parse_arguments

from tandem.jobs.passage_index import make_index
from tandem.search.index import open_index
from tandem.search.vectors import Embedding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--dense", type=Path, metavar="MODEL", help="a directory of a sentence-embedding model")
    parser.add_argument("--k", nargs="+", type=int, default=(2, 3, 5, 10, 20))
    arguments = parse_arguments(parser, k=[2])
    open_text: Any = gzip.open if arguments.questions.suffix == ".gz" else open
    with open_text(arguments.questions, "rt", encoding="utf-8") as lines:
        questions = [json.loads(line) for line in lines]
    columns = [*(f"gold@{k}" for k in arguments.k), *(f"any@{k}" for k in arguments.k)]
    print(f"| | {' | '.join(columns)} | index, CPU-s a thousand | query, CPU-ms |")
    print("|" + " --- |" * (len(columns) + 3))
    rankers = {"words": None} | ({} if arguments.dense is None else {"dense": Embedding(str(arguments.dense))})
    for name, embedding in rankers.items():
        with tempfile.TemporaryDirectory() as folder:
            begun = time.process_time()
            passages = make_index(arguments.corpus, Path(folder) / "index", embedding)
            indexed_s = time.process_time() - begun
            measured(name, Path(folder) / "index", questions, arguments.k, 1000 * indexed_s / passages)


def measured(name: str, directory: Path, questions: list[dict[str, Any]], ks: list[int], indexed_s: float) -> None:
    index, took = open_index(directory), list[float]()
    gold, any_of = dict.fromkeys(ks, 0.0), dict.fromkeys(ks, 0)
    for asked in questions:
        begun = time.process_time()
        found = [hit.passage.id for hit in index.search(asked["question"], max(ks))]
        took.append(time.process_time() - begun)
        wanted = set(asked["gold_doc_ids"])
        for k in ks:
            among = len(wanted & set(found[:k]))
            gold[k] += among / len(wanted)
            any_of[k] += among > 0
    shares = [f"{of_k[k] / len(questions):.3f}" for of_k in (gold, any_of) for k in ks]
    print(f"| {name} | {' | '.join(shares)} | {indexed_s:.2f} | {1000 * statistics.median(took):.2f} |", flush=True)


if __name__ == "__main__":
    main()
