"""State mixers in training: a prompt's state given to its answers, the prompt computed again for each, and rows alone.

Run: python benchmarks/state_mixers.py [--families ...] [--prompt N] [--answers N] [--tokens N] [--runs N]

Forward and backward passes of one prompt with answers of half to all of `tokens`, through small models of the families.
"state" and "recomputed" are packed rows, which differ in the mixers alone: there the prompt's state, or its tokens
before each answer's. "alone" is transformers' model with eager attention, a row a pass. Figures are medians of
CPU-seconds over interleaved runs, one CPU thread, float32, and how far the gradients of the first two are apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
from command_line import parse_arguments
from generation import cpu_seconds
from torch import Tensor
from transformers import CONFIG_MAPPING

from tandem.models.attention import PackedRows
from tandem.models.family_check import _models
from tandem.models.mixing import mixed_rows
from tandem.models.tiny import tiny
from tandem.types import IntArray

OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "nemotron_h": {},
    "kimi_linear": {},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
}


def step(model: Any, token_N: Tensor, offsets: IntArray, recompute: bool) -> Callable[[], None]:
    """Log-probs of the answers' tokens but their first ones, and gradients of their sum."""
    prefixes = np.array([-1, *[0] * (len(offsets) - 2)])
    at = torch.from_numpy(
        np.concatenate([np.arange(*span) for span in zip(offsets[1:-1], offsets[2:] - 1, strict=True)])
    )

    def run() -> None:
        never = mock.patch.object(mixed_rows._Plan, "_gives_state", lambda *_: False)
        with never if recompute else nullcontext():
            plan = PackedRows(offsets, prefixes=prefixes)
            how = {"position_ids": plan.positions[None], "attention_plan": plan, "use_cache": False}
            logits = model(token_N[None], **how).logits[0, at]
        model.zero_grad()
        logits.log_softmax(-1).gather(1, token_N[at + 1, None]).sum().backward()

    return run


def alone(model: Any, token_N: Tensor, offsets: IntArray) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        for start, stop in pairwise(offsets[1:]):
            row = torch.cat((token_N[: offsets[1]], token_N[start:stop]))
            logits = model(row[None], use_cache=False).logits[0, offsets[1] : -1]
            logits.log_softmax(-1).gather(1, row[offsets[1] + 1 :, None]).sum().backward()

    return run


def gradients(model: Any, run: Callable[[], None]) -> dict[str, Tensor]:
    run()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest distance of a parameter's gradients over the size of all."""
    whole = float(torch.stack([gradient.norm() for gradient in first.values()]).norm())
    return max(float((second[name] - gradient).norm()) / whole for name, gradient in first.items())


def measure(family: str, arguments: argparse.Namespace, figures: dict[str, float]) -> float:
    with torch.no_grad():
        eager, ours = _models(tiny(CONFIG_MAPPING[family](**OPTIONS[family])), trust_remote_code=False)
    random, longest = np.random.default_rng(0), arguments.tokens
    lengths = [arguments.prompt, *random.integers(-(-longest // 2), longest + 1, arguments.answers)]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    token_N = torch.from_numpy(random.integers(3, ours.config.get_text_config().vocab_size, offsets[-1]))
    state, recomputed = (step(ours, token_N, offsets, recompute) for recompute in (False, True))
    off = apart(gradients(ours, state), gradients(ours, recomputed))
    found = cpu_seconds(arguments.runs, state, recomputed, alone(eager, token_N, offsets))
    for name, seconds in zip(("state", "recomputed", "alone"), found, strict=True):
        figures[f"{family}_{name}_cpu_s"] = round(seconds, 4)
    figures[f"{family}_gradients_apart"] = off
    state_s, recomputed_s, alone_s = found
    print(
        f"{family}: prompt {arguments.prompt}, {arguments.answers} answers: state {state_s:.3f} CPU-s, recomputed "
        f"{recomputed_s:.3f} ({recomputed_s / state_s:.2f}x), alone {alone_s:.3f} ({alone_s / state_s:.2f}x); "
        f"gradients {off:.1e} apart",
        flush=True,
    )
    return recomputed_s / state_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of the longest answer")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parse_arguments(parser, families=["lfm2"], prompt=24, answers=3, tokens=8, runs=1)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    worst = min(measure(family, arguments, figures) for family in arguments.families)
    told = {"benchmark": "state_mixers", "figures": figures, "baseline": "prompts computed again", "ratio": worst}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
