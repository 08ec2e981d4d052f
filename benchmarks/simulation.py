"""Step times of real runs, and what `tandem simulate` says of them from a run with trainer.max_staleness: 0.

    python benchmarks/simulation.py [--steps 24] [--rounds 3]      (two cores; ten minutes)

A tiny model that has learned nothing answers sort4's prompts: it ends an answer at any token with the same chance, so
lengths are geometric, 100 tokens on average, up to 384. Speeds and lengths are measured in the run with k = 0, once
with generation and training on a process each and once on one process; the runs with other k are predicted from them.
All runs are repeated, and of each the fastest counts, the one that other work on the machine has disturbed least. The
reward is of the length, so that no row is left out of training; the learning rate is as good as zero, so that lengths
stay.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from command_line import parse_arguments

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples/sort4"))

from task import make  # noqa: E402

from tandem.cli import main as tandem  # noqa: E402
from tandem.config.load import load_config  # noqa: E402
from tandem.config.tree import TrainConfig  # noqa: E402
from tandem.simulation.options import Options, setup_of  # noqa: E402
from tandem.simulation.simulated_run import simulate  # noqa: E402
from tandem.tracking.jsonl import read_metrics  # noqa: E402

SPLIT = ["placement.pools={a: [1], g: [1]}", "placement.roles={rollout: g}"]
RUNS = {
    "split, k = 0": [*SPLIT, "trainer.max_staleness=0"],
    "split, k = 1": [*SPLIT, "trainer.max_staleness=1"],
    "split, k = 2": [*SPLIT, "trainer.max_staleness=2"],
    "time-shared, k = 0": ["trainer.max_staleness=0"],
    "time-shared, k = 1": ["trainer.max_staleness=1"],
}
WARM_UP = 5
"""Steps that are not counted: memory is allocated, and the first groups are made ahead."""
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n"
)


def settings(folder: Path, name: str, steps: int, more: Sequence[str]) -> list[str]:
    """The configuration of a run."""
    return [
        f"model.path={folder}/task/model",
        f"data.train_files=[{folder}/task/train.jsonl]",
        "data.val_files=[]",
        "generation.max_response_tokens=384",
        "generation.eval={}",
        "training.optimizer.lr=1e-9",
        f'reward.functions=["{folder}/reward.py:compute_score"]',
        "reward.workers=1",
        f"trainer.run_dir={folder}/{name.replace(' ', '').replace(',', '-')}",
        f"trainer.steps={steps}",
        "trainer.eval_every=0",
        *RUNS[name],
        *more,
    ]


def step_time(times: Sequence[float], staleness: int) -> float:
    """The median over windows of steps, whose mean it is, in seconds: with k, k + 1 steps may get their groups at once,
    and wait for the next together."""
    size = 2 * (staleness + 1)
    return median(fmean(times[first : first + size]) for first in range(WARM_UP, len(times) - size + 1))


def measured_times(run_dir: Path) -> list[float]:
    return [record["time/step_s"] for record in read_metrics(run_dir / "metrics.jsonl")]


def predict(config: TrainConfig, measured: Path, steps: int) -> float:
    outcome = simulate(config, setup_of(Options(run=measured), config), steps)
    return step_time(outcome.step_times_s, config.trainer.max_staleness)


def run(folder: Path, name: str, steps: int, more: Sequence[str]) -> TrainConfig:
    """Train, where that is not done yet."""
    recipe, overrides = ROOT / "recipes/sort4_grpo.yaml", settings(folder, name, steps, more)
    config = load_config(TrainConfig, recipe, overrides)
    if not (config.trainer.run_dir / "report.html").exists() and tandem(["train", str(recipe), *overrides]):
        sys.exit(1)
    return config


def real_time(config: TrainConfig) -> float:
    return step_time(measured_times(config.trainer.run_dir), config.trainer.max_staleness)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3, help="of all runs; of each the fastest counts")
    parser.add_argument("--folder", type=Path, help="where the runs stay; those that are there are kept")
    parser.add_argument("more", nargs="*", help="section.key=value")
    given = parse_arguments(parser, steps=12, rounds=1)
    with tempfile.TemporaryDirectory() as temporary:
        rounds = [(given.folder or Path(temporary)) / f"round{number}" for number in range(given.rounds)]
        configs: dict[str, list[TrainConfig]] = {name: [] for name in RUNS}
        for folder in rounds:
            if not (folder / "task").exists():
                make(folder / "task", 0)
            (folder / "reward.py").write_text(REWARD)
            for name, all_of_them in configs.items():
                all_of_them.append(run(folder, name, given.steps, given.more))
        fastest = {name: min(all_of_them, key=real_time) for name, all_of_them in configs.items()}
        print(f"{'':20} {'predicted s':>12} {'measured s':>12} {'off':>7}   all rounds")
        for name, config in fastest.items():
            measured = fastest[f"{name.partition(',')[0]}, k = 0"]
            predicted, real = predict(config, measured.trainer.run_dir, 60), real_time(config)
            every = ", ".join(f"{real_time(one):.3f}" for one in configs[name])
            print(f"{name:20} {predicted:12.3f} {real:12.3f} {predicted / real - 1:+7.1%}   {every}")


if __name__ == "__main__":
    main()
