"""Which data set a row is of, as that is published: what to say where nobody can train on the row as it is."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from tandem.data.preprocess import CONVERTERS
from tandem.data.preprocess.convert import Place
from tandem.data.rows import BadRow, Row

_COLUMNS: Mapping[str, set[str]] = {
    "humaneval": {"prompt", "entry_point", "canonical_solution", "test"},
    "mbppplus": {"prompt", "code", "test_list", "test"},
    "mbpp": {"text", "code", "test_list", "task_id"},
    "ifeval": {"prompt", "instruction_id_list", "kwargs"},
    "hellaswag": {"activity_label", "ctx", "endings", "label"},
    "aqua": {"question", "options", "correct"},
    "puzzlevqa": {"image", "question", "options", "answer"},
    "geo3k": {"images", "problem", "answer"},
    "math500": {"problem", "solution", "answer", "subject", "level"},
    "math": {"problem", "solution"},
    "squad": {"context", "question", "answers"},
    "musique": {"question", "answer", "answer_aliases"},
    "hotpotqa": {"question", "answer", "supporting_facts"},
    "gsm8k": {"question", "answer"},
    "hh": {"chosen", "rejected"},
}
"""Name in `tandem data NAME` -> columns that its rows have. The first one counts that can be made of a row."""
_HAS_ITS_ANSWER = {"answer", "ground_truth"}
"""A row of `problem` and `solution` that has one of these, too, has a ground truth already."""


def command_for(row: Row, file: Path | str) -> str | None:
    """The command that makes rows to train on of a row as published, which is in `file`."""
    folder = Path(file).parent
    has = {column for column, value in row.items() if value is not None}
    for name, columns in _COLUMNS.items():
        if columns <= has and not (name == "math" and has & _HAS_ITS_ANSWER) and _is_of(name, row, folder):
            plus = "plus" if name == "humaneval" and "plus" in Path(file).name.lower() else ""
            return f"tandem data {name}{plus} --in {shlex.quote(str(file))} --out DIR"
    return None


def _is_of(name: str, row: Row, folder: Path) -> bool:
    try:
        return bool(list(CONVERTERS[name](row, Place("train", 0, folder))))
    except BadRow:
        return False
