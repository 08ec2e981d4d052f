"""Word problems and competition problems."""

import re
from collections.abc import Iterator

from tandem.data.preprocess.convert import Place, verl_row
from tandem.data.rows import BadRow, Row, cell

FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
_BRACED = "[^{}]*"
for _ in range(6):  # braces in braces
    _BRACED = rf"(?:[^{{}}]++|\{{{_BRACED}\}})*+"
BOXED = re.compile(rf"\\(?:f?boxed|fbox)\s*(?:\{{({_BRACED})\}}|([^\s{{$]+))")
GSM8K = 'Think step by step, and give the final answer as a number on the last line, after "####".'
MATH = "Think step by step, and put the final answer in \\boxed{}."


def gsm8k(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """GSM8K (Cobbe et al. 2021, arXiv:2110.14168): `question`, `answer`."""
    question, answer = cell(row, "question", str), cell(row, "answer", str)
    final = FINAL_ANSWER.search(answer)
    if final is None:
        raise BadRow(f"column `answer` does not end with #### and a number: {answer[-40:]!r}")
    truth, extra = final[1].replace(",", ""), {"answer": answer, "question": question}
    yield place.split, verl_row(place, "openai/gsm8k", "math", f"{question}\n\n{GSM8K}", truth, extra)


def competition_math(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """MATH (Hendrycks et al. 2021, arXiv:2103.03874): `problem`, `solution` with a \\boxed answer, `level`, `type`."""
    problem, solution = cell(row, "problem", str), cell(row, "solution", str)
    boxed = BOXED.findall(solution)
    if not boxed:
        raise BadRow(f"column `solution` has no answer in \\boxed{{}}: {solution[-40:]!r}")
    truth = "".join(boxed[-1]).strip()
    extra = {"answer": solution, "question": problem, "level": str(row.get("level")), "type": str(row.get("type"))}
    yield place.split, verl_row(place, "math", "math", f"{problem}\n\n{MATH}", truth, extra)
