"""Training: a step's speed and memory, long rows, SFT, shared prompts, branches, offloading, the compiler."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedConfig

from gpu_checks.figures import Bench
from gpu_checks.measuring import device_of, dtype_of, let_go, matmul_rate, peak_gib, reset_peak, seconds
from gpu_checks.models import (
    Imitation,
    PolicyLoss,
    batch_of,
    config_of,
    engine_of,
    long_row,
    model_of,
    needed_flop,
    planned_gib,
    skewed_rows,
    tokens_of,
)
from tandem.batching.packing import micro_batches
from tandem.config.training import FsdpTrainingConfig
from tandem.training.fsdp import FsdpEngine
from tandem.types import Batch, MicroBatch, TokenLoss

_PUBLISHED_PEAK = 989e12
"""FLOP/s of an H100 by its data sheet, of which published shares are."""


def training(bench: Bench) -> None:
    """A step of Qwen2.5-0.5B's shape on 16,384 tokens, its memory, and what it takes to move to the host and back."""
    config = config_of("tiny" if bench.small else "Qwen2.5-0.5B")
    device, rate = device_of(bench), matmul_rate(bench)
    tokens, prompt = (512, 16) if bench.small else (16_384, 256)
    batch = skewed_rows(tokens, prompt, config.vocab_size)
    packed = micro_batches(batch, range(len(batch)), tokens)
    for case, options in {"plain": {}, "recomputed": {"activation_checkpointing": True}}.items():
        how = FsdpTrainingConfig(**options)
        engine = engine_of(model_of(config, device, dtype_of(bench)), how)
        _report_step(bench, engine, config, packed, how, PolicyLoss(), rate, case)
        bench.report("forward alone", 1e3 * seconds(device, lambda e=engine: e.forward(packed), 3), "ms", case)
        if case == "plain":
            _report_moves(bench, engine)
        del engine
        let_go(device)


def _report_moves(bench: Bench, engine: FsdpEngine) -> None:
    device = device_of(bench)
    size = sum(parameter.numel() for parameter in engine.model.parameters()) * (14 if not bench.small else 12)
    first = seconds(device, engine.offload, 1, warm=0)
    back = seconds(device, engine.onload, 1, warm=0)

    def move() -> None:
        engine.offload()
        engine.onload()

    bench.report("the first offload", first, "s")
    bench.report("the first way back", back, "s")
    again = seconds(device, move, 3, warm=0)
    bench.report("there and back again", again, "s")
    bench.report("weights, masters and moments, moved", 2 * size / again / 1e9, "GB/s")


def _report_step(
    bench: Bench,
    engine: FsdpEngine,
    config: PreTrainedConfig,
    packed: list[MicroBatch],
    how: FsdpTrainingConfig,
    loss: TokenLoss[torch.Tensor],
    rate: float,
    case: str,
) -> None:
    """Seconds, tokens and FLOP of whole steps, and memory: allocated at most, and by `tandem plan`."""
    device = device_of(bench)

    def step() -> None:
        engine.forward_backward(packed, loss)
        engine.optimizer_step()

    step()  # makes the optimizer's state
    reset_peak(device)
    taken = seconds(device, step, 3, warm=1)
    flop = needed_flop(config, packed)
    bench.report("a step", taken, "s", case)
    bench.report("tokens", tokens_of(packed) / taken, "tokens/s", case)
    bench.report("share of the matrix product's rate", flop / taken / rate, "", case)
    bench.report("share of 989 TFLOP/s", flop / taken / _PUBLISHED_PEAK, "", case)
    planned, peak = planned_gib(config, packed, how), peak_gib(device)
    bench.report("peak, planned", planned, "GiB", case)
    if peak is not None:
        bench.report("peak", peak, "GiB", case)
        bench.report("planned by allocated", planned / peak, "", case)


def long_rows(bench: Bench) -> None:
    """One row of 16,384 tokens and one of 65,536, Qwen3-0.6B's shape, recomputed, with the optimizer's step."""
    for tokens in (256, 512) if bench.small else (16_384, 65_536):
        config = config_of("tiny" if bench.small else "Qwen3-0.6B")
        how = FsdpTrainingConfig(activation_checkpointing=True)
        _train_rows(bench, config, long_row(tokens, config.vocab_size), tokens, how, PolicyLoss(), f"{tokens:,} tokens")


def sft(bench: Bench) -> None:
    """Supervised fine-tuning on four rows of 8,192 tokens, Qwen3-0.6B's shape, nothing recomputed."""
    tokens = 128 if bench.small else 8192
    config = config_of("tiny" if bench.small else "Qwen3-0.6B")
    batch = long_row(tokens, config.vocab_size, rows=4)
    _train_rows(bench, config, batch, tokens, FsdpTrainingConfig(), Imitation(), f"rows of {tokens:,} tokens")


