"""What grows with the number of engines, of a run's steps, of a data set's rows and of a step's tokens, and how fast.

    python benchmarks/scale.py [engines] [metrics] [rows] [tokens]      (ten minutes; 6 GiB of memory)

Each line is a program of its own: its CPU-seconds, how many of them the system took (most of that to hand out memory),
and its peak of memory, all less those of the same program with next to nothing to do, and the seconds over those of the
line above, where the size is four or ten times that one's: what is linear stays below the size's factor.

engines   a simulated run of eight steps (`tandem simulate`), four answers to a prompt and a prompt for each engine
metrics   `tandem runs` and the report of a run of so many steps with 43 metrics each
rows      the order of so many rows: 1,000 steps of 512 of them, over the end of an epoch
tokens    the controller's part of a PPO step on so many response tokens (`data_plane.py --samples`)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from command_line import parse_arguments

ROOT = Path(__file__).parents[1]
TANDEM = [sys.executable, "-m", "tandem"]
ROWS = """
import sys
from tandem.data.sampler import Sampler
rows = int(sys.argv[1])
sampler = Sampler(rows, 512, shuffle=True, seed=0)
sampler.cursor = max(0, rows - 512 * 500)
seen = [row for _ in range(1000) for row in next(sampler)]
assert 0 <= min(seen) and max(seen) < rows
"""


def engines(size: int, directory: Path) -> list[str]:
    config = {
        "model": {"path": "none"},
        "data": {"train_files": ["none"], "prompts_per_step": size},
        "algorithm": {"type": "grpo", "group_size": 4},
        "generation": {"max_response_tokens": 4096, "max_running": 8},
        "placement": {
            "pools": {"train": [size], "generate": [size]},
            "roles": {"actor": "train", "rollout": "generate"},
        },
        "trainer": {"run_dir": "none", "steps": 5, "max_staleness": 1},
    }
    path = directory / f"{size}.yaml"
    path.write_text(yaml.safe_dump(config))
    speeds = ["--iteration-ms", "12", "--train-s", "30", "--response-tokens", "600", "--steps", "8", "--staleness", "1"]
    return [*TANDEM, "simulate", str(path), *speeds]


def metrics(size: int, directory: Path) -> list[str]:
    run = run_of(size, directory)
    return [*TANDEM, "runs", str(run)]


def report(size: int, directory: Path) -> list[str]:
    run = run_of(size, directory)
    return [*TANDEM, "report", str(run)]


def run_of(size: int, directory: Path) -> Path:
    """A run's directory, as far as these commands look at it."""
    run = directory / "runs" / str(size)
    if not run.exists():
        run.mkdir(parents=True)
        config = {"model": {"path": "none"}, "data": {"train_files": ["none"]}, "trainer": {"run_dir": str(run)}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(1, size + 1):
                values = {f"part{number % 6}/metric_{number}": step / (number + 1) for number in range(43)}
                file.write(json.dumps({"step": step, **values}) + "\n")
    return run


def rows(size: int, _: Path) -> list[str]:
    return [sys.executable, "-c", ROWS, str(size)]


def tokens(size: int, _: Path) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks/data_plane.py"), "--samples", str(size // 4096), "--tokens", "4096"]


KINDS: dict[str, list[tuple[Callable[[int, Path], list[str]], int, tuple[int, ...]]]] = {
    "engines": [(engines, 4, (16, 64, 256, 1024, 4096))],
    "metrics": [(metrics, 1, (1_000, 10_000, 100_000)), (report, 1, (1_000, 10_000, 100_000))],
    "rows": [(rows, 1024, (1_000_000, 10_000_000, 100_000_000))],
    "tokens": [(tokens, 8 * 4096, (2**20, 2**22, 2**24))],
}
"""By what grows: the program, the size of next to nothing, the sizes."""


def measured(command: list[str], directory: Path) -> tuple[float, float, float]:
    """CPU-seconds, those of them in the system, and the peak of memory in MiB."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (directory / "output").open("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}:\n{output.read()}")
    return used.ru_utime + used.ru_stime, used.ru_stime, used.ru_maxrss / 1024


def lines(chosen: list[str], small: bool, directory: Path) -> Iterator[str]:
    for kind in chosen:
        for program, least, sizes in KINDS[kind]:
            empty_s, empty_system_s, empty_mib = measured(program(least, directory), directory)
            before: float | None = None
            for size in sizes[:1] if small else sizes:
                cpu_s, system_s, mib = measured(program(size, directory), directory)
                growth = "" if before is None else f"{(cpu_s - empty_s) / before:.1f}x"
                before = max(cpu_s - empty_s, 1e-3)
                seconds = f"{cpu_s - empty_s:.2f} | {growth} | {system_s - empty_system_s:.2f}"
                yield f"| {program.__name__} | {size:,} | {seconds} | {mib - empty_mib:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="default: all")
    arguments = parse_arguments(parser)
    print("| program | size | CPU-s | over the line above | of it the system | MiB |\n|" + 6 * " --- |")
    with tempfile.TemporaryDirectory() as directory:
        for line in lines(arguments.kinds or list(KINDS), arguments.small, Path(directory)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
