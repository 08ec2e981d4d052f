"""A training step of the PyTorch engine against the matmul rate of the same device, measured in the same run.

Qwen2.5 shapes with random weights, one rank, 16,384 tokens a step: rows of a 256-token prompt and a lognormal response
(mean about 640). The share counts the matrix products that the step needs, forward once and backward twice: every
layer's matrices on every token, the output layer's on response tokens, causal attention within rows. Without a GPU a
tiny shape runs on the CPU, so that the program itself can be tried.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from command_line import parse_arguments
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from tandem.batching.packing import micro_batches
from tandem.config.training import FsdpTrainingConfig
from tandem.models.attention import ATTENTION
from tandem.models.lean import make_lean
from tandem.training.fsdp import FsdpEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, MicroBatch, Outputs, TokenColumns

SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "0.5b": (896, 24, 14, 2, 4_864, 151_936),
    "1.5b": (1_536, 28, 12, 2, 8_960, 151_936),
    "tiny": (64, 2, 4, 2, 128, 512),
}
"""Hidden, layers, heads, key-value heads, intermediate, vocabulary."""


class PolicyLoss:
    """A policy gradient with an entropy bonus: sum of weight * (-log-prob - 0.01 * entropy)."""

    token_local = True

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.logprobs_S is not None and outputs.entropy_S is not None and columns.loss_weights is not None
        return (columns.loss_weights * (-outputs.logprobs_S - 0.01 * outputs.entropy_S)).sum(), {}


def model_of(shape: str, device: torch.device) -> PreTrainedModel:
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
    )
    torch.manual_seed(0)
    with device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    make_lean(model)
    return model


def engine_of(shape: str, device: torch.device, checkpointing: bool) -> FsdpEngine:
    training = FsdpTrainingConfig(activation_checkpointing=checkpointing)
    return FsdpEngine(model_of(shape, device), training, AdamWConfig(lr=1e-6), total_steps=100)


def rows(tokens: int, prompt: int, vocabulary: int) -> Batch:
    """`tokens` in all; lognormal responses, each with a prompt of its own."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths) - prompt * (len(lengths) + 1)) > 0:
        lengths.append(int(min(left, max(1, random.lognormal(np.log(2 * prompt), 0.7)))))
    total = sum(lengths)
    share = np.full(total, 1 / total, dtype=np.float32)
    return Batch(
        prompt_ids=random.integers(0, vocabulary, prompt * len(lengths)).astype(np.int32),
        prompt_offsets=np.arange(len(lengths) + 1) * prompt,
        response_ids=random.integers(0, vocabulary, total).astype(np.int32),
        response_offsets=np.cumsum([0, *lengths]),
        loss_mask=np.ones(total, dtype=np.bool_),
        versions=np.zeros(total, dtype=np.int32),
        groups=np.arange(len(lengths), dtype=np.int32),
        trajectories=np.arange(len(lengths), dtype=np.int32),
        prompts=np.arange(len(lengths), dtype=np.int32),
        rewards=np.zeros(len(lengths), dtype=np.float32),
        scored=np.ones(len(lengths), dtype=np.bool_),
        tokens=TokenColumns(loss_weights=share, shares=share),
    )


def needed_flop(shape: str, packed: list[MicroBatch]) -> float:
    """Of one step's matrix products, forward and backward."""
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    head_dim = hidden // heads
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * intermediate
    forward = 0.0
    for micro_batch in packed:
        lengths = np.diff(micro_batch.offsets).astype(float)
        forward += 2 * layers * layer * lengths.sum() + 2 * hidden * vocabulary * len(micro_batch.scored)
        forward += 2 * layers * hidden * float((lengths**2).sum())  # two products of 2 * n * n / 2 * hidden
    return 3 * forward


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product in the dtype of training."""
    size, dtype = (8_192, torch.bfloat16) if device.type == "cuda" else (1_024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timed(device, lambda: a @ b, repeats=10)


def timed(device: torch.device, run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of `run`, after two that do not count."""
    seconds: list[float] = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: torch.device, run: Callable[[], Any]) -> float:
    """High-water mark of the device's memory during `run`; on a CPU that of the process so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() / 2**30
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(shape: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, float]:
    rate = matmul_rate(device)
    engine = engine_of(shape, device, arguments.checkpointing)
    tokens, prompt = (16_384, 256) if device.type == "cuda" else (1_024, 32)
    batch = rows(tokens, prompt, SHAPES[shape][-1])
    packed = micro_batches(batch, range(len(batch)), arguments.tokens_per_micro_batch)

    def backward() -> None:
        engine.forward_backward(packed, PolicyLoss())

    def step() -> None:
        backward()
        engine.optimizer_step()

    def move() -> None:
        engine.offload()
        engine.onload()

    seconds = timed(device, step, arguments.steps)
    flop = needed_flop(shape, packed)
    figures = {
        "matmul_tflop_per_s": rate / 1e12,
        "step_s": seconds,
        "tokens_per_s": sum(len(m.token_ids) for m in packed) / seconds,
        "step_tflop": flop / 1e12,
        "share_of_matmul_rate": flop / seconds / rate,
        "forward_s": timed(device, lambda: engine.forward(packed), arguments.steps),
        "forward_peak_gib": peak_gib(device, lambda: engine.forward(packed)),
        "backward_peak_gib": peak_gib(device, backward),
        "optimizer_peak_gib": peak_gib(device, engine.optimizer_step),
        "offload_s": timed(device, engine.offload, 1),
        "onload_s": timed(device, engine.onload, 1),
        "offload_and_onload_s": timed(device, move, 3),
    }
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "1.5b"] if cuda else ["tiny"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens-per-micro-batch", type=int, default=16_384)
    parser.add_argument("--checkpointing", action="store_true")
    arguments = parse_arguments(parser, shapes=["tiny"], steps=1)
    device = torch.device("cuda" if cuda else "cpu")
    print(torch.cuda.get_device_name() if cuda else "no GPU: the tiny shape on the CPU", flush=True)
    figures: dict[str, float] = {}
    for shape in arguments.shapes:
        measured = measure(shape, device, arguments)
        for name, value in measured.items():
            print(f"{shape:6}{name:24}{value:>12,}", flush=True)
        figures |= {f"{shape}_{name}": value for name, value in measured.items()}
    ratio = {shape: figures[f"{shape}_share_of_matmul_rate"] for shape in arguments.shapes}
    baseline = "matrix product in the same dtype on the same device, same run"
    print(json.dumps({"benchmark": "gpu_training", "figures": figures, "baseline": baseline, "ratio": ratio}))


if __name__ == "__main__":
    main()
