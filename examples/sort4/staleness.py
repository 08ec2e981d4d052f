"""Run GRPO on sort4 at several `trainer.max_staleness`, for 150 steps, and draw pass@1 over them:

    python examples/sort4/staleness.py [--staleness 0 1 4] [--seeds 0 1 2] [--no-control]

Each seed has a warmed model of its own, that of `curves.py`. The control shows that answers of older weights are no
matter of course: k = 4 without the clip around the engine's log-probs and without an importance weight, which a
configuration is refused for. Runs that are there are kept, so a second call only draws. The picture goes to
docs/algorithms/curves/staleness.svg; a table is printed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import fmean

from curves import PAGES, ROOT, pass_at_1, warm

import tandem
from tandem.tracking.jsonl import read_metrics
from tandem.types import StepMetrics

STEPS, EVAL_EVERY = 150, 25
CONTROL = "control"
COLORS = ("#2563eb", "#059669", "#d97706", "#7c3aed")
CONTROL_COLOR = "#dc2626"


def configuration(folder: Path, model: Path, task: Path, seed: int, staleness: int) -> tandem.TrainConfig:
    """GRPO at `trainer.max_staleness: staleness`, in `folder`."""
    return tandem.load_config(
        tandem.TrainConfig,
        ROOT / "recipes/sort4_grpo.yaml",
        [
            f"model.path={model}",
            f"data.train_files=[{task}/train.jsonl]",
            f"data.val_files=[{task}/val.jsonl]",
            f"reward.functions=[{ROOT}/examples/sort4/reward.py:compute_score]",
            f"trainer.run_dir={folder}",
            f"trainer.seed={seed}",
            f"trainer.steps={STEPS}",
            f"trainer.eval_every={EVAL_EVERY}",
            f"trainer.max_staleness={staleness}",
            "trainer.trajectories_every=0",
            "generation.max_running=1024",  # room for every prompt that is admitted: answers as old as they may be
        ],
    )


def uncorrected(config: tandem.TrainConfig) -> tandem.TrainConfig:
    """The same with nothing that corrects for older weights: a copy, for a configuration that says so is refused."""
    algorithm = config.algorithm
    correction = algorithm.rollout_correction.model_copy(update={"skip_old_logprobs": False})
    return config.model_copy(update={"algorithm": algorithm.model_copy(update={"rollout_correction": correction})})


def records(runs: Path, name: str, seed: int) -> list[StepMetrics]:
    """The records of a run, which is made if it is not there; `name`: the staleness, or `control`."""
    folder = runs / f"staleness-{name}-{seed}"
    if not (folder / "report.html").exists():
        model, staleness = warm(runs, seed), 4 if name == CONTROL else int(name)
        config = configuration(folder, model, runs / f"warm{seed}/task", seed, staleness)
        tandem.train(uncorrected(config) if name == CONTROL else config)
    return read_metrics(folder / "metrics.jsonl")


def draw(curves: dict[str, list[list[float]]]) -> str:
    """pass@1 over the steps, a colour a staleness, a line a seed."""
    colors = dict(zip([name for name in curves if name != CONTROL], COLORS, strict=False)) | {CONTROL: CONTROL_COLOR}
    parts = [
        f'<line x1="40" x2="470" y1="{190 - 170 * y}" y2="{190 - 170 * y}" stroke="#ddd"/>'
        f'<text x="34" y="{194 - 170 * y}" text-anchor="end">{y:g}</text>'
        for y in (0, 0.25, 0.5, 0.75, 1)
    ]
    for place, (name, seeds) in enumerate(curves.items()):
        for curve in seeds:
            step = 430 / (len(curve) - 1)
            points = " ".join(f"{40 + step * at:.1f},{190 - 170 * value:.1f}" for at, value in enumerate(curve))
            parts.append(f'<polyline fill="none" stroke="{colors[name]}" stroke-width="1.5" points="{points}"/>')
        label = "k = 4, nothing corrects" if name == CONTROL else f"k = {name}"
        parts.append(f'<text x="{50 + 70 * place}" y="226" fill="{colors[name]}">{label}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="480" height="236" font-family="sans-serif" font-size="11">'
        f'<rect width="480" height="236" fill="#fff"/>{"".join(parts)}'
        f'<text x="255" y="206" text-anchor="middle">sort4: pass@1 over {STEPS} steps, a line a seed</text></svg>\n'
    )


def row(name: str, runs: list[list[StepMetrics]]) -> str:
    """The row of the table: pass@1 before and after, the staleness that there was, mean and most."""
    after = [pass_at_1(run)[-1] for run in runs]
    each = " ".join(f"{value:.3f}" for value in after)
    mean, most = (
        [value for run in runs for record in run if (value := record.get(f"rollout/staleness/{which}")) is not None]
        for which in ("mean", "max")
    )
    stale = f"{fmean(mean):.2f}, {max(most, default=0):.0f}"
    before = fmean(pass_at_1(run)[0] for run in runs)
    return f"| {name} | {before:.3f} | {fmean(after):.3f} ({each}) | {stale} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run sort4 at several trainer.max_staleness, draw the curves.")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs/curves"))
    arguments = parser.parse_args()
    directory = arguments.runs.resolve()
    os.chdir(ROOT)  # recipes name their files from here
    names = [*map(str, arguments.staleness), *([] if arguments.no_control else [CONTROL])]
    curves: dict[str, list[list[float]]] = {}
    for name in names:
        runs = [records(directory, name, seed) for seed in arguments.seeds]
        curves[name] = [pass_at_1(run) for run in runs]
        print(row(name, runs), flush=True)
    (PAGES / "curves/staleness.svg").write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
