"""On one GPU, by TransformerEngine's layers where it is installed: what transformers says, in either precision."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)

from megatron.core import parallel_state

from tandem.batching.packing import micro_batches
from tandem.config.model import ModelConfig
from tandem.config.training import MegatronTrainingConfig
from tandem.training.megatron.engine import MegatronEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tests.contract.test_training import Imitation
from tests.megatron.layouts import batch
from tests.megatron.publish import MODELS
from tests.megatron.test_routers import logprobs_of, told


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_logprobs_and_a_step(tmp_path: Path, name: str, dtype: str, bound: float) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name])
    model.save_pretrained(tmp_path)
    rows = batch()
    with torch.no_grad():
        expected = np.concatenate([told(model, rows, row)[0].numpy() for row in range(len(rows))])
    engine = MegatronEngine(
        ModelConfig(path=tmp_path, dtype=dtype), MegatronTrainingConfig(type="megatron"), AdamWConfig(lr=1e-3)
    )
    difference = np.abs(logprobs_of(engine, rows) - expected)[rows.loss_mask]
    assert difference.mean() < bound / 4 and difference.max() < bound
    losses = []
    for _ in range(3):
        losses.append(engine.forward_backward(micro_batches(rows, range(len(rows)), 1000), Imitation()).loss)
        assert engine.optimizer_step()["grad_norm"] > 0
        engine.offload()
        engine.onload()
    assert losses[2] < losses[0]
    parallel_state.destroy_model_parallel()
