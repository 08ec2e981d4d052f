"""Published files -> rows of chat for the recipes: python rows.py DIRECTORY --gsm8k train.jsonl --hh pairs.jsonl.gz

Both are read as they are published, also where they are gzipped, and each becomes a file of the directory.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CALCULATION = re.compile(r"<<.*?>>")
SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
ROLES = {"Human": "user", "Assistant": "assistant"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--hh", type=Path)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name, file, read in (("gsm8k_sft", arguments.gsm8k, solution), ("hh_pairs", arguments.hh, pair)):
        if file is not None:
            rows = [made for row in lines(file) if (made := read(row)) is not None]
            (arguments.directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(f"{arguments.directory}/{name}.jsonl: {len(rows):,} rows")


def lines(file: Path) -> Iterator[dict[str, Any]]:
    open_text = gzip.open if file.suffix == ".gz" else open
    with open_text(file, "rt", encoding="utf-8") as text:
        yield from map(json.loads, text)


def solution(row: dict[str, Any]) -> dict[str, Any]:
    """Question, and the solution without the calculator's annotations."""
    answer = CALCULATION.sub("", row["answer"])
    return {"prompt": [message("user", row["question"])], "completion": [message("assistant", answer)]}


def pair(row: dict[str, Any]) -> dict[str, Any] | None:
    """Two replies to one conversation; None where the pair has two conversations, or an empty reply, or ends with the
    user."""
    chosen, rejected = (conversation(row[name]) for name in ("chosen", "rejected"))
    if chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
        return None
    if chosen[:-1] != rejected[:-1] or chosen == rejected or not (chosen[-1]["content"] and rejected[-1]["content"]):
        return None
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def conversation(transcript: str) -> list[dict[str, str]]:
    _, *parts = SPEAKER.split(transcript)
    return [message(ROLES[who], said.strip()) for who, said in zip(parts[::2], parts[1::2], strict=True)]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


if __name__ == "__main__":
    main()
