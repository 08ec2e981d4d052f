"""Questions about a picture, whose bytes the row holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.data.preprocess.convert import Place, verl_row
from tandem.data.rows import BadRow, Row, cell

CHOICE = 'Think step by step, and end with "The answer is (X)", X being the letter of the right choice.'
BOXED = "Think step by step, and put the final answer in \\boxed{}."


def puzzlevqa(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """PuzzleVQA (Chia et al. 2024, arXiv:2403.13315): `image`, a path, `question`, `options`, `answer`, one of them."""
    options = [str(option) for option in cell(row, "options", list)]
    answer = str(row.get("answer"))
    if options.count(answer) != 1:
        raise BadRow(f"the right answer is {answer!r}, but the options are {options}")
    question, letter = cell(row, "question", str), "ABCDEFGHIJ"[options.index(answer)]
    listed = "\n".join(f"({name}) {option}" for name, option in zip("ABCDEFGHIJ", options, strict=False))
    extra = {"answer": f"The answer is ({letter}).", "question": question, "puzzle": str(row.get("puzzle") or "")}
    prompt = f"<image>{question}\n\n{listed}\n\n{CHOICE}"
    made = verl_row(place, "puzzlevqa", "vision", prompt, letter, extra)
    yield place.split, {**made, "images": [_bytes(cell(row, "image", object), place.folder)]}


def geo3k(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """Geometry3K (Lu et al. 2021, arXiv:2105.04165) as hiyouga/geometry3k publishes it: `images`, `problem` with
    <image> in it, `answer`."""
    problem, answer = cell(row, "problem", str), cell(row, "answer", str)
    images = [_bytes(image, place.folder) for image in cell(row, "images", list)]
    if problem.count("<image>") != len(images):
        raise BadRow(f"{problem.count('<image>')} times <image> in the problem, and {len(images)} pictures")
    extra = {"answer": f"\\boxed{{{answer}}}", "question": problem}
    made = verl_row(place, "hiyouga/geometry3k", "math", f"{problem}\n\n{BOXED}", answer, extra)
    yield place.split, {**made, "images": images}


def _bytes(image: Any, folder: Path) -> Row:
    """The picture as verl writes it; paths are relative to the data file."""
    given = image if isinstance(image, dict) else {"path": image}
    if isinstance(given.get("bytes"), bytes):
        return {"bytes": given["bytes"]}
    path = given.get("path")
    if not isinstance(path, str) or not (folder / path).is_file():
        raise BadRow(f"its picture is {path!r}, and there is no such file in {folder}")
    return {"bytes": (folder / path).read_bytes()}
