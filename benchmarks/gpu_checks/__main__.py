"""Checks of one GPU: what works, how fast, how exact, and how much memory it takes.

Each check is a process of its own with a limit: one that fails, hangs or is killed costs itself alone. Figures are on
the terminal and in OUT/figures.jsonl at once, what checks print is in OUT/output.log, and at the end come a summary and
OUT/table.md, a table for docs/benchmarks.md. Exit status 1: a check failed, was killed or ran out of its time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NoReturn

from gpu_checks.figures import BAD, OK, End, read
from gpu_checks.running import Check, Output, run, run_all
from gpu_checks.tables import markdown, of_kind, summary
from gpu_checks.wheels import ROOT, missing, wheel_report


def main() -> int:
    arguments = _arguments()
    if arguments.wheels:
        print("\n".join(wheel_report()))
        return 0
    if arguments.table:
        print("\n".join(markdown(read(arguments.table))))
        return 0
    if arguments.with_wheels:
        return _again_with_wheels(arguments.with_wheels)
    if needed := missing()["the package"]:
        print(f"not installed: {', '.join(needed)}; scripts/gpu --wheels says how to bring them", file=sys.stderr)
        return 2
    if arguments.list:
        from gpu_checks.listing import CHECKS

        print("\n".join(f"{check.name:<16}{check.limit_s:>5.0f} s  {check.purpose}" for check in CHECKS))
        return 0
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if arguments.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    arguments.out.mkdir(parents=True, exist_ok=True)
    output = Output(arguments.out.resolve())
    for path in (output.figures, output.log):
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as work:
        return _run(arguments, output, Path(work))


def _again_with_wheels(folder: Path) -> int:
    """This program once more, without the option, in a Python that finds what the wheels hold."""
    with tempfile.TemporaryDirectory() as site:
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", site]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *folder.glob("*.whl")], check=True)
        place = sys.argv.index("--with-wheels")
        command = [sys.executable, "-m", "gpu_checks", *sys.argv[1:place], *sys.argv[place + 2 :]]
        path = f"{site}{os.pathsep}{os.environ['PYTHONPATH']}"
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def _run(arguments: argparse.Namespace, output: Output, work: Path) -> int:
    from gpu_checks.listing import CHECKS
    from gpu_checks.machine import describe

    if unknown := set(arguments.only) - {check.name for check in CHECKS}:
        print(f"no check {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CHECKS)}", file=sys.stderr)
        return 2
    chosen = [check for check in CHECKS if not arguments.only or check.name in arguments.only]
    budget_s = arguments.budget or (360.0 if arguments.small else 600.0)
    try:
        first = Check("machine", 60, partial(describe, commit=arguments.commit or commit()))
        described = run(first, output, work, arguments.small, first.limit_s)
        if described.state != OK:
            print(f"{described.reason}; scripts/gpu --small tries the checks on a CPU", file=sys.stderr)
            return 2
        run_all(chosen, output, work, arguments.small, budget_s)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return _conclude(output, len(chosen))


def _conclude(output: Output, chosen: int) -> int:
    """The summary, the table, and the exit status."""
    records = read(output.figures)
    table = output.folder / "table.md"
    table.write_text("\n".join(markdown(records)) + "\n", encoding="utf-8")
    print("", *summary(records), f"{table} has the figures as a table", sep="\n", flush=True)
    ends = of_kind(records, End)
    return 1 if len(ends) < chosen or any(end.state in BAD for end in ends) else 0


def commit() -> str:
    """The revision that is checked out, and whether anything differs from it."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT, capture_output=True, text=True
    )
    return asked.stdout.strip() or "unknown"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="try the checks on a CPU: their figures say nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these checks; --list names them")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of all; default: 600, and 360 with --small")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="default: build/gpu")
    parser.add_argument("--commit", help="what the table is to say where there is no git")
    parser.add_argument("--list", action="store_true", help="print the checks, their limits, and what each measures")
    parser.add_argument("--wheels", action="store_true", help="print which packages are missing, and how to bring them")
    parser.add_argument("--with-wheels", type=Path, metavar="FOLDER", help="install the wheels there for this run")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a figures.jsonl")
    return parser.parse_args()


def _stopped(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stopped)
    sys.exit(main())
