"""What the native engine holds between generations."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tandem.config.model import ModelConfig
from tandem.generation import native
from tandem.generation.native import NativeEngine
from tandem.models.loading import load_policy
from tandem.types import Request, SamplingParams
from tests.storages import Storages


@pytest.mark.parametrize("kept", [False, True])
def test_a_sleep_gives_back_what_generation_took(sort4: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """But for a small cache on a CPU, which counts as all its layers."""
    engine = NativeEngine(load_policy(ModelConfig(path=sort4 / "model")), max_running=4)
    engine.load_weights(0, None)
    config = engine._model.config
    width = config.hidden_size // config.num_attention_heads
    assert config.num_hidden_layers > 1
    of_token = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * width
    of_cache = 4 * 32 * of_token  # room for 25 tokens in each of four rows, rounded up
    monkeypatch.setattr(native, "_KEPT_ASLEEP", of_cache if kept else of_cache - 1)
    request = Request(np.arange(4, 9, dtype=np.int32), SamplingParams(max_tokens=20), (1, 2, 3, 4), keep=True)

    async def generate() -> list[list[int]]:
        made = [completion async for completion in engine.generate(request)]
        return [one.token_ids.tolist() for one in sorted(made, key=lambda one: one.sample)]

    with Storages() as storages:
        first = asyncio.run(generate())
        awake = storages.held
        engine.sleep()
        asleep = storages.held
        engine.wake()
        assert asyncio.run(generate()) == first
    assert awake - asleep < of_cache if kept else awake - asleep >= of_cache
