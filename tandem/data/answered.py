"""Rows with a right answer in full -> prompts that a reward function can be tried on; no tokenizer needed."""

from pathlib import Path

import numpy as np

from tandem.data.rows import BadRow, ground_truth_of, read_rows
from tandem.errors import UserError
from tandem.types import Prompt


def read_answered(path: Path, count: int) -> tuple[list[Prompt], list[str]]:
    """`count` rows or all, spread evenly over the file: their prompts, without token ids, and their right answers."""
    rows = list(read_rows(path))
    prompts: list[Prompt] = []
    answers: list[str] = []
    count = min(count, len(rows))
    for number, row in (rows[place * len(rows) // count] for place in range(count)):
        try:
            if isinstance(row, BadRow):
                raise row
            known = ((row.get("extra_info") or {}).get("answer"), *map(row.get, ("completion", "solution", "answer")))
            answers += [text for text in known if isinstance(text, str) and text.strip()][:1]
            if len(answers) == len(prompts):
                raise BadRow("it has no right answer in full: extra_info.answer, or completion, solution or answer")
            source, truth = row.get("data_source") or "default", ground_truth_of(row)
        except BadRow as error:
            raise UserError(f"{path}, row {number}: {error}") from error
        prompts.append(Prompt(number, np.zeros(0, np.int32), str(row.get("prompt")), source, truth, row))
    return prompts, answers
