"""Engines that keep linear layers in eight bits: what a publish makes of them is what loading does."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from letters import letters, served_model
from test_generation import MIXED, ask, reference_logprobs
from transformers import PreTrainedModel

from tandem.config.generation import VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.errors import UserError
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.start import start_engine
from tandem.types import Completion


@pytest.fixture
def quantized(vllm: None, served_directory: Path) -> Iterator[ReplicatedEngine]:
    options = {"gpu_memory_utilization": 0.1}
    config = VllmGenerationConfig(type="vllm", quantization="fp8_per_channel", engine_args=options)
    with closing(start_engine(ModelConfig(path=served_directory), config, letters())) as engine:
        yield engine


def test_published_weights_are_quantized_as_loaded_ones_are(quantized: ReplicatedEngine) -> None:
    """The weights of the directory, then others, then the first again in buckets: the same bits as when they were
    loaded. Log-probs are far closer to those of the weights published last than to others, and not theirs exactly."""
    first, other = served_model(), served_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    quantized.load_weights(0, None)
    loaded = answers(quantized)
    quantized.load_weights(1, other.named_parameters())
    changed = answers(quantized)
    quantized.load_weights(2, first.named_parameters())
    published = answers(quantized)
    for one, again in zip(loaded, published, strict=True):
        assert one.token_ids.tolist() == again.token_ids.tolist()
        np.testing.assert_array_equal(one.logprobs, again.logprobs)
    for model, wrong, found in ((first, other, published), (other, first, changed)):
        off = difference(model, found)
        assert 0.02 < off < 0.3 < difference(wrong, found) / 3, "eight bits, of the right weights"


def answers(engine: ReplicatedEngine) -> list[Completion]:
    return [completion for completions in ask(engine, *MIXED) for completion in completions]


def difference(model: PreTrainedModel, found: list[Completion]) -> float:
    """The mean absolute difference of the log-probs from those of these weights in float32."""
    asked = [request for request in MIXED for _ in request.seeds]
    pairs = zip(asked, found, strict=True)
    return float(
        np.mean(np.concatenate([np.abs(one.logprobs - reference_logprobs(model, of, one)) for of, one in pairs]))
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has kernels for all of them")
def test_what_needs_a_gpu_is_refused_before_vllm_starts(vllm: None, served_directory: Path) -> None:
    config = VllmGenerationConfig(type="vllm", quantization="mxfp8")
    with pytest.raises(
        UserError, match=r"generation\.quantization: mxfp8 needs a GPU.*on a CPU vLLM has fp8_per_channel"
    ):
        start_engine(ModelConfig(path=served_directory), config, letters())
