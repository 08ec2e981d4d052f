"""Configuration -> engines in processes of their own: what they are, what must be installed, how weights reach them."""

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tandem.config.generation import SglangGenerationConfig, VllmGenerationConfig, WeightSyncConfig
from tandem.config.tree import ModelConfig
from tandem.errors import UserError
from tandem.generation.replica import ReplicaSpec
from tandem.generation.replicas import ReplicatedEngine
from tandem.weights.base import Weights, WeightSync
from tandem.weights.disk import DiskSync
from tandem.weights.shared_memory import SharedMemorySync

_Range = tuple[tuple[int, ...], tuple[int, ...]]
VLLM_RANGE = (0, 32), (0, 33)
SGLANG_RANGE = (0, 5, 23), (0, 5, 24)
"""From, and below: the releases whose weight-update interfaces `generation/vllm.py` and `sglang.py` speak."""
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps and weight updates alternate in one process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # has no place for log-probs before top-k and top-p
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
_VLLM_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the trainer
    "VLLM_CPU_CI_ENV": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
_SGLANG_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
_SGLANG_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}


def start_engine(
    model: ModelConfig,
    config: VllmGenerationConfig | SglangGenerationConfig,
    tokenizer: Any,
    source: Callable[[], Weights | None] | None = None,
    devices: str | None = None,
) -> ReplicatedEngine:
    """`source` gives the present weights between publishes, where that is possible; `devices`: CUDA_VISIBLE_DEVICES."""
    if model.lora and config.sleep == "weights":
        raise UserError("generation.sleep: weights, but with model.lora no publish fills them again; use cache")
    if config.type == "vllm":
        check_vllm(installed("vllm", "vllm-cpu"))
        defaults, on_cpu, engine = _VLLM_ENVIRONMENT, _VLLM_CPU_ENVIRONMENT, "VllmEngine"
    else:
        check_sglang(installed("sglang"))
        defaults, on_cpu, engine = _SGLANG_ENVIRONMENT, _SGLANG_CPU_ENVIRONMENT, "SglangEngine"
    defaults = defaults | ({} if torch.cuda.is_available() else on_cpu)
    environment = {"CUDA_VISIBLE_DEVICES": devices} if devices is not None else {}
    spec = ReplicaSpec(f"tandem.generation.{config.type}", engine, (model, config), defaults, environment)
    return ReplicatedEngine(spec, config, _sync(config.sync, source), tokenizer)


def check_vllm(found: str | None) -> None:
    """UserError unless this is a release of vLLM that Tandem speaks to."""
    reason = "releases before 0.8.2 run out of memory beside a trainer, and return wrong results"
    old = reason if found and _numbers(found) < (0, 8, 2) else None
    _check("vllm", "vLLM", found, VLLM_RANGE, " (scripts/vllm-env makes an environment with it on a CPU)", old)


def check_sglang(found: str | None) -> None:
    """UserError unless this is a release of SGLang that Tandem speaks to."""
    _check("sglang", "SGLang", found, SGLANG_RANGE, "")


def installed(*names: str) -> str | None:
    """The version of the first of these distributions that is here."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _check(type: str, name: str, found: str | None, supported: _Range, hint: str, reason: str | None = None) -> None:
    low, high = (".".join(map(str, bound)) for bound in supported)
    mend = f"install {type}>={low},<{high}{hint}"
    if found is None:
        raise UserError(f"generation.type: {type}, but {name} is not installed here: {mend}")
    if not supported[0] <= _numbers(found) < supported[1]:
        reason = reason or "its interface for new weights is another one"
        raise UserError(f"generation.type: {type}, but {name} {found} is not supported: {reason}; {mend}")


def _numbers(found: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])


def _sync(config: WeightSyncConfig, source: Callable[[], Weights | None] | None) -> WeightSync:
    bucket_bytes = int(config.bucket_mib * 2**20)
    if config.type == "disk":
        return DiskSync(bucket_bytes)
    return SharedMemorySync(bucket_bytes, config.checksum, source)
