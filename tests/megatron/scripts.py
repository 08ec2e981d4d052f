"""Runs the scripts of these tests, each in a fork of one process that has imported what all of them need.

    python scripts.py < one JSON list a line: a script's name and the arguments of its `main`

A line with the exit status of each follows on the standard output.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tandem.training.megatron.engine  # noqa: F401
from tests.megatron import contract, layouts, planned, publish

SCRIPTS: dict[str, Callable[..., None]] = {
    "contract": contract.main,
    "layouts": layouts.main,
    "planned": planned.main,
    "publish": publish.main,
}


def run(name: str, arguments: list[Any]) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # which is for exit statuses alone
    SCRIPTS[name](*arguments)


def main() -> None:
    warnings.simplefilter("ignore")  # Megatron-Core's, of what this machine has not
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        process = fork.Process(target=run, args=(name, arguments))
        process.start()
        process.join()
        print(process.exitcode, flush=True)


if __name__ == "__main__":
    main()
