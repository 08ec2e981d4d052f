"""Speed and memory of a publish into an engine process, against a memcpy of the same bytes in the same run.

    python benchmarks/weight_sync.py [--gib 1] [--engine copy|vllm] [--tensor-parallel 1]

`copy` is an engine that keeps Hugging Face tensors and copies each bucket into them, as one on a GPU does. `vllm` cuts,
fuses and packs them besides (in .venv-vllm). Publishes and memcpys alternate; medians. Memory is how far each process
rises above what it has between publishes; the bucket, which both map, counts in both. Delta: 1% of elements changed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from command_line import parse_arguments
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.config.generation import VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.generation.replica import ReplicaSpec
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.start import start_engine
from tandem.weights.base import BucketHalf
from tandem.weights.delta import DeltaCache
from tandem.weights.shared_memory import SharedMemorySync, attach

MIB = 2**20


class CopyEngine:
    """Of the SteppedEngine's verbs, those of weights."""

    max_tokens = vocabulary = max_running = 1

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def load(self, part: Any) -> None:
        if isinstance(part, BucketHalf):
            for name, tensor in attach(part):
                if name in self._held:
                    self._held[name].copy_(tensor)
                else:
                    self._held[name] = tensor.clone()


def make_model(gib: float) -> Any:
    hidden = 1024
    per_layer = 4 * hidden * hidden + 3 * hidden * 4 * hidden
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=max(1, round(gib * 2**30 / 4 / per_layer)),
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def start(arguments: argparse.Namespace, model: Any) -> ReplicatedEngine:
    options: dict[str, Any] = {
        "tensor_parallel": arguments.tensor_parallel,
        "sync": {"bucket_mib": arguments.bucket_mib},
    }
    if arguments.engine == "copy":
        here = ReplicaSpec("weight_sync", "CopyEngine", (), {}, {"PYTHONPATH": str(Path(__file__).parent)})
        config = VllmGenerationConfig(type="vllm", **options)
        return ReplicatedEngine(here, config, SharedMemorySync(int(arguments.bucket_mib * MIB)))
    directory = Path(tempfile.mkdtemp())
    model.save_pretrained(directory)
    config = VllmGenerationConfig(type="vllm", **options, engine_args={"skip_tokenizer_init": True})
    return start_engine(ModelConfig(path=directory), config, None)


def memory_mib(pid: int, what: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(what)


def rise_mib(pids: list[int], publish: Any) -> list[float]:
    """How far each process's resident memory peaks above what it was."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = [memory_mib(pid, "VmRSS") for pid in pids]
    publish()
    return [memory_mib(pid, "VmHWM") - resident for pid, resident in zip(pids, before, strict=True)]


def delta_share(model: Any) -> float:
    """Bytes that move when 1% of the elements changed."""
    sent, moved = DeltaCache(), 0
    for name, parameter in model.named_parameters():
        sent.encode(name, parameter.detach().view(-1).view(torch.uint8), parameter.itemsize)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[torch.randint(parameter.numel(), (parameter.numel() // 100,))] += 1
    for name, parameter in model.named_parameters():
        moved += len(sent.encode(name, parameter.detach().view(-1).view(torch.uint8), parameter.itemsize))
    return moved / sum(parameter.nbytes for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--engine", choices=("copy", "vllm"), default="copy")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, gib=0.02, rounds=1, bucket_mib=1.0)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the engine's process
    torch.set_num_threads(1)
    model = make_model(arguments.gib)
    size = sum(parameter.nbytes for parameter in model.parameters())
    engine = start(arguments, model)
    pids = [os.getpid(), engine._replicas[0].process.pid]
    versions = iter(range(1000))

    def publish() -> None:
        engine.load_weights(next(versions), model.named_parameters())

    publish()
    copy = torch.empty(size // 4)
    copy_s, publish_s = [], []
    for _ in range(arguments.rounds):
        start_s = time.perf_counter()
        place = 0
        for parameter in model.parameters():
            copy[place : place + parameter.numel()].view(parameter.shape).copy_(parameter.detach())
            place += parameter.numel()
        copy_s.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        publish()
        publish_s.append(time.perf_counter() - start_s)
    rises = rise_mib(pids, publish)
    engine.close()
    memcpy, synced = (size / 2**30 / statistics.median(seconds) for seconds in (copy_s, publish_s))
    figures = {
        "weights_gib": round(size / 2**30, 3),
        "memcpy_gib_per_s": round(memcpy, 3),
        "publish_gib_per_s": round(synced, 3),
        "trainer_rise_mib": round(rises[0], 1),
        "engine_rise_mib": round(rises[1], 1),
        "bucket_mib": arguments.bucket_mib,
        "delta_bytes_share_at_1_percent": round(delta_share(model), 4),
    }
    print(figures)
    print(
        json.dumps(
            {"benchmark": "weight_sync", "figures": figures, "baseline": "memcpy", "ratio": round(synced / memcpy, 3)}
        )
    )


if __name__ == "__main__":
    main()
