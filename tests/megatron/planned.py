"""What test_planned_memory.py runs by scripts.py in .venv-megatron: bytes of real engines on CPUs.

Worlds of 1 and 2 forked processes. Rank 0 leaves what each rank of a layout held, and held at most in a pass beyond
that, in DIRECTORY/<ranks>.json.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from tandem.config.model import ModelConfig
from tandem.config.training import MegatronTrainingConfig
from tandem.planning.trace.step import FakeRun, Loss, micro_batch
from tandem.training.optimizers.adamw import AdamWConfig

PROMPT, ANSWER, MICRO_BATCHES = 32, 256, 4
"""Tokens of the one row of a micro-batch."""
PASSES = 4
"""The least of them counts: gloo's threads may hold for a while what they have sent, whose memory others take then."""
_SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
MODELS: Mapping[str, PreTrainedConfig] = {
    "dense": Qwen3Config(**_SHAPE, tie_word_embeddings=False),
    "tied": Qwen3Config(**_SHAPE, tie_word_embeddings=True),
    "mixture": Qwen3MoeConfig(
        **_SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=80, norm_topk_prob=True
    ),
}
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": True}
TP2: dict[str, Any] = {"tensor_parallel": 2}
PP2: dict[str, Any] = {"pipeline_parallel": 2}
EP2: dict[str, Any] = {"expert_parallel": 2}
LAYOUTS: Mapping[int, Sequence[tuple[str, dict[str, Any]]]] = {
    1: [("dense", {}), ("dense", CHECKPOINTED), ("mixture", {}), ("mixture", CHECKPOINTED)],
    2: [
        ("dense", TP2),
        ("dense", {**TP2, "sequence_parallel": True}),
        ("tied", PP2),
        ("dense", {**PP2, **CHECKPOINTED}),
        ("dense", {**PP2, "virtual_pipeline": 2}),
        ("mixture", EP2),
    ],
}
"""By the number of ranks."""


class Norm(Function):
    """RMS norm that keeps what a GPU's kernel keeps; a CPU's is made of parts that keep float32 copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = x.float().square().mean(-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        gradient, normed = gradients[0].float(), x.float() * scale
        weighted = gradient * weight.float()
        of_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        return of_x.to(x.dtype), (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype), None


def most_allocated(call: Callable[[], object]) -> int:
    """Bytes more than before that the CPU's allocator had given out at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def measured(directory: Path, name: str, layout: dict[str, Any]) -> list[dict[str, int]]:
    """By rank: parameters, bytes of weights, of gradients, of masters and moments; and of activations in a pass."""
    from tandem.training.megatron.engine import MegatronEngine

    training = MegatronTrainingConfig(type="megatron", **layout)
    engine: Any = MegatronEngine(ModelConfig(path=directory / name, dtype="bfloat16"), training, AdamWConfig())
    row, drawn = micro_batch(FakeRun("", PROMPT, (ANSWER,))), np.random.default_rng(0)
    ids = [drawn.integers(0, 512, len(row.token_ids)).astype(np.int32) for _ in range(MICRO_BATCHES)]
    batch = [replace(row, token_ids=own) for own in ids]

    def passes() -> Iterator[int]:
        for _ in range(PASSES if dist.get_world_size() > 1 else 1):
            engine.forward_backward(batch, Loss())  # a profile that follows on another one would take off what was left
            yield most_allocated(lambda: engine.forward_backward(batch, Loss()))

    least = min(passes())
    buffers = [buffer for model in engine._models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    parts = engine._trained._parts
    masters = [master for part in parts for master in part.get_parameters()]
    moments = [state[x] for part in parts for state in part.optimizer.state.values() for x in ("exp_avg", "exp_avg_sq")]
    found = {
        "parameters": sum(parameter.numel() for model in engine._models for parameter in model.parameters()),
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(tensor.nbytes for tensor in (*masters, *moments)),
        "activations": least,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def world(rank: int, ranks: int, directory: Path) -> None:
    from megatron.core import parallel_state

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.nn.RMSNorm.forward = lambda self, x: Norm.apply(x, self.weight, self.eps)  # type: ignore[method-assign, assignment]
    rendezvous = f"file://{directory}/rendezvous{ranks}"
    dist.init_process_group("gloo", rendezvous, timedelta(minutes=20), world_size=ranks, rank=rank)
    found: list[Any] = []
    for name, layout in LAYOUTS[ranks]:
        found.append(measured(directory, name, layout))
        parallel_state.destroy_model_parallel()
    if rank == 0:
        (directory / f"{ranks}.json").write_text(json.dumps(found))


def main(to: str, worlds: Sequence[int]) -> None:
    """`worlds`: numbers of ranks."""
    directory = Path(to)
    torch.manual_seed(0)  # which experts are busy is the same each time
    for name, config in MODELS.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
    context = multiprocessing.get_context("fork")
    for ranks in worlds:
        processes = [context.Process(target=world, args=(rank, ranks, directory)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert all(process.exitcode == 0 for process in processes)
