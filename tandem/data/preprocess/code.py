"""Programs with unit tests. The ground truth is {preamble, tests}, as `tandem.reward.rules.code` reads it."""

from collections.abc import Iterator

from tandem.data.preprocess.convert import Place, verl_row
from tandem.data.rows import BadRow, Row, cell

INSTRUCTION = "Answer with the complete program in one ```python block."
MBPP_SPLITS = (("prompt", 10), ("test", 510), ("val", 600), ("train", 974))
"""The paper's splits (Austin et al. 2021, section 2.1), each with its last `task_id`; `prompt` is for few-shot ones."""


def humaneval(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """HumanEval (Chen et al. 2021, arXiv:2107.03374): an evaluation set, all of it the split `test`."""
    prompt, name = cell(row, "prompt", str), cell(row, "entry_point", str)
    preamble, found, _ = prompt.rpartition(f"def {name}(")
    if not found:
        raise BadRow(f"column `prompt` does not define {name!r}")
    truth = {"preamble": preamble, "tests": [f"{cell(row, 'test', str)}\ncheck({name})"]}
    question = f"Complete this program.\n\n```python\n{prompt}```\n\n{INSTRUCTION}"
    extra = {"answer": block(prompt + cell(row, "canonical_solution", str)), "question": prompt}
    yield "test", verl_row(place._replace(split="test"), "openai_humaneval", "code", question, truth, extra)


def mbpp(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """MBPP (Austin et al. 2021, arXiv:2108.07732), split by `task_id`. `test_setup_code` runs after the solution."""
    text, tests, task = cell(row, "text", str), cell(row, "test_list", list), cell(row, "task_id", int)
    split = next((split for split, last in MBPP_SPLITS if task <= last), "train")
    setup = row.get("test_setup_code") or ""
    question = f"{text}\n\nIt must pass these tests:\n```python\n{chr(10).join(tests)}\n```\n\n{INSTRUCTION}"
    truth = {"preamble": "", "tests": [f"{setup}\n{test}".lstrip() for test in tests]}
    extra = {"answer": block(cell(row, "code", str).replace("\r\n", "\n")), "question": text}
    yield split, verl_row(Place(split, task), "mbpp", "code", question, truth, extra)


def block(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"
