"""Rows with a right answer in full -> prompts to try a reward function on; no tokenizer needed."""

from pathlib import Path

import numpy as np

from tandem.data.rows import BadRow, Row, ground_truth_of, read_rows, without_pictures
from tandem.errors import UserError
from tandem.types import Prompt


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
    candidates = [(row.get("extra_info") or {}).get("answer"), row.get("completion"), row.get("solution")]
    for text in [row.get(column)] if column else [*candidates, row.get("answer")]:
        if isinstance(text, str) and text.strip():
            return text
    looked_for = column or "extra_info.answer, or completion, solution or answer"
    raise BadRow(f"it has no right answer in full: {looked_for}; name its column with --answer (of {', '.join(row)})")
