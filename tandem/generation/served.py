"""Configuration -> engines in processes of their own: what they are, what must be installed, how weights reach them."""

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tandem.config.generation import ServedGenerationConfig, WeightSyncConfig
from tandem.config.tree import ModelConfig
from tandem.errors import UserError
from tandem.generation.replicas import ReplicatedEngine, Start
from tandem.weights.base import Weights, WeightSync
from tandem.weights.disk import DiskSync
from tandem.weights.shared_memory import SharedMemorySync

VLLM_RANGE = (0, 32), (0, 33)
"""From, and below: the releases whose weight-update interface `generation/vllm.py` speaks."""
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps and weight updates alternate in one process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # has no place for log-probs before top-k and top-p
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the trainer
    "VLLM_CPU_CI_ENV": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def serve(
    model: ModelConfig,
    config: ServedGenerationConfig,
    tokenizer: Any,
    source: Callable[[], Weights | None] | None = None,
    devices: str | None = None,
) -> ReplicatedEngine:
    """`source` gives the present weights between publishes, where that is possible; `devices`: CUDA_VISIBLE_DEVICES."""
    check_vllm(installed_vllm())
    defaults = _VLLM_ENVIRONMENT | ({} if torch.cuda.is_available() else _CPU_ENVIRONMENT)
    environment = {"CUDA_VISIBLE_DEVICES": devices} if devices is not None else {}
    start = Start("tandem.generation.vllm", "VllmEngine", (model, config), defaults, environment)
    return ReplicatedEngine(start, config, _sync(config.sync, source), tokenizer)


def check_vllm(found: str | None) -> None:
    """UserError unless this is a release of vLLM that Tandem speaks to."""
    low, high = (".".join(map(str, bound)) for bound in VLLM_RANGE)
    mend = f"install vllm>={low},<{high} (scripts/vllm-env makes an environment with it on a CPU)"
    if found is None:
        raise UserError(f"generation.type: vllm, but vLLM is not installed here: {mend}")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if numbers < (0, 8, 2):
        reason = "releases before 0.8.2 run out of memory beside a trainer, and return wrong results"
    elif not VLLM_RANGE[0] <= numbers < VLLM_RANGE[1]:
        reason = "its interface for new weights is another one"
    else:
        return
    raise UserError(f"generation.type: vllm, but vLLM {found} is not supported: {reason}; {mend}")


def installed_vllm() -> str | None:
    """Its version, also that of the build for CPUs."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _sync(config: WeightSyncConfig, source: Callable[[], Weights | None] | None) -> WeightSync:
    bucket_bytes = int(config.bucket_mib * 2**20)
    if config.type == "disk":
        return DiskSync(bucket_bytes)
    return SharedMemorySync(bucket_bytes, config.checksum, source)
