"""Questions with short answers, to be looked up."""

from collections.abc import Iterator
from typing import Any

from tandem.data.preprocess.convert import Place, ToRows, verl_row
from tandem.data.rows import BadRow, Row, cell

INSTRUCTION = (
    "Look up what you do not know. Then answer in a few words between <answer> and </answer>, for example "
    "<answer>Berlin</answer>."
)
_COLUMNS = ("answers", "golden_answers", "answer")


def questions(data_source: str) -> ToRows:
    """Rows with a `question` and its answer: `answers` (a list, or SQuAD's `{text: [...]}`), `golden_answers` (a
    list, as FlashRAG publishes many sets), or `answer`, with `answer_aliases` besides as MuSiQue has them."""

    def to_rows(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
        question, answers = cell(row, "question", str), _answers(row)
        extra = {"answer": f"<answer>{answers[0]}</answer>", "question": question}
        extra |= {name: row[name] for name in ("id", "gold_doc_ids") if name in row}
        yield place.split, verl_row(place, data_source, "search", f"{question}\n\n{INSTRUCTION}", answers, extra)

    return to_rows


def _answers(row: Row) -> list[str]:
    """Every right answer once, the first one first."""
    column = next((name for name in _COLUMNS if row.get(name)), None)
    if column is None:
        raise BadRow(f"no right answer: one of the columns {', '.join(_COLUMNS)} must have one")
    given: Any = row[column].get("text") if isinstance(row[column], dict) else row[column]
    answers = [*(given if isinstance(given, list) else [given]), *(row.get("answer_aliases") or [])]
    wrong = [answer for answer in answers if not isinstance(answer, str) or not answer.strip()]
    if wrong or not answers:
        raise BadRow(f"column `{column}` holds {wrong[0] if wrong else given!r}, which is no text with an answer")
    return list(dict.fromkeys(answers))
