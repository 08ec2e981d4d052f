"""The PyTorch engine on a CUDA device: numbers of the CPU, memory that offloading frees."""

from __future__ import annotations

import pytest
import torch
from gpu_checks.models import PolicyLoss, skewed_rows
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tandem.batching.packing import micro_batches
from tandem.config.training import FsdpTrainingConfig
from tandem.models.attention import ATTENTION
from tandem.training.fsdp import FsdpEngine
from tandem.training.optimizers.adamw import AdamWConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BATCH = skewed_rows(512, 16, 512)


def model(dtype: torch.dtype, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=ATTENTION,
    )
    return Qwen2ForCausalLM(config).to(device, dtype)


def run(dtype: torch.dtype, device: str, **training: bool) -> tuple[list[float], FsdpEngine]:
    """Loss and gradient norm of three steps."""
    engine = FsdpEngine(model(dtype, device), FsdpTrainingConfig(**training), AdamWConfig(lr=1e-3), total_steps=10)
    packed = micro_batches(BATCH, range(len(BATCH)), 200)
    found: list[float] = []
    for _ in range(3):
        loss = engine.forward_backward(packed, PolicyLoss()).loss
        found += [loss, engine.optimizer_step()["grad_norm"]]
    return found, engine


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"activation_checkpointing": True}])
def test_float32_and_bfloat16_follow_the_cpu(options: dict[str, bool]) -> None:
    wanted, _ = run(torch.float32, "cpu")
    assert run(torch.float32, "cuda", **options)[0] == pytest.approx(wanted, rel=1e-3)
    assert run(torch.bfloat16, "cuda", **options)[0] == pytest.approx(wanted, rel=5e-2)


def test_offload_frees_the_device_and_onload_continues() -> None:
    _, engine = run(torch.bfloat16, "cuda")
    weights = sum(parameter.numel() for parameter in engine.model.parameters())
    before = torch.cuda.memory_allocated()
    engine.offload()
    engine.offload()
    freed = before - torch.cuda.memory_allocated()  # libraries keep workspaces of tens of MiB
    assert freed >= 14 * weights  # two bytes of each weight, and float32 masters and moments
    engine.onload()
    engine.onload()
    packed = micro_batches(BATCH, range(len(BATCH)), 200)
    assert torch.isfinite(torch.tensor(engine.forward_backward(packed, PolicyLoss()).loss))
