"""CPU-seconds of one GRPO step: Tandem against TRL 1.16's GRPOTrainer (transformers generation), one thread each.

The same warmed model, prompts, 16 prompts x 8 samples, temperature 1, AdamW, clip 0.2, token mean, no KL. Two tasks of
examples/sort4: `sort4` (responses of about 5 tokens) and `skewed` (a fifth of them long, 256 at most). Both sides run
in processes of their own, in turn, and count the CPU time of all their children. Tandem keeps its ordinary outputs
(metrics, trajectories); TRL's logging, saving and activation checkpointing are off. The side `trl_defaults` is TRL with
its own defaults for logging and activation checkpointing.

    python benchmarks/grpo_step.py [--tasks sort4 skewed] [--rounds 3] [--steps N] [--workdir DIR]

Needs TRL 1.16.0: pip install -e '.[bench]', or --trl-path DIR of a separate installation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from command_line import parse_arguments

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples/sort4"), str(ROOT / "benchmarks")]

INSTALL = "TRL 1.16.0 is not installed; install it with: pip install 'trl==1.16.0' accelerate"
STEPS = {"sort4": 70, "skewed": 12}
ROWS = 128
"""Trajectories a step: 16 prompts x 8."""
WARM_ROWS, WARM_LONG_ROWS = 128, 4


@dataclass(frozen=True)
class Figures:
    """What one side measured: means over the steps after the warm-up."""

    cpu_s: float
    response_tokens: float
    """Mean length of a response, end token included."""
    reward: float

    @property
    def cpu_us_per_token(self) -> float:
        return self.cpu_s * 1e6 / (ROWS * self.response_tokens)


@dataclass(frozen=True)
class Job:
    """One side, one task."""

    side: str
    task: str
    workdir: Path
    steps: int
    warmup: int
    seed: int

    @property
    def max_response_tokens(self) -> int:
        return 8 if self.task == "sort4" else 256

    @property
    def lr(self) -> float:
        """Small on the skewed task, so that response lengths stay what they are: they decide the cost."""
        return 3e-4 if self.task == "sort4" else 1e-5

    @property
    def model(self) -> Path:
        return self.workdir / self.task / "warmed"


def cpu_seconds() -> float:
    """CPU time of this process and its children so far, gone ones too."""
    import psutil

    here = psutil.Process()
    own = here.cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    return total + sum(sum(child.cpu_times()[:4]) for child in here.children(recursive=True))


def warm(directory: Path, skewed: bool, steps: int) -> None:
    """Supervised fine-tuning in plain torch: the model that both sides start from."""
    import task
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task.make(directory, seed=0, skewed=skewed)
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_warm_lr, steps))
    rows = [json.loads(line) for line in (directory / "sft.jsonl").read_text().splitlines()]
    for batch in _warm_batches(rows, steps):
        loss = sum(share * _answer_loss(model, tokenizer, part) for share, part in batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(directory / "warmed.new")
    tokenizer.save_pretrained(directory / "warmed.new")
    (directory / "warmed.new").rename(directory / "warmed")


def _warm_lr(steps: int, step: int) -> float:
    """30 steps up, then a cosine down to a tenth."""
    from math import cos, pi

    return min(1.0, (step + 1) / 30) * (0.55 + 0.45 * cos(pi * step / steps))


def _warm_batches(rows: list[dict[str, str]], steps: int) -> Iterator[list[tuple[float, list[dict[str, str]]]]]:
    """(share, rows) of short and of long answers. Few long ones suffice: their weight makes up for it."""
    short = [row for row in rows if len(row["completion"]) == 4]
    long = [row for row in rows if len(row["completion"]) > 4]
    share = len(long) / len(rows)
    for step in range(steps):
        start = step * WARM_ROWS % len(short)
        batch = [(1 - share, short[start : start + WARM_ROWS])]
        if long:
            start = step * WARM_LONG_ROWS % len(long)
            batch.append((share, long[start : start + WARM_LONG_ROWS]))
        yield batch


def _answer_loss(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> Any:
    """Cross-entropy of the answers and their ends, a mean over rows; filler counts little, so that answers matter."""
    from torch.nn.functional import cross_entropy

    texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rows]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    targets = encoded.input_ids[:, 1:]
    logits = model(**encoded).logits[:, :-1]
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none") * encoded.attention_mask[:, 1:]
    answer = slice(len(rows[0]["prompt"]) - 1, len(rows[0]["prompt"]) + 4)
    return (losses[:, answer].sum() + 0.1 * losses[:, answer.stop :].sum()) / (5 * len(rows))


def tandem_steps(job: Job) -> Figures:
    """The public loop with all its ordinary outputs, from the recipe that the quickstart uses."""
    from tandem.cluster.inline import InlineCluster
    from tandem.config.load import load_config
    from tandem.config.tree import TrainConfig
    from tandem.controller.placement import Placement, pools_of
    from tandem.data.dataset import RLHFDataset
    from tandem.jobs.inputs import read_inputs
    from tandem.jobs.rl import RlJob
    from tandem.jobs.run import claim_run_dir, run_job
    from tandem.reward.manager import RewardManager
    from tandem.tracking.jsonl import read_metrics

    with tempfile.TemporaryDirectory() as run_dir:
        overrides = [
            f"model.path={job.model}",
            f"data.train_files=[{job.workdir / job.task / 'train.jsonl'}]",
            "data.val_files=[]",
            f"generation.max_response_tokens={job.max_response_tokens}",
            f"trainer.run_dir={run_dir}",
            f"trainer.steps={job.warmup + job.steps + 1}",
            f"training.optimizer.lr={job.lr}",
            f"trainer.seed={job.seed}",
            "trainer.eval_every=0",
        ]
        config = load_config(TrainConfig, ROOT / "recipes/sort4_grpo.yaml", overrides)
        inputs = read_inputs(config, RLHFDataset)
        placement = Placement(InlineCluster(), pools_of(config))
        with claim_run_dir(config), closing(RewardManager(config.reward, config.trainer.seed)) as reward:
            window = Window(job, RlJob(config, inputs, placement, reward))
            run_job(config, lambda _: window)
        measured = read_metrics(Path(run_dir) / "metrics.jsonl")[job.warmup : job.warmup + job.steps]
    start, end = window.cpu_s
    return Figures(
        cpu_s=(end - start) / job.steps,
        response_tokens=fmean(record["response_length/mean"] for record in measured),
        reward=fmean(record["reward/mean"] for record in measured),
    )


class Window:
    """A job that takes the CPU time where the warm-up ends and before the last step, which saves a checkpoint."""

    def __init__(self, job: Job, inner: Any) -> None:
        self._job = job
        self._inner = inner
        self.total_steps: int = inner.total_steps
        self.placement = inner.placement
        self.evaluate, self.save, self.load, self.close = inner.evaluate, inner.save, inner.load, inner.close
        self.cpu_s: list[float] = []

    def step(self, step: int) -> dict[str, float]:
        if step in (self._job.warmup + 1, self._job.warmup + self._job.steps + 1):
            self.cpu_s.append(cpu_seconds())
        return self._inner.step(step)


def trl_steps(job: Job) -> Figures:
    from trl_baseline import trl_steps

    return trl_steps(job)


SIDES = {"tandem": tandem_steps, "trl": trl_steps, "trl_defaults": trl_steps}


def in_own_process(job: Job, trl_path: Path | None) -> Figures:
    command = [sys.executable, __file__, "--job", json.dumps({**asdict(job), "workdir": str(job.workdir)})]
    if trl_path:
        command += ["--trl-path", str(trl_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{job.side} on {job.task} failed\n{done.stdout[-2000:]}{done.stderr[-8000:]}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def compare(task: str, arguments: argparse.Namespace, workdir: Path) -> dict[str, list[Figures]]:
    """Both sides in turn, `rounds` times; the first of a round changes, so that neither has the warmer machine."""
    measured: dict[str, list[Figures]] = {side: [] for side in SIDES}
    steps = arguments.steps or STEPS[task]
    for seed in range(arguments.rounds):
        for side in sorted(SIDES, reverse=bool(seed % 2)):
            job = Job(side, task, workdir, steps, warmup=3, seed=seed)
            figures = in_own_process(job, arguments.trl_path)
            measured[side].append(figures)
            print(
                f"{task:<7} {side:<12} {figures.cpu_s:7.4f} CPU-s a step  {figures.response_tokens:6.1f} tokens a "
                f"response  reward {figures.reward:.3f}",
                flush=True,
            )
    return measured


def summarize(measured: dict[str, dict[str, list[Figures]]]) -> dict[str, Any]:
    """Medians over the rounds; a ratio is the median of the rounds' ratios."""
    sides: dict[str, dict[str, float]] = {side: {} for side in SIDES}
    ratio: dict[str, float] = {}
    for task, by_side in measured.items():
        for side, rounds in by_side.items():
            sides[side][f"{task}_cpu_s_per_step"] = round(median(r.cpu_s for r in rounds), 5)
            sides[side][f"{task}_cpu_us_per_response_token"] = round(median(r.cpu_us_per_token for r in rounds), 2)
            sides[side][f"{task}_response_tokens_mean"] = round(fmean(r.response_tokens for r in rounds), 2)
        for name in ("trl", "trl_defaults"):
            pairs = list(zip(by_side[name], by_side["tandem"], strict=True))
            ratio[f"{task}_{name}"] = round(median(trl.cpu_s / ours.cpu_s for trl, ours in pairs), 2)
            per_token = median(trl.cpu_us_per_token / ours.cpu_us_per_token for trl, ours in pairs)
            ratio[f"{task}_{name}_per_token"] = round(per_token, 2)
    baseline = {
        "name": "TRL 1.16.0 GRPOTrainer, transformers generation",
        **sides["trl"],
        "defaults": sides["trl_defaults"],
    }
    return {"benchmark": "grpo_step", "figures": sides["tandem"], "baseline": baseline, "ratio": ratio}


