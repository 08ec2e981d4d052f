"""Sets that models are evaluated on, asked as by their published protocols. All is the split `test`."""

import json
from collections.abc import Iterator
from typing import Any

from tandem.data.preprocess.code import block
from tandem.data.preprocess.convert import Place, verl_row
from tandem.data.rows import BadRow, Row, cell

STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
"""The directive of DeepSeek-R1 (arXiv:2501.12948) and Qwen2.5-Math (arXiv:2409.12122)."""
SCRIPT = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
"""EvalPlus's (Liu et al. 2023, arXiv:2305.01210) of models with a chat template."""


def aime(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """AIME of any year: `problem` or `question`, and `answer`, a number from 0 to 999, perhaps written 073."""
    known = {name.lower(): value for name, value in row.items() if value is not None}
    problem = cell(known, "problem" if "problem" in known else "question", str)
    answer = str(known.get("answer", "")).strip()
    if not (answer.isdecimal() and int(answer) < 1000):
        raise BadRow(f"column `answer` is no number from 0 to 999: {answer!r}")
    yield _asked(place, "aime", "math", f"{problem}\n{STEPS}", str(int(answer)), answer=f"\\boxed{{{int(answer)}}}")


def math500(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """MATH-500 (Lightman et al. 2023, arXiv:2305.20050): `problem`, `answer`, `solution`, `subject`, `level`."""
    problem, answer = cell(row, "problem", str), cell(row, "answer", str)
    extra = {"answer": cell(row, "solution", str), "subject": str(row.get("subject")), "level": str(row.get("level"))}
    yield _asked(place, "HuggingFaceH4/MATH-500", "math", f"{problem}\n{STEPS}", answer, **extra)


def humanevalplus(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """HumanEval+ (Liu et al. 2023, arXiv:2305.01210), as `evalplus/humanevalplus`, whose `test` has all its inputs.

    The script is to be whole: nothing of `prompt` runs before it.
    """
    prompt, name = cell(row, "prompt", str), cell(row, "entry_point", str)
    truth = {"preamble": "", "tests": [f"{cell(row, 'test', str)}\ncheck({name})"]}
    answer = block(prompt + cell(row, "canonical_solution", str))
    question = f"{SCRIPT}\n```\n{prompt.strip()}\n```"
    yield _asked(place, "evalplus/humanevalplus", "code", question, truth, answer=answer)


def mbppplus(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """MBPP+ (Liu et al. 2023), as `evalplus/mbppplus`: the first test of `test_list` names the function."""
    text, shown = cell(row, "prompt", str), cell(row, "test_list", list)
    if not shown:
        raise BadRow("column `test_list` is empty")
    imports = row.get("test_imports") or []
    truth = {"preamble": "", "tests": ["\n".join([*imports, cell(row, "test", str)])]}
    question = f'{SCRIPT}\n```\n"""\n{text.strip()}\n{shown[0].strip()}\n"""\n```'
    yield _asked(place, "evalplus/mbppplus", "code", question, truth, answer=block(cell(row, "code", str)))


def ifeval(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """IFEval (Zhou et al. 2023, arXiv:2311.07911): `prompt`, `instruction_id_list` and the `kwargs` of each."""
    prompt, instructions = cell(row, "prompt", str), cell(row, "instruction_id_list", list)
    arguments = cell(row, "kwargs", list)
    if not instructions or len(instructions) != len(arguments):
        raise BadRow(f"{len(instructions)} instructions in `instruction_id_list`, and {len(arguments)} in `kwargs`")
    given = [{name: value for name, value in of_one.items() if value is not None} for of_one in arguments]
    truth = json.dumps({"prompt": prompt, "instruction_id_list": instructions, "kwargs": given})
    yield _asked(place, "google/IFEval", "instructions", prompt, truth)


def _asked(place: Place, source: str, ability: str, question: str, truth: Any, **extra: Any) -> tuple[str, Row]:
    return "test", verl_row(place._replace(split="test"), source, ability, question, truth, extra)
