"""Adapters that learned, published into engines of their own processes, which have the frozen weights from disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
from letters import served_model
from test_generation import MIXED, ask, reference_logprobs
from transformers import AutoModelForCausalLM

from tandem.config.model import LoraConfig, ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.generation.replicas import ReplicatedEngine
from tandem.training.fsdp import FsdpEngine, make_engine
from tandem.training.optimizers.adamw import AdamWConfig
from tests.saving import save


@pytest.mark.parametrize("served", ["vllm_engine", "sglang_engine"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]])
def test_engines_serve_the_sum_of_what_they_have_and_what_comes(
    served: str, targets: list[str], served_directory: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    engine: ReplicatedEngine = request.getfixturevalue(served)
    engine.wake()
    engine.load_weights(0, served_model().named_parameters())
    model = ModelConfig(path=served_directory, lora=LoraConfig(rank=2, target_modules=targets))
    trainer = make_engine(model, FsdpTrainingConfig(), AdamWConfig())
    assert isinstance(trainer, FsdpEngine)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    engine.load_weights(1, trainer.named_weights())
    save(trainer, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    for asked, completions in zip(MIXED, ask(engine, *MIXED), strict=True):
        for completion in completions:
            expected = reference_logprobs(merged, asked, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5, rtol=0)
            assert np.abs(expected - reference_logprobs(served_model(), asked, completion)).max() > 1e-3
    engine.load_weights(0, served_model().named_parameters())
