"""Engines that cost more to start than their tests do: one a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from letters import letters, served_model

from tandem.config.generation import VllmGenerationConfig
from tandem.config.tree import ModelConfig
from tandem.errors import UserError
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.served import check_vllm, installed_vllm, serve


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
        check_vllm(installed_vllm())
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def vllm_engine(vllm: None, served_directory: Path) -> Iterator[ReplicatedEngine]:
    config = VllmGenerationConfig(type="vllm", engine_args={"gpu_memory_utilization": 0.1})
    engine = serve(ModelConfig(path=served_directory), config, letters())
    yield engine
    engine.close()
