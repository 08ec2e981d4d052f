"""Multiple choice."""

import re
from collections.abc import Iterator, Sequence

from tandem.data.preprocess.convert import Place, verl_row
from tandem.data.rows import BadRow, Row, cell

INSTRUCTION = 'Think step by step, and end with "The answer is (X)", X being the letter of the right choice.'


def aqua(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """AQuA-RAT (Ling et al. 2017, arXiv:1705.04146): `question`, `options` ("A)…"), `correct`, a letter."""
    options = [str(option).partition(")")[2].strip() for option in cell(row, "options", list)]
    yield place.split, _row(place, "aqua_rat", cell(row, "question", str), options, cell(row, "correct", str))


def hellaswag(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """HellaSwag (Zellers et al. 2019, arXiv:1905.07830): `ctx`, `endings`, `label`, the number of the right one."""
    endings = [_clean(str(ending)) for ending in cell(row, "endings", list)]
    if (label := row.get("label")) in ("", None):
        return  # the test split is published without labels
    if not str(label).isdigit() or int(label) >= len(endings):
        raise BadRow(f"column `label` is {label!r}, but there are {len(endings)} endings")
    question = f"{_clean(cell(row, 'activity_label', str))}: {_clean(cell(row, 'ctx', str))} … Which ending fits best?"
    yield place.split, _row(place, "hellaswag", question, endings, "ABCDEFGHIJ"[int(label)])


def _row(place: Place, data_source: str, question: str, choices: Sequence[str], letter: str) -> Row:
    listed = "\n".join(f"({name}) {choice}" for name, choice in zip("ABCDEFGHIJ", choices, strict=False))
    if f"({letter}) " not in listed:
        raise BadRow(f"the right choice is {letter!r}, but the choices are {list(choices)}")
    extra = {"answer": f"The answer is ({letter}).", "question": question, "choices": list(choices)}
    return verl_row(place, data_source, "reasoning", f"{question}\n\n{listed}\n\n{INSTRUCTION}", letter, extra)


def _clean(text: str) -> str:
    """Without the WikiHow part's marks, such as [header]."""
    return " ".join(re.sub(r"\[[a-z]*\]", " ", text).split())
