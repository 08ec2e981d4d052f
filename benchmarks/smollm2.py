"""SmolLM2-135M-Instruct in Tandem and in TRL 1.16, each in programs of its own: tokens a CPU-second, memory, curves.

    python benchmarks/smollm2.py [--tasks grpo sft dpo] [--steps 3 9] [--rounds 3] [--threads 2] [--json FILE]

First scripts/smollm2, examples/smollm2/sums.py and rows.py. The model, the rows, their order and all settings that both
have are the same: recipes/smollm2_{sums,sft,dpo}.yaml, float32, every weight. The side `trl` computes activations once,
as Tandem does; `trl_packed`, of SFT, packs rows as TRL offers it, across whose borders attention sees without
FlashAttention. Each program is run with few and with more steps: the differences of CPU time and of tokens are those of
steps alone. Tokens are those of the rows, padding apart. Memory: the largest sum over the program's processes of what
each has for itself and its part of what they share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command_line import parse_arguments

ROOT = Path(__file__).parents[1]
RECIPES = {"grpo": "smollm2_sums", "sft": "smollm2_sft", "dpo": "smollm2_dpo"}
LEARNED = {"grpo": "reward/mean", "sft": "sft/loss", "dpo": "dpo/loss"}
COMMANDS = {"grpo": "train", "sft": "sft", "dpo": "dpo"}
SIDES = {"grpo": ("tandem", "trl"), "sft": ("tandem", "trl", "trl_packed"), "dpo": ("tandem", "trl")}


@dataclass
class Run:
    """What one program took."""

    cpu_s: float
    wall_s: float
    memory_mib: float
    tokens: int
    learned: list[float]
    """By step: mean reward (grpo), loss (sft, dpo)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=[*RECIPES], choices=[*RECIPES])
    parser.add_argument("--steps", nargs=2, type=int, default=(3, 9))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parse_arguments(parser, tasks=["sft"], steps=(1, 2), rounds=1)
    os.chdir(ROOT)  # recipes name their files from here
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    found: dict[str, list[dict[str, Any]]] = {}
    print("| task | side | tokens a CPU-second | a second | against TRL | largest MiB | last step |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for task in arguments.tasks:
        speeds: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES[task]}
        last: dict[str, Run] = {}
        for seed in range(arguments.rounds):
            for side in SIDES[task]:
                few, more = (measured(task, side, steps, seed) for steps in arguments.steps)
                tokens = more.tokens - few.tokens
                speeds[side].append((tokens / (more.cpu_s - few.cpu_s), tokens / (more.wall_s - few.wall_s)))
                found.setdefault(f"{task} {side}", []).append(asdict(more))
                last[side] = more
        of_trl = statistics.median(cpu for cpu, _ in speeds["trl"])
        for side, values in speeds.items():
            cpu, wall = (statistics.median(column) for column in zip(*values, strict=True))
            memory = statistics.median(run["memory_mib"] for run in found[f"{task} {side}"])
            learned = last[side].learned[-1]
            print(
                f"| {task} | {side} | {cpu:.0f} | {wall:.0f} | {cpu / of_trl:.2f} | {memory:.0f} | {learned:.3f} |",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def measured(task: str, side: str, steps: int, seed: int) -> Run:
    """Run a side as a program; raises CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        if side == "tandem":
            overrides = [f"trainer.steps={steps}", f"trainer.seed={seed}", f"trainer.run_dir={run}/run"]
            overrides += [
                "data.shuffle=false",
                *(["trainer.eval_every=0", "data.val_files=[]"] if task == "grpo" else []),
            ]
            command = [sys.executable, "-m", "tandem", COMMANDS[task], f"recipes/{RECIPES[task]}.yaml", *overrides]
        else:
            options = [
                task,
                str(steps),
                str(seed),
                str(run / "trl.json"),
                *(["--packed"] if side == "trl_packed" else []),
            ]
            command = [sys.executable, "benchmarks/smollm2_trl.py", *options]
        with (run / "log").open("w") as log:
            start, program = time.perf_counter(), subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            memory = 0.0
            while not os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                memory = max(memory, memory_mib(program.pid))
                time.sleep(1)
            wall = time.perf_counter() - start
            _, status, used = os.wait4(program.pid, 0)
        if status:
            sys.exit(f"{' '.join(command)} failed:\n{(run / 'log').read_text()[-3000:]}")
        tokens, learned = of_tandem(task, run / "run") if side == "tandem" else of_trl_side(run / "trl.json")
        return Run(used.ru_utime + used.ru_stime, wall, memory, tokens, learned)


def memory_mib(root: int) -> float:
    """Of a program's processes: what is theirs alone, and of what several map each one's part."""
    import psutil

    total = 0
    try:
        for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
            total += process.memory_full_info().pss
    except psutil.Error:  # one of them has just ended
        pass
    return total / 2**20


def of_tandem(task: str, run: Path) -> tuple[int, list[float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["step"] > 0]
    return int(sum(record["perf/tokens"] for record in records)), [record[LEARNED[task]] for record in records]


def of_trl_side(file: Path) -> tuple[int, list[float]]:
    told = json.loads(file.read_text())
    return told["tokens"], told["learned"]


if __name__ == "__main__":
    main()
