"""Recorded decoding steps say what plain ones say; off a GPU the same steps run unrecorded."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tandem.generation.native import NativeEngine
from tandem.models.attention import ATTENTION
from tandem.models.lean import make_lean
from tandem.types import Completion, Request, SamplingParams

VOCABULARY, SLOTS = 31, 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def policy(family: str, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }[family]
    model = model_class(
        config_class(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=600,
            initializer_range=0.3,
            attn_implementation=ATTENTION,
            **({"sliding_window": 7} if family == "mistral" else {}),
        )
    )
    make_lean(model)
    return model.to(device).eval()


def requests(prompt_tokens: Sequence[int], max_tokens: int) -> list[Request]:
    """Prompts of the given lengths, three samples each; token 0 ends a sample early."""
    random = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(0,))
    rows = [random.integers(1, VOCABULARY, count).astype(np.int32) for count in prompt_tokens]
    return [Request(row, sampling, tuple(range(10 * i, 10 * i + 3))) for i, row in enumerate(rows)]


def answers(engine: NativeEngine, asked: list[Request]) -> list[Completion]:
    async def one(request: Request) -> list[Completion]:
        return sorted([c async for c in engine.generate(request)], key=lambda c: c.sample)

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*map(one, asked))

    return [completion for own in asyncio.run(all_of_them()) for completion in own]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_recorded_steps_say_what_plain_ones_say(family: str, device: str) -> None:
    """More samples than slots, lengths beyond the first 256; then a larger cache, other weights and a renewed cache."""
    model = policy(family, device)
    plain, recorded = (NativeEngine(model, max_running=SLOTS, record=record) for record in (False, True))
    for version, asked in enumerate([requests(range(2, 20), 30), requests([250, 3, 240], 40), requests([5], 4)]):
        for engine in (plain, recorded):
            engine.load_weights(version, None)
        wanted, found = answers(plain, asked), answers(recorded, asked)
        for one, other in zip(wanted, found, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and one.status == other.status
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
        with torch.no_grad():
            next(model.parameters()).mul_(1.1)
        recorded.sleep()
        recorded.wake()


@pytest.mark.parametrize("device", DEVICES)
def test_a_moved_model_is_recorded_anew(device: str) -> None:
    model = policy("qwen3", device)
    engine = NativeEngine(model, max_running=4, record=True)
    engine.load_weights(0, None)
    answers(engine, requests([3], 5))
    for parameter in model.parameters():
        parameter.data = 0 * parameter.data
    (completion, *_) = answers(engine, requests([4], 5))
    np.testing.assert_allclose(completion.logprobs, -np.log(VOCABULARY), atol=1e-6)