def main() -> int:
    arguments = _arguments()
    if arguments.trl_path:
        sys.path.insert(1, str(arguments.trl_path))
    if arguments.job:
        return _measure_here(arguments.job)
    if find_spec("trl") is None or version("trl") != "1.16.0":
        print(INSTALL, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        workdir = (arguments.workdir or Path(temporary)).resolve()
        for task in arguments.tasks:
            if not (workdir / task / "warmed").is_dir():
                print(f"{task}: warming the model", flush=True)
                warm(workdir / task, task == "skewed", arguments.warm_steps)
        measured = {task: compare(task, arguments, workdir) for task in arguments.tasks}
    print(json.dumps(summarize(measured)))
    return 0


def _measure_here(text: str) -> int:
    import torch

    torch.set_num_threads(1)
    fields = json.loads(text)
    job = Job(**{**fields, "workdir": Path(fields["workdir"])})
    print(json.dumps(asdict(SIDES[job.side](job))))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help=f"measured steps; default {STEPS}")
    parser.add_argument("--warm-steps", type=int, default=350, help="of the model that both begin with")
    parser.add_argument("--workdir", type=Path, help="keeps the warmed models; default: a temporary directory")
    parser.add_argument("--trl-path", type=Path, help="where pip install --target put TRL, if not in this environment")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parse_arguments(parser, tasks=["sort4"], rounds=1, steps=2, warm_steps=5)


if __name__ == "__main__":
    sys.exit(main())
