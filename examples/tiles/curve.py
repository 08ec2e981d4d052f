"""Fine-tune and train a model that sees pictures on tiles, and draw its curve: python examples/tiles/curve.py

A seed has a task, a model and two runs of its own (`--seeds 0 1 2`); `--overrides model.vision_tower=frozen` goes to
GRPO. The curve of docs/pictures.md is docs/curves/tiles.svg. Runs that are there are kept, so a second call only draws.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tandem.cli import main as tandem

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples/sort4")]
from curves import draw, smoothed  # noqa: E402

from examples.tiles.task import make  # noqa: E402

ACCURACY = "val/tiles/acc/mean@4"


def run(folder: Path, family: str, seed: int, overrides: list[str]) -> list[dict[str, float]]:
    """The records of GRPO, after fine-tuning."""
    task, model = folder / "task", folder / "sft/checkpoints/step_000130/model"
    if not model.exists():
        make(task, family, seed)
        files = [f"model.path={task}/model", f"data.train_files=[{task}/sft.jsonl]"]
        _tandem("sft", "recipes/tiles_sft.yaml", *files, f"trainer.run_dir={folder}/sft", f"trainer.seed={seed}")
    if not (folder / "grpo/report.html").exists():
        files = [f"data.train_files=[{task}/train.jsonl]", f"data.val_files=[{task}/val.jsonl]"]
        where = [f"model.path={model}", *files, f"trainer.run_dir={folder}/grpo", f"trainer.seed={seed}"]
        _tandem("train", "recipes/tiles_grpo.yaml", *where, *overrides)
    return [json.loads(line) for line in (folder / "grpo/metrics.jsonl").read_text().splitlines()]


def _tandem(*arguments: str) -> None:
    if status := tandem(list(arguments)):
        sys.exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen2_5_vl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=Path("runs/tiles/curve"))
    parser.add_argument("--out", type=Path, default=ROOT / "docs/curves/tiles.svg")
    arguments = parser.parse_args()
    runs, out = arguments.runs.resolve(), arguments.out.resolve()
    os.chdir(ROOT)  # recipes name their files from here
    seeds = [
        run(runs / f"{arguments.family}-{seed}", arguments.family, seed, arguments.overrides)
        for seed in arguments.seeds
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    curves = [smoothed(records) for records in seeds]
    out.write_text(draw("GRPO on tiles", curves, steps=int(seeds[0][-1]["step"])))
    for seed, records in zip(arguments.seeds, seeds, strict=True):
        accuracies = [record[ACCURACY] for record in records if ACCURACY in record]
        print(f"seed {seed}: {ACCURACY} {' '.join(f'{accuracy:.3f}' for accuracy in accuracies)}")


if __name__ == "__main__":
    main()
