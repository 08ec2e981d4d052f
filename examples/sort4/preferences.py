"""sort4 from pairs of answers: python examples/sort4/preferences.py [kto …] [key=value …] [--seeds 0 1 2] [--runs DIR]

A pair is the right answer to a question, and one with two neighbours swapped. Each seed's warmed model, which is right
in a third of its answers, is trained by recipes/sort4_<loss>.yaml; every 25 steps it answers 256 questions that are in
no pair, four times each. Runs that are there are kept. The picture is docs/algorithms/curves/preferences.svg.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from curves import ROOT, _tandem, pass_at_1, warm
from task import answer, split_prompts, write_rows

LOSSES = {"kto": "#d97706", "orpo": "#059669"}
"""And the colours of their lines."""
PICTURE = ROOT / "docs/algorithms/curves/preferences.svg"


def pairs(digits: list[str]) -> Iterator[dict[str, str]]:
    """`prompt` / `chosen` / `rejected` rows, one for each two neighbours that may be swapped."""
    for asked in digits:
        right = answer(asked)
        for i in range(len(right) - 1):
            wrong = right[:i] + right[i + 1] + right[i] + right[i + 2 :]
            yield {"prompt": f"{asked}=", "chosen": right, "rejected": wrong}


def curve(runs: Path, loss: str, seed: int, overrides: list[str]) -> list[float]:
    """pass@1 before training, and after every 25 steps."""
    model, folder = warm(runs, seed), runs / f"preferences-{loss}-{seed}"
    if not (folder / "report.html").exists():
        for part, digits in zip(("train", "val"), split_prompts(seed), strict=True):
            write_rows(runs / f"warm{seed}/pairs_{part}.jsonl", pairs(digits))
        rows = [f"data.{part}_files=[{runs}/warm{seed}/pairs_{part}.jsonl]" for part in ("train", "val")]
        run = [
            f"model.path={model}",
            *rows,
            f"trainer.run_dir={folder}",
            f"trainer.seed={seed}",
            "trainer.keep_last=1000",
        ]
        _tandem("dpo", f"recipes/sort4_{loss}.yaml", *run, "trainer.keep_last=1000", *overrides)
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    return [_evaluated(runs, seed, at) for at in (model, *(checkpoint / "model" for checkpoint in checkpoints))]


def _evaluated(runs: Path, seed: int, model: Path) -> float:
    out = model.parent / "sort4.json"
    if not out.exists():
        rows = f"data.val_files=[{runs}/warm{seed}/task/val.jsonl]"
        _tandem("eval", "recipes/sort4_grpo.yaml", f"model.path={model}", rows, "--out", str(out))
    return pass_at_1([json.loads(out.read_text(encoding="utf-8"))])[0]


def draw(curves: dict[str, list[list[float]]]) -> str:
    """pass@1 over steps, a line a seed."""
    steps = 25 * (len(next(iter(curves.values()))[0]) - 1)
    parts = [
        f'<line x1="40" x2="380" y1="{150 - 130 * y}" y2="{150 - 130 * y}" stroke="#ddd"/>'
        f'<text x="34" y="{154 - 130 * y}" text-anchor="end">{y:g}</text>'
        for y in (0, 0.5, 1)
    ]
    for number, (loss, seeds) in enumerate(curves.items()):
        parts.append(f'<text x="{330}" y="{100 + 14 * number}" fill="{LOSSES[loss]}">{loss}</text>')
        for values in seeds:
            places = (f"{40 + 340 * 25 * k / steps:.1f},{150 - 130 * value:.1f}" for k, value in enumerate(values))
            stroke = f'stroke="{LOSSES[loss]}" stroke-opacity=".7" stroke-width="1.5"'
            parts.append(f'<polyline fill="none" {stroke} points="{" ".join(places)}"/>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="400" height="180" font-family="sans-serif" font-size="11">'
        f'<rect width="400" height="180" fill="#fff"/>{"".join(parts)}'
        f'<text x="210" y="174" text-anchor="middle">pass@1 of sort4 over {steps} steps on pairs</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on pairs of answers to sort4, draw pass@1.")
    parser.add_argument(
        "arguments", nargs="*", metavar="LOSS | key=value", help=f"of {', '.join(LOSSES)}; default: all"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/curves"))
    given = parser.parse_args()
    overrides = [one for one in given.arguments if "=" in one]
    losses = [one for one in given.arguments if "=" not in one] or list(LOSSES)
    runs = given.runs.resolve()
    os.chdir(ROOT)  # recipes name their files from here
    curves = {loss: [curve(runs, loss, seed, overrides) for seed in given.seeds] for loss in losses}
    for loss, seeds in curves.items():
        for seed, values in zip(given.seeds, seeds, strict=True):
            print(f"{loss}, seed {seed}: pass@1 {' '.join(f'{value:.3f}' for value in values)}")
    if losses == list(LOSSES) and not overrides:
        PICTURE.write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
