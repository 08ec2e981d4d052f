"""Tokens per second through Tandem against the same vLLM called directly, in the same run (.venv-vllm).

    .venv-vllm/bin/python benchmarks/vllm_throughput.py [--prompts 64] [--tokens 64] [--rounds 5]

Both engines have the same options and requests (seeds, log-probs of the drawn tokens); rounds alternate. CPU-seconds of
the processes besides wall time: on a shared machine only their ratio is steady.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import parse_arguments
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.config.generation import VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.start import start_engine
from tandem.types import Request, SamplingParams


def make_model() -> Path:
    directory = Path(tempfile.mkdtemp())
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def through_tandem(engine: ReplicatedEngine, prompts: list[list[int]], tokens: int) -> int:
    async def one(number: int, prompt: list[int]) -> int:
        asked = Request(np.array(prompt, np.int32), SamplingParams(max_tokens=tokens), (number,))
        return sum([len(completion.token_ids) async for completion in engine.generate(asked)])

    async def together() -> int:
        return sum(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))

    return asyncio.run(together())


def direct_engine(directory: Path) -> Any:
    from vllm import LLM

    return LLM(
        model=str(directory),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        async_scheduling=False,
        enable_chunked_prefill=False,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
    )


def directly(engine: Any, prompts: list[list[int]], tokens: int) -> int:
    from vllm import SamplingParams as VllmParams

    params = [
        VllmParams(max_tokens=tokens, seed=number, logprobs=0, flat_logprobs=True, ignore_eos=True, detokenize=False)
        for number in range(len(prompts))
    ]
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def cpu_s(pid: int) -> float:
    """Of a process and what it has started and outlived."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, prompts=4, tokens=8, rounds=1)
    directory = make_model()
    engine = start_engine(
        ModelConfig(path=directory), VllmGenerationConfig(type="vllm", engine_args={"skip_tokenizer_init": True}), None
    )
    engine.load_weights(0, None)
    served = engine._replicas[0].process.pid
    for name, value in engine._spec.defaults.items():
        os.environ.setdefault(name, value)
    direct = direct_engine(directory)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 4096, rng.integers(20, 60)).tolist() for _ in range(arguments.prompts)]

    ways: dict[str, tuple[Callable[[], int], list[int]]] = {
        "tandem": (lambda: through_tandem(engine, prompts, arguments.tokens), [os.getpid(), served]),
        "vllm": (lambda: directly(direct, prompts, arguments.tokens), [os.getpid()]),
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(-1, arguments.rounds):
        for name, (run, pids) in ways.items():
            before, start = sum(map(cpu_s, pids)), time.perf_counter()
            assert run() == arguments.prompts * arguments.tokens
            if round_number >= 0:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(sum(map(cpu_s, pids)) - before)
    engine.close()
    tokens = arguments.prompts * arguments.tokens
    figures = {f"{name}_tokens_per_s": round(tokens / statistics.median(seconds)) for name, seconds in wall.items()}
    figures |= {f"{name}_tokens_per_cpu_s": round(tokens / statistics.median(seconds)) for name, seconds in cpu.items()}
    ratio = round(statistics.median(wall["vllm"]) / statistics.median(wall["tandem"]), 3)
    print(json.dumps({"benchmark": "vllm_throughput", "figures": figures, "baseline": "vLLM's LLM", "ratio": ratio}))


if __name__ == "__main__":
    main()
