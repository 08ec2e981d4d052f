"""Train SmolLM2-135M-Instruct by its recipes over seeds, and draw what it learns.

    python examples/smollm2/curves.py [sums] [lora] [form] [--seeds 0 1 2] [--steps N]

First scripts/smollm2, and the rows of sums.py and form.py. Runs that are there are kept, so a second call only draws.
A line for each: right answers to held-out prompts before and after, minutes. The picture is docs/curves/smollm2.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[2]
RUNS: dict[str, tuple[str, str, list[str]]] = {
    "sums": ("smollm2_sums", "#2563eb", []),
    "lora": ("smollm2_sums", "#d97706", ["model.lora={rank: 16, alpha: 32}", "training.optimizer.lr=3e-4"]),
    "form": ("smollm2_form", "#059669", []),
}
"""By name: the recipe, the colour of its lines, and what is changed of it."""


def run(runs: Path, name: str, seed: int, overrides: list[str]) -> list[dict[str, Any]]:
    """The records of a run, which is made if it is not there."""
    recipe, _, changed = RUNS[name]
    folder = runs / f"{name}-{seed}"
    if not (folder / "report.html").exists():
        command = [sys.executable, "-m", "tandem", "train", f"recipes/{recipe}.yaml", f"trainer.run_dir={folder}"]
        begun = time.monotonic()
        subprocess.run([*command, f"trainer.seed={seed}", *changed, *overrides], check=True)
        (folder / "minutes").write_text(f"{(time.monotonic() - begun) / 60:.1f}\n")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def held_out(records: list[dict[str, Any]]) -> list[float]:
    """The share of right answers, validation by validation."""
    return [value for record in records for name, value in record.items() if "/acc/mean@" in name]


def rewards(records: list[dict[str, Any]]) -> list[float]:
    """The mean reward of the last five steps, step by step."""
    found = [record["reward/mean"] for record in records if "reward/mean" in record]
    return [fmean(found[max(step - 4, 0) : step + 1]) for step in range(len(found))]


def draw(curves: dict[str, list[list[float]]]) -> str:
    """The mean reward over steps, a line a seed."""
    steps = max(len(seed) for seeds in curves.values() for seed in seeds)
    parts = [
        f'<line x1="40" x2="480" y1="{190 - 170 * y}" y2="{190 - 170 * y}" stroke="#ddd"/>'
        f'<text x="34" y="{194 - 170 * y}" text-anchor="end">{y:g}</text>'
        for y in (0, 0.25, 0.5, 0.75, 1)
    ]
    for number, (name, seeds) in enumerate(curves.items()):
        colour = RUNS[name][1]
        parts.append(f'<text x="440" y="{130 + 14 * number}" fill="{colour}">{name}</text>')
        for seed in seeds:
            places = " ".join(f"{40 + 440 * step / steps:.1f},{190 - 170 * y:.1f}" for step, y in enumerate(seed, 1))
            stroke = f'stroke="{colour}" stroke-opacity=".7" stroke-width="1.5"'
            parts.append(f'<polyline fill="none" {stroke} points="{places}"/>')
    title = f"SmolLM2-135M-Instruct: mean reward of five steps, over {steps} steps"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="500" height="220" font-family="sans-serif" font-size="11">'
        f'<rect width="500" height="220" fill="#fff"/>{"".join(parts)}'
        f'<text x="260" y="214" text-anchor="middle">{title}</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []], metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="fewer than the recipe's")
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2-curves"))
    parser.add_argument("--out", type=Path, default=ROOT / "docs/curves/smollm2.svg")
    arguments = parser.parse_args()
    runs, out = arguments.runs.resolve(), arguments.out.resolve()
    os.chdir(ROOT)  # recipes name their files from here
    overrides = [f"trainer.steps={arguments.steps}"] if arguments.steps else []
    curves: dict[str, list[list[float]]] = {}
    for name in arguments.names or list(RUNS):
        for seed in arguments.seeds:
            records = run(runs, name, seed, overrides)
            right, minutes = held_out(records), (runs / f"{name}-{seed}/minutes").read_text().strip()
            print(f"{name}, seed {seed}: {' '.join(f'{value:.4f}' for value in right)}, {minutes} min", flush=True)
            curves.setdefault(name, []).append(rewards(records))
    out.write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
