"""Run every algorithm on sort4 and draw its curve: python examples/sort4/curves.py [NAME …] [--seeds 0 1 2]

An algorithm takes part when its page in docs/algorithms says how it is run, in a line that begins with `tandem train`.
Runs that are there are kept, so a second call only draws. Each seed has a warmed model of its own; all algorithms of a
seed start from it. Pictures go to docs/algorithms/curves, the result is a line of the page; scripts/pages.py makes the
table of docs/algorithms/README.md from these lines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path
from statistics import fmean

from task import make

from tandem.cli import main as tandem

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/algorithms"
COMMAND = re.compile(r"^    tandem train (recipes/sort4_.*)$", re.MULTILINE)

TEACHER = "grpo"
"""The algorithm whose runs are the teachers of those that learn from one."""


def commands() -> dict[str, list[str]]:
    """The arguments of `tandem train` by algorithm, from the pages that have them."""
    found = {page.stem: COMMAND.search(page.read_text(encoding="utf-8")) for page in sorted(PAGES.glob("*.md"))}
    return {name: shlex.split(command[1]) for name, command in found.items() if command}


def warm(runs: Path, seed: int) -> Path:
    """The model that the algorithms start from."""
    folder = runs / f"warm{seed}"
    model = folder / "sft/checkpoints/step_000350/model"
    if not model.exists():
        make(folder / "task", seed)
        files = [f"model.path={folder}/task/model", f"data.train_files=[{folder}/task/sft.jsonl]"]
        _tandem("sft", "recipes/sort4_sft.yaml", *files, f"trainer.run_dir={folder}/sft", f"trainer.seed={seed}")
    return model


def run(runs: Path, name: str, seed: int) -> list[dict[str, float]]:
    """The records of a run, which is made if it is not there."""
    folder = runs / f"{name}-{seed}"
    if not (folder / "report.html").exists():
        model, task = warm(runs, seed), runs / f"warm{seed}/task"
        files = [f"data.train_files=[{task}/train.jsonl]", f"data.val_files=[{task}/val.jsonl]"]
        where = [f"model.path={model}", *files, f"trainer.run_dir={folder}", f"trainer.seed={seed}"]
        recipe, *overrides = commands()[name]
        if "teacher_path:" in (ROOT / recipe).read_text(encoding="utf-8"):
            run(runs, TEACHER, seed)
            where.append(f"model.teacher_path={runs}/{TEACHER}-{seed}")
        _tandem("train", recipe, *where, "trainer.trajectories_every=0", *overrides)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _tandem(*arguments: str) -> None:
    if status := tandem(list(arguments)):
        sys.exit(status)


def pass_at_1(records: list[dict[str, float]]) -> list[float]:
    return [record["val/sort4/acc/mean@4"] for record in records if "val/sort4/acc/mean@4" in record]


def smoothed(records: list[dict[str, float]]) -> list[float]:
    """Mean reward of the last ten steps."""
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    return [fmean(rewards[max(step - 9, 0) : step + 1]) for step in range(len(rewards))]


def draw(name: str, curves: list[list[float]], steps: int) -> str:
    """The mean reward over training, a line a seed."""

    def line(curve: list[float]) -> str:
        places = (f"{40 + 340 * step / steps:.1f},{150 - 130 * value:.1f}" for step, value in enumerate(curve, 1))
        points = " ".join(places)
        return f'<polyline fill="none" stroke="#2563eb" stroke-opacity=".6" stroke-width="1.5" points="{points}"/>'

    title = f"{name}: mean reward of ten steps, over {steps} steps"
    grid = "".join(
        f'<line x1="40" x2="380" y1="{150 - 130 * y}" y2="{150 - 130 * y}" stroke="#ddd"/>'
        f'<text x="34" y="{154 - 130 * y}" text-anchor="end">{y:g}</text>'
        for y in (0, 0.5, 1)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="400" height="180" font-family="sans-serif" font-size="11">'
        f'<rect width="400" height="180" fill="#fff"/>{grid}{"".join(map(line, curves))}'
        f'<text x="210" y="174" text-anchor="middle">{title}</text></svg>\n'
    )


def result(seeds: list[list[dict[str, float]]]) -> str:
    """What came of an algorithm, from the records of its runs; scripts/pages.py reads it from the page."""
    steps = int(seeds[0][-1]["step"])
    curves = [smoothed(records) for records in seeds]
    reached = [next((step for step, value in enumerate(curve, 1) if value >= 0.8), steps) for curve in curves]
    before = fmean(pass_at_1(records)[0] for records in seeds)
    after = " ".join(f"{pass_at_1(records)[-1]:.3f}" for records in seeds)
    first = " ".join(map(str, reached))
    return f"pass@1 before {before:.3f}, after {after} ({steps} steps); a mean reward of 0.8 after {first} steps."


def write_result(page: Path, text: str) -> None:
    """Put the result and the picture below the page's command, in the place of earlier ones."""
    written = page.read_text(encoding="utf-8")
    command = COMMAND.search(written)
    assert command
    page.write_text(f"{written[: command.end()]}\n\n{text}\n\n![curve](curves/{page.stem}.svg)\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every algorithm on sort4, draw curves, write results to pages.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(commands())}; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/curves"))
    arguments = parser.parse_args()
    runs = arguments.runs.resolve()
    os.chdir(ROOT)  # recipes name their files from here
    (PAGES / "curves").mkdir(parents=True, exist_ok=True)
    for name in arguments.names or commands():
        seeds = [run(runs, name, seed) for seed in arguments.seeds]
        curves = [smoothed(records) for records in seeds]
        (PAGES / f"curves/{name}.svg").write_text(draw(name, curves, steps=int(seeds[0][-1]["step"])))
        write_result(PAGES / f"{name}.md", result(seeds))
        print(f"{name}: {result(seeds)}")


if __name__ == "__main__":
    main()
