"""Decoding of the native engine against the memory bandwidth of the same device, measured in the same run.

Qwen2.5 shapes with random weights in bfloat16, prompts of 512 tokens, 256 new ones each, batch 64 and 256. A step has
to read every weight and the keys and values of every row once: the limit is the rate at which that can be read. Figures
are of steps alone (a run less one that only prefills), sampling and Python included. Without a GPU a tiny shape runs on
the CPU, its steps unrecorded, so that the program itself can be tried.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from statistics import median

import numpy as np
import torch
from command_line import parse_arguments
from gpu_training import SHAPES, model_of, peak_gib, synchronize, timed
from transformers import PreTrainedModel

from tandem.generation.native import NativeEngine
from tandem.types import Completion, Request, SamplingParams


def bandwidth(device: torch.device) -> float:
    """Bytes/s that a large copy reads and writes."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(device, lambda: target.copy_(source), repeats=10)


def generate(engine: NativeEngine, device: torch.device, batch: int, prompt: int, new: int) -> float:
    """Seconds for `batch` rows of `new` tokens, each with a prompt of its own."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, 512, (batch, prompt)).astype(np.int32)
    sampling = SamplingParams(max_tokens=new)

    async def one(row: int) -> Completion:
        (completion,) = [c async for c in engine.generate(Request(prompts[row], sampling, (row,)))]
        return completion

    async def all_of_them() -> None:
        completions = await asyncio.gather(*map(one, range(batch)))
        assert all(len(completion.token_ids) == new for completion in completions)

    synchronize(device)
    start = time.perf_counter()
    asyncio.run(all_of_them())
    synchronize(device)
    return time.perf_counter() - start


def step_bytes(model: PreTrainedModel, batch: int, length: float) -> float:
    """What one step reads: weights, and the keys and values of rows of `length` tokens."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * length * model.dtype.itemsize
    return sum(parameter.nbytes for parameter in model.parameters()) + batch * row


def measure(shape: str, batch: int, device: torch.device, record: bool, runs: int) -> dict[str, float]:
    prompt, new = (512, 256) if device.type == "cuda" else (16, 16)
    model = model_of(shape, device)
    engine = NativeEngine(model, max_running=batch, record=record)
    engine.load_weights(0, None)
    rate = bandwidth(device)
    first = generate(engine, device, batch, prompt, new)
    prefill = median(generate(engine, device, batch, prompt, 1) for _ in range(runs))
    peak = peak_gib(device, lambda: generate(engine, device, batch, prompt, new))
    whole = median(generate(engine, device, batch, prompt, new) for _ in range(runs))
    step = (whole - prefill) / (new - 1)
    limit = step_bytes(model, batch, prompt + new / 2) / rate

    engine.sleep()
    engine.wake()
    woken = generate(engine, device, batch, prompt, new)
    figures = {
        "bandwidth_gb_per_s": rate / 1e9,
        "decode_tokens_per_s": batch / step,
        "limit_tokens_per_s": batch / limit,
        "share_of_bandwidth_limit": limit / step,
        "step_ms": step * 1e3,
        "prefill_tokens_per_s": batch * prompt / prefill,
        "first_run_s": first,
        "peak_gib": peak,
        "extra_s_after_sleep": woken - whole,
    }
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "1.5b"] if cuda else ["tiny"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256] if cuda else [4, 8])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="decoding steps are not recorded")
    arguments = parse_arguments(parser, shapes=["tiny"], batches=[4], runs=1)
    device = torch.device("cuda" if cuda else "cpu")
    print(torch.cuda.get_device_name() if cuda else "no GPU: the tiny shape on the CPU", flush=True)
    figures: dict[str, float] = {}
    ratio: dict[str, float] = {}
    for shape in arguments.shapes:
        for batch in arguments.batches:
            measured = measure(shape, batch, device, cuda and not arguments.eager, arguments.runs)
            for name, value in measured.items():
                print(f"{shape:6}batch {batch:<6}{name:26}{value:>12,}", flush=True)
            figures |= {f"{shape}_batch_{batch}_{name}": value for name, value in measured.items()}
            ratio[f"{shape}_batch_{batch}"] = measured["share_of_bandwidth_limit"]
    baseline = (
        "reading weights, keys and values once a step at the bandwidth of a large copy on the same device, same run"
    )
    print(json.dumps({"benchmark": "gpu_generation", "figures": figures, "baseline": baseline, "ratio": ratio}))


if __name__ == "__main__":
    main()
