"""What Megatron's ranks publish is what vLLM serves: its log-probs are those of transformers with the same weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is in .venv-megatron (scripts/megatron-env) only", allow_module_level=True)

from tests.megatron.conftest import RunScript
from tests.megatron.publish import MODELS, VLLM

if not VLLM.exists():
    pytest.skip("vLLM is in .venv-vllm (scripts/vllm-env), which is not there", allow_module_level=True)


QUICK = "qwen3_moe"


@pytest.fixture(scope="module")
def directory(run_script: RunScript, nightly: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("publish")
    assert run_script("publish", str(directory), list(MODELS) if nightly else [QUICK]) == 0
    return directory


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.nightly) for name in MODELS]
)
def test_logprobs_are_those_of_what_was_published(directory: Path, name: str) -> None:
    found = torch.load(directory / f"{name}.pt", weights_only=False)
    assert found["weights"].keys() == found["exported"].keys()
    assert all(torch.equal(tensor, found["exported"][key]) for key, tensor in found["weights"].items())
    before = load_file(directory / name / "model.safetensors")
    assert any(not torch.equal(tensor, before[key]) for key, tensor in found["weights"].items()), "a step was made"
    save_file(
        {key: tensor.contiguous() for key, tensor in found["weights"].items()}, directory / name / "model.safetensors"
    )
    model = AutoModelForCausalLM.from_pretrained(directory / name)
    assert len(found["completions"]) == 8
    for token_ids, logprobs, versions in found["completions"]:
        ids = torch.from_numpy(np.concatenate((found["prompt"], token_ids)).astype(np.int64))
        with torch.no_grad():
            said = model(ids[None, :-1]).logits[0].log_softmax(-1)[len(found["prompt"]) - 1 :]
        expected = said.gather(1, torch.from_numpy(token_ids.astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=2e-5, rtol=0)
        assert set(versions.tolist()) == {1}
