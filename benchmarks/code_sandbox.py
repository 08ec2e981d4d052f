"""The sandbox on all reference solutions of HumanEval and MBPP: each passes its tests, and fails them turned around.

Measured against the bound that 1,138 runs take at most 5 minutes on two cores.

    python benchmarks/code_sandbox.py --data DIR        # holds humaneval/ and mbpp/, as published
"""

import argparse
import ast
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from command_line import parse_arguments

from tandem.data.preprocess import CONVERTERS
from tandem.data.preprocess.convert import convert
from tandem.reward.rules.code import unit_tests

BOUND_S = 300


class TurnedAround(ast.NodeTransformer):
    """Every assertion fails where it held."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        return ast.Assert(ast.UnaryOp(ast.Not(), node.test), node.msg)


def turned_around(test: str) -> str:
    return ast.unparse(ast.fix_missing_locations(TurnedAround().visit(ast.parse(test))))


def read_rows(data: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as out:
        for name in ("humaneval", "mbpp"):
            convert(CONVERTERS[name], data / name, Path(out) / name)
            for path in sorted((Path(out) / name).glob("*.parquet")):
                rows += pq.read_table(path).to_pylist()
    return rows


def score_all(rows: list[dict[str, Any]], workers: int, turn: bool) -> tuple[list[dict[str, Any]], float]:
    """Verdicts and seconds of the reference solutions, `workers` at a time."""

    def score(row: dict[str, Any]) -> dict[str, Any]:
        truth = row["reward_model"]["ground_truth"]
        tests = [turned_around(test) for test in truth["tests"]] if turn else truth["tests"]
        return unit_tests(row["data_source"], row["extra_info"]["answer"], {**truth, "tests": tests})

    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as threads:
        verdicts = list(threads.map(score, rows))
    return verdicts, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, help="so many of them; default: all")
    arguments = parse_arguments(parser, rows=4)
    rows = read_rows(arguments.data)[: arguments.rows]
    verdicts, seconds = score_all(rows, arguments.workers, turn=False)
    turned, turned_seconds = score_all(rows, arguments.workers, turn=True)
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict["score"] != 1:
            print(row["data_source"], row["extra_info"]["index"], verdict["reason"])
    figures = {
        "solutions": len(rows),
        "pass": sum(verdict["score"] == 1 for verdict in verdicts),
        "pass_with_tests_turned_around": sum(verdict["score"] == 1 for verdict in turned),
        "seconds": round(seconds, 1),
        "seconds_turned_around": round(turned_seconds, 1),
        "ms_a_run_and_worker": round(1000 * seconds * arguments.workers / len(rows), 1),
    }
    baseline = {"bound_seconds": BOUND_S}
    print(
        json.dumps({"benchmark": "code_sandbox", "figures": figures, "baseline": baseline, "ratio": BOUND_S / seconds})
    )


if __name__ == "__main__":
    main()
