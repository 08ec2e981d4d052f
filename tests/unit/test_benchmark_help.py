"""Every program in benchmarks says with --help what it measures, has --small, and refuses what it does not know."""

import ast
import json
import subprocess
import sys

from tests.conftest import ROOT

PROGRAMS = [path for path in sorted(ROOT.glob("benchmarks/*.py")) if "__main__" in path.read_text(encoding="utf-8")]
SIDES = {"prime_rl_memory": "plan_memory.py runs it", "smollm2_trl": "smollm2.py runs it"}
"""Programs that measure nothing by themselves."""
ASK = """
import contextlib, io, json, runpy, sys
from pathlib import Path

for path in map(Path, sys.argv[1:]):
    answers, sys.path[:1] = [], [str(path.parent)]
    for argument in ("--help", "--no-such-option"):
        sys.argv, shown = [path.name, argument], io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            try:
                runpy.run_path(str(path), run_name="__main__")
                answers.append([None, shown.getvalue()])
            except SystemExit as ending:
                answers.append([ending.code, shown.getvalue()])
    print(json.dumps([path.name, answers]))
"""
"""In one process, which imports torch once."""


def test_benchmarks_have_help_and_refuse_unknown_arguments() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASK, *map(str, PROGRAMS)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    told = dict(map(json.loads, asked.stdout.splitlines()))
    assert list(told) == [path.name for path in PROGRAMS]
    for path in PROGRAMS:
        (helped, text), (refused, _) = told[path.name]
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert (helped, refused) == (0, 2), path
        assert docstring and docstring in text, path
        assert path.stem in SIDES or "--small" in text, path
