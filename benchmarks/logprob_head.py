"""Log-prob + entropy + backward over a large vocabulary: Tandem's chunked head against plain log_softmax.

Same hidden states, weights and targets, one thread, float32. Every variant runs in fresh processes, in turn with the
others: `*_cpu_s` is the median of their CPU time, `*_peak_mib` the largest high-water mark of resident memory above
what was resident before. Inputs are resident before; the gradients, which every variant makes, are not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from command_line import parse_arguments
from torch import nn

from tandem.training.head import VocabularyHead
from tandem.types import Outputs, TokenColumns

VARIANTS = ("plain", "token_local", "general")


class EntropyBonusLoss:
    """Sum of weight * (-log-prob - 0.01 * entropy): a loss that differentiates through both."""

    def __init__(self, token_local: bool) -> None:
        self.token_local = token_local

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.logprobs_S is not None and outputs.entropy_S is not None and columns.loss_weights is not None
        loss = (columns.loss_weights * (-outputs.logprobs_S - 0.01 * outputs.entropy_S)).sum()
        return loss, {"loss": loss.detach()}


def plain(linear: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> None:
    logits = hidden @ linear.weight.t()
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    loss, _ = EntropyBonusLoss(True)(Outputs(chosen, entropy), TokenColumns(loss_weights=weights))
    loss.backward()


def chunked(token_local: bool) -> Callable[[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    def run(linear: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> None:
        VocabularyHead(linear).backward(
            hidden, targets, TokenColumns(loss_weights=weights), EntropyBonusLoss(token_local)
        )

    return run


def measure(variant: str, arguments: argparse.Namespace) -> None:
    """One run in this process: a JSON line, and the gradients into `arguments.save` when given."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear = nn.Linear(arguments.hidden, arguments.vocabulary, bias=False)
    hidden = torch.randn(arguments.tokens, arguments.hidden, requires_grad=True)
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,))
    weights = torch.rand(arguments.tokens) / arguments.tokens
    run = {"plain": plain, "token_local": chunked(True), "general": chunked(False)}[variant]
    small = nn.Linear(8, 16, bias=False)
    run(small, torch.randn(4, 8, requires_grad=True), torch.zeros(4, dtype=torch.int64), torch.ones(4))
    before = memory_mib("VmRSS")
    start = time.process_time()
    run(linear, hidden, targets, weights)
    cpu_s = time.process_time() - start
    peak = memory_mib("VmHWM")
    if arguments.save:
        assert hidden.grad is not None and linear.weight.grad is not None
        np.savez(arguments.save, hidden=hidden.grad.numpy(), weight=linear.weight.grad.numpy())
    print(json.dumps({"cpu_s": cpu_s, "peak_mib": peak - before}))


def memory_mib(kind: str) -> float:
    """Of this process: VmRSS is resident memory now, VmHWM its high-water mark."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def spawn(variant: str, arguments: argparse.Namespace, save: Path | None) -> dict[str, float]:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("vocabulary", "hidden", "tokens")]
    command = [sys.executable, __file__, *sizes, f"--variant={variant}", *([f"--save={save}"] if save else [])]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def compare(arguments: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Largest difference of each gradient from the plain one's, relative to its largest entry."""
    figures: dict[str, float] = {}
    with np.load(directory / "plain.npz") as wanted:
        for variant in VARIANTS[1:]:
            with np.load(directory / f"{variant}.npz") as found:
                figures[f"{variant}_grad_max_rel_diff"] = max(
                    float(np.abs(found[name] - wanted[name]).max() / np.abs(wanted[name]).max()) for name in wanted
                )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one, in this process")
    parser.add_argument("--save", type=Path)
    arguments = parse_arguments(parser, vocabulary=1000, hidden=32, tokens=64, repeats=1)
    if arguments.variant:
        measure(arguments.variant, arguments)
        return
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(arguments.repeats):
            for variant in VARIANTS:
                save = Path(directory) / f"{variant}.npz" if repeat == 0 else None
                runs[variant].append(spawn(variant, arguments, save))
                print(variant, runs[variant][-1], flush=True)
        figures = compare(arguments, Path(directory))
    for variant, results in runs.items():
        figures[f"{variant}_cpu_s"] = round(median(run["cpu_s"] for run in results), 3)
        figures[f"{variant}_peak_mib"] = round(max(run["peak_mib"] for run in results), 1)
    ratio = {
        f"{variant}_{what}": round(figures[f"{variant}_{what}_{unit}"] / figures[f"plain_{what}_{unit}"], 3)
        for variant in VARIANTS[1:]
        for what, unit in (("cpu", "s"), ("peak", "mib"))
    }
    print(
        json.dumps({"benchmark": "logprob_head", "figures": figures, "baseline": "plain log_softmax", "ratio": ratio})
    )


if __name__ == "__main__":
    main()
