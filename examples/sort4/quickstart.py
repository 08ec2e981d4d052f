"""From nothing to a model that learned: make sort4, warm a tiny model, improve it by reinforcement learning.

    python examples/sort4/quickstart.py [--seed N] [--algorithm grpo|ppo] [--engine native|vllm] [--run-dir DIR]

`DIR` becomes the run (metrics, trajectories, checkpoints, report.html) with `summary.json` beside them;
`DIR-warmup` holds the task and the supervised run. A former quickstart's two directories are replaced, but not a run
that has gone on after it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from task import make

from tandem.cli import main as tandem
from tandem.errors import UserError
from tandem.files import write_text

ROOT = Path(__file__).parents[2]
SAMPLES = 4
"""Answers a prompt at temperature 1, whose mean is pass@1."""

Accuracies = dict[str, float]


class CommandFailed(Exception):
    """A tandem command said what was wrong and ended with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Quickstart:
    """One quickstart: where it is, and how long its parts took."""

    algorithm: str
    seed: int
    run_dir: Path
    engine: str = "native"
    """Of generation in the reinforcement-learning part."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def warmup_dir(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}-warmup")

    @contextmanager
    def part(self, name: str, what: str) -> Iterator[None]:
        print(f"\n== {what}", flush=True)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 2)

    def run(self) -> None:
        self._clear()
        print(self._plan(), flush=True)
        task = self.warmup_dir / "task"
        with self.part("task", "Make the task: a tiny model, its tokenizer, demonstrations and prompts"):
            make(task, self.seed)
        with self.part("sft", "Warm it: supervised fine-tuning on answers of which a third is right"):
            self._sft(task)
        with self.part("eval_before", "Before: held-out prompts"):
            before = self._evaluate(_latest_model(self.warmup_dir / "sft"))
        with self.part("train", f"Improve it: {self.algorithm.upper()}"):
            self._train()
        with self.part("eval_after", "After: held-out prompts"):
            after = self._evaluate(_latest_model(self.run_dir))
        self._report(before, after, prompts=len((task / "val.jsonl").read_text().splitlines()))

    def _plan(self) -> str:
        """What is trained, in the recipes' numbers."""
        sft, rl = map(self._recipe_of, ("sft", self.algorithm))
        answers = f"{rl['data']['prompts_per_step']} prompts x {rl['algorithm']['group_size']} answers"
        return (
            "quickstart: a Qwen2 of 0.14 million parameters learns to sort four digits, as 4821= -> 1248\n"
            f"  1. fine-tuning: {sft['trainer']['steps']} steps of {sft['data']['rows_per_step']} demonstrations\n"
            f"  2. {self.algorithm.upper()}: {rl['trainer']['steps']} steps of {answers}\n"
            f"  into {self.run_dir}; minutes on two CPU cores"
        )

    @staticmethod
    def _recipe_of(name: str) -> dict[str, Any]:
        return yaml.safe_load(Path(f"recipes/sort4_{name}.yaml").read_text())

    def _clear(self) -> None:
        """Remove a former quickstart's directories; raises UserError when they are something else."""
        warmup, run = self.warmup_dir, self.run_dir
        if warmup.exists() and not {entry.name for entry in warmup.iterdir()} <= {"task", "sft"}:
            raise UserError(f"{warmup}: not made by the quickstart; give another --run-dir")
        if run.exists() and any(run.iterdir()) and not _trained_from(run, warmup):
            raise UserError(f"{run}: not made by the quickstart; give another --run-dir")
        steps = self._recipe_of(_algorithm_of(run) or self.algorithm)["trainer"]["steps"]
        if (newest := _newest_step(run)) > steps:
            raise UserError(
                f"{run}: its run went on to step {newest}, after the quickstart's {steps}; give another --run-dir, or "
                "move it away"
            )
        for directory in (run, warmup):
            shutil.rmtree(directory, ignore_errors=True)

    def _sft(self, task: Path) -> None:
        _tandem(
            "sft",
            "recipes/sort4_sft.yaml",
            f"model.path={task / 'model'}",
            f"data.train_files=[{task / 'sft.jsonl'}]",
            f"trainer.run_dir={self.warmup_dir / 'sft'}",
            f"trainer.seed={self.seed}",
        )

    def _train(self) -> None:
        model = _latest_model(self.warmup_dir / "sft")
        _tandem("train", *self._recipe(model), f"trainer.run_dir={self.run_dir}", f"trainer.seed={self.seed}")

    def _evaluate(self, model: Path) -> Accuracies:
        sampling = {"pass_at_1": (1.0, SAMPLES), "greedy": (0.0, 1)}
        return {name: self._accuracy(model, *how) for name, how in sampling.items()}

    def _accuracy(self, model: Path, temperature: float, samples: int) -> float:
        out = self.warmup_dir / "task" / "accuracy.json"
        how = [f"generation.eval.temperature={temperature}", f"generation.eval.samples={samples}"]
        _tandem("eval", *self._recipe(model), *how, f"seed={self.seed}", f"--out={out}")
        return json.loads(out.read_text())[f"val/sort4/acc/mean@{samples}"]

    def _recipe(self, model: Path) -> list[str]:
        task = self.warmup_dir / "task"
        return [
            f"recipes/sort4_{self.algorithm}.yaml",
            f"model.path={model}",
            f"data.train_files=[{task / 'train.jsonl'}]",
            f"data.val_files=[{task / 'val.jsonl'}]",
            f"generation.type={self.engine}",
        ]

    def _report(self, before: Accuracies, after: Accuracies, prompts: int) -> None:
        from tandem.tracking.report import write_report

        summary = {
            "seed": self.seed,
            "algorithm": self.algorithm,
            "prompts": prompts,
            "before": before,
            "after": after,
            "seconds": {**self.seconds, "total": round(sum(self.seconds.values()), 2)},
        }
        write_text(self.run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        report = write_report(self.run_dir)
        print(f"\n{prompts} held-out prompts        before  after")
        for name, title in (("pass_at_1", "pass@1 at temperature 1"), ("greedy", "greedy accuracy")):
            print(f"{title:<26} {before[name]:>7.3f} {after[name]:>6.3f}")
        print("of answers drawn anew; `tandem runs` shows the run's own validations, whose answers are others")
        print(f"report: {report}\nmodel:  {_latest_model(self.run_dir)}")


def _tandem(*arguments: str) -> None:
    """A tandem command in this process, which has paid for its imports already."""
    status = tandem(arguments)
    if status:
        raise CommandFailed(status)


def _latest_model(run_dir: Path) -> Path:
    checkpoints = run_dir / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text().strip() / "model"


def _trained_from(run_dir: Path, warmup_dir: Path) -> bool:
    config = run_dir / "config.yaml"
    try:
        tree = yaml.safe_load(config.read_text())
        return Path(tree["model"]["path"]).is_relative_to(warmup_dir.absolute()) and bool(tree["algorithm"]["type"])
    except (OSError, yaml.YAMLError, TypeError, KeyError):
        return False


def _algorithm_of(run_dir: Path) -> str | None:
    """Of the quickstart that made the run; None: there is none."""
    config = run_dir / "config.yaml"
    return yaml.safe_load(config.read_text())["algorithm"]["type"] if config.is_file() else None


def _newest_step(run_dir: Path) -> int:
    """Of its checkpoints; 0: it has none."""
    names = (path.name.removeprefix("step_") for path in (run_dir / "checkpoints").glob("step_*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make sort4, warm a tiny model, improve it by reinforcement learning.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native", help="vllm: see scripts/vllm-env")
    parser.add_argument("--run-dir", type=Path, help="default: runs/quickstart, with ppo runs/quickstart-ppo")
    arguments = parser.parse_args()
    name = "quickstart" if arguments.algorithm == "grpo" else f"quickstart-{arguments.algorithm}"
    run_dir = arguments.run_dir.resolve() if arguments.run_dir else Path("runs", name)
    os.chdir(ROOT)  # recipes name their files from here
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        Quickstart(arguments.algorithm, arguments.seed, run_dir, arguments.engine).run()
    except UserError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    except CommandFailed as error:
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
