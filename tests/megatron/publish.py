"""Publishes a policy from several Megatron ranks into vLLM; test_publish.py runs it by scripts.py in .venv-megatron.

vLLM's process runs under .venv-vllm, whose interpreter rank 0 calls its own for that. Leaves DIRECTORY/<model>.pt: what
was published, what was asked and what vLLM answered.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from tandem.config.generation import VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.config.training import MegatronTrainingConfig
from tandem.generation import start
from tandem.generation.replicas import ReplicatedEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Completion, Request, SamplingParams
from tandem.weights.bridge import Address, Receiver, Sender, open_bridge
from tests.contract.test_training import Imitation
from tests.megatron.layouts import batch, micro_batches

VLLM = Path(__file__).parents[2] / ".venv-vllm/bin/python"
SHAPE: dict[str, Any] = {
    "vocab_size": 26,
    "hidden_size": 64,  # vLLM wants heads of 32
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=False),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "qwen3_moe": {"expert_parallel": 2},
}
RANKS = {"qwen2": 4, "qwen3_moe": 2}


async def collect(engine: ReplicatedEngine, request: Request) -> list[Completion]:
    return [completion async for completion in engine.generate(request)]


def world(rank: int, name: str, directory: Path) -> None:
    from tandem.training.megatron.engine import MegatronEngine

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{directory}/{name}-ranks", timedelta(minutes=20), world_size=RANKS[name], rank=rank
    )
    model = ModelConfig(path=directory / name)
    trainer = MegatronEngine(
        model, MegatronTrainingConfig(type="megatron", **LAYOUTS[name]), AdamWConfig(lr=1e-2, warmup_steps=0)
    )
    trainer.forward_backward(micro_batches(batch(), range(3), 1000), Imitation())
    trainer.optimizer_step()
    exported = {key: tensor.clone() for key, tensor in trainer.named_weights()}
    opened: Any = open_bridge(RANKS[name], 1) if rank == 0 else (None,)
    address = [opened[0]]
    dist.broadcast_object_list(address)
    with ThreadPoolExecutor(1) as pool, trainer.shards() as shards:
        done = pool.submit(published, address[0], model) if rank == 0 else None
        Sender(address[0], rank, shards).send(shards)
        if done:
            torch.save({"exported": exported, **done.result()}, directory / f"{name}.pt")
    dist.barrier()


def published(address: Address, model: ModelConfig) -> dict[str, Any]:
    """The receiver's part, a thread of rank 0: it gives vLLM what all ranks send, and asks it."""
    receiver = Receiver(address, 0)
    received: dict[str, torch.Tensor] = {}

    def weights() -> Any:
        for name, tensor in receiver.receive():
            received[name] = tensor.clone()
            yield name, tensor

    sys.executable, start.installed = str(VLLM), lambda *_: "0.32.0"
    config = VllmGenerationConfig(type="vllm", engine_args={"gpu_memory_utilization": 0.1, "skip_tokenizer_init": True})
    engine = start.start_engine(model, config, None)
    engine.load_weights(1, weights())
    asked = Request(np.array([3, 1, 4, 1, 5], np.int32), SamplingParams(max_tokens=24), tuple(range(8)))
    answered = asyncio.run(collect(engine, asked))
    engine.close()
    said = [(completion.token_ids, completion.logprobs, completion.versions) for completion in answered]
    return {"weights": received, "prompt": asked.token_ids, "completions": said}


def main(to: str, names: Sequence[str]) -> None:
    """`names`: those of the models."""
    directory, fork = Path(to), multiprocessing.get_context("fork")
    for name in names:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(directory / name)
        processes = [fork.Process(target=world, args=(rank, name, directory)) for rank in range(RANKS[name])]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"publishing {name} failed")