def _train_rows(
    bench: Bench,
    config: PreTrainedConfig,
    batch: Batch,
    tokens: int,
    how: FsdpTrainingConfig,
    loss: TokenLoss[torch.Tensor],
    case: str,
) -> None:
    let_go(device_of(bench))  # the rows before had an engine of their own
    engine = engine_of(model_of(config, device_of(bench), dtype_of(bench)), how)
    packed = micro_batches(batch, range(len(batch)), tokens)
    _report_step(bench, engine, config, packed, how, loss, matmul_rate(bench), case)


def shared_prompts(bench: Bench) -> None:
    """Eight answers of 256 tokens after each prompt of 2,048: the prompt computed once, and with each answer."""
    prompts, answers, prompt, answer = (2, 4, 128, 16) if bench.small else (4, 8, 2048, 256)
    random, config = np.random.default_rng(0), config_of("tiny" if bench.small else "Qwen3-0.6B")

    def drawn(tokens: int) -> np.ndarray:
        return random.integers(0, config.vocab_size, tokens)

    own = [drawn(prompt) for _ in range(prompts)]
    groups = np.repeat(np.arange(prompts), answers)
    ends = [drawn(answer) for _ in groups]
    together = batch_of([own[group] for group in groups], ends, groups.tolist())
    apart = batch_of([drawn(prompt) for _ in groups], ends, range(len(groups)))
    _compare_sharing(bench, config, together, apart, f"{answers} answers of {answer} after {prompt:,}")


def branches(bench: Bench) -> None:
    """A tree of four turns and twenty leaves, each a row: what rows have in common computed once, and with each."""
    root, turn, leaf = (128, 128, 16) if bench.small else (1024, 512, 256)
    random, config = np.random.default_rng(0), config_of("tiny" if bench.small else "Qwen3-0.6B")

    def drawn(tokens: int) -> np.ndarray:
        return random.integers(0, config.vocab_size, tokens)

    trunk, turns = drawn(root), [drawn(turn) for _ in range(4)]
    prompts = [np.concatenate((trunk, turns[number % 4])) for number in range(20)]
    ends = [drawn(leaf) for _ in prompts]
    together = batch_of(prompts, ends, [0] * len(prompts))
    apart = batch_of([drawn(root + turn) for _ in prompts], ends, range(len(prompts)))
    _compare_sharing(bench, config, together, apart, f"{len(prompts)} leaves")


def _compare_sharing(bench: Bench, config: PreTrainedConfig, together: Batch, apart: Batch, case: str) -> None:
    """Times of passes on rows that begin alike and on as many that do not; and that sharing changes no loss."""
    device, limit = device_of(bench), 1024 if bench.small else 16_384
    engine = engine_of(model_of(config, device, dtype_of(bench)), FsdpTrainingConfig())
    taken, packs = {}, {}
    for name, batch in {"shared": together, "each its own": apart}.items():
        packs[name] = packed = micro_batches(batch, range(len(batch)), limit)
        taken[name] = seconds(device, lambda p=packed: engine.forward_backward(p, PolicyLoss()), 3)
        bench.report("forward and backward", taken[name], "s", f"{case}, {name}")
        bench.report("tokens computed", tokens_of(packed), "", f"{case}, {name}")
    faster = taken["each its own"] / taken["shared"]
    ideal = needed_flop(config, packs["each its own"]) / needed_flop(config, packs["shared"])
    bench.report("faster by", faster, "x", case)
    bench.report("share of the ratio of FLOP", faster / ideal, "", case)
    alone = [part for row in range(len(together)) for part in micro_batches(together, [row], 1)]
    losses = [engine.forward_backward(packed, PolicyLoss()).loss for packed in (packs["shared"], alone)]
    bench.report("loss, off from rows one by one", abs(losses[0] / losses[1] - 1), "", case)
    assert abs(losses[0] / losses[1] - 1) < 0.01, losses


def variants(bench: Bench) -> None:
    """Selective recomputation and torch's compiler: the same loss, their time and memory."""
    device, config = device_of(bench), config_of("tiny" if bench.small else "Qwen2.5-0.5B")
    batch = skewed_rows(512 if bench.small else 8192, 32 if bench.small else 256, config.vocab_size)
    packed = micro_batches(batch, range(len(batch)), 8192)
    losses: list[float] = []
    kinds = {"plain": {}, "selective": {"activation_checkpointing": "selective"}, "compiled": {"compile": True}}
    for case, options in kinds.items():
        engine = engine_of(model_of(config, device, dtype_of(bench)), FsdpTrainingConfig(**options))
        first = seconds(device, lambda e=engine: e.forward_backward(packed, PolicyLoss()), 1, warm=0)
        losses.append(engine.forward_backward(packed, PolicyLoss()).loss)
        reset_peak(device)
        taken = seconds(device, lambda e=engine: e.forward_backward(packed, PolicyLoss()), 3, warm=1)
        bench.report("the first pass", first, "s", case)
        bench.report("forward and backward", 1e3 * taken, "ms", case)
        bench.report("loss", losses[-1], "", case)
        if (peak := peak_gib(device)) is not None:
            bench.report("peak", peak, "GiB", case)
        del engine
        let_go(device)
    assert np.allclose(losses, losses[0], rtol=0.01), losses
