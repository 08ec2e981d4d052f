"""Rows with a right answer in full -> prompts to try a reward function on; no tokenizer needed."""

from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.rows import BadRow, Row, ground_truth_of, read_rows, without_pictures
from tandem.errors import UserError
from tandem.types import Prompt

ANSWERS = ("extra_info.answer", "completion", "solution", "answer")
"""Columns in which data sets have right answers in full."""


def read_answered(path: Path, count: int, column: str | None = None) -> tuple[list[Prompt], list[str]]:
    """The prompts of `count` rows or all, spread evenly over the file, without token ids; and their right answers,
    which stand in `column`, or where data sets have them.

    UserError names the first row that has no right answer in full.
    """
    rows = [(number, row if isinstance(row, BadRow) else without_pictures(row)) for number, row in read_rows(path)]
    count = min(count, len(rows))
    prompts: list[Prompt] = []
    answers: list[str] = []
    for number, row in (rows[place * len(rows) // count] for place in range(count)):
        try:
            if isinstance(row, BadRow):
                raise row
            answers.append(_right_answer(row, column))
            source, truth = row.get("data_source") or "default", ground_truth_of(row)
        except BadRow as error:
            raise UserError(f"{path}, row {number}: {error}") from error
        prompts.append(Prompt(number, np.zeros(0, np.int32), str(row.get("prompt")), source, truth, row))
    return prompts, answers


def _right_answer(row: Row, column: str | None) -> str:
    for name in (column,) if column else ANSWERS:
        value: Any = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, str) and value.strip():
            return value
        if column and value is not None:
            raise BadRow(f"--answer {column}: a right answer is text, not {value!r}")
    looked_for = column or " or ".join(ANSWERS)
    raise BadRow(f"it has no right answer in full: {looked_for}; name its column with --answer (of {', '.join(row)})")
