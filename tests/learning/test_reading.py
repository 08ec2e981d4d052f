"""`docs/reading.md` names the files in which a step of GRPO happens, and no others."""

from __future__ import annotations

import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tandem.cli import main
from tests.conftest import ROOT

PACKAGE = f"{ROOT}/tandem/"
OF_A_FUNCTION = 0x1
"""`co_flags` of a function's code, not of a module's or a class's."""
MANY = 110
"""A file with so many lines of functions that ran is named, but where it checks or starts things."""
BESIDE_A_STEP = {
    "cli.py",
    "checkpoint/run_dir.py",
    "jobs/preflight/models.py",
    "models/family_check.py",
    "models/loading.py",
}
NOUNS = {"types.py", "config/tree.py"}
"""Dataclasses and sections: little in them is a function."""


@contextmanager
def entered() -> Iterator[set[CodeType]]:
    """The functions of the package that run meanwhile, in all threads that begin."""
    found = set[CodeType]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_flags & OF_A_FUNCTION:
            found.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def lines_by_file(functions: set[CodeType]) -> dict[str, int]:
    lines: dict[str, set[int]] = defaultdict(set)
    for code in functions:
        last = max(line for *_, line in code.co_lines() if line is not None)
        lines[code.co_filename.removeprefix(PACKAGE)].update(range(code.co_firstlineno, last + 1))
    return {file: len(numbers) for file, numbers in lines.items()}


def test_the_page_names_where_a_step_happens(grpo_config: Path) -> None:
    named = set(re.findall(r"`tandem/([\w/]+\.py)`", (ROOT / "docs/reading.md").read_text()))
    with entered() as functions:
        assert main(["train", str(grpo_config), "trainer.steps=2"]) == 0
    lines = lines_by_file(functions)
    assert named - NOUNS <= set(lines), "named, and not entered"
    assert {file for file, count in lines.items() if count >= MANY} <= named | BESIDE_A_STEP, lines
    assert 8_000 < sum(lines.values()) < 11_000, "what the page's first sentence says"
