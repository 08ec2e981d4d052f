"""Tokens out to four workers and one float column back: worker groups against pickled padded tensors through Ray.

Run: python benchmarks/data_plane.py [--rounds N]

1,024 trajectories: prompts of 40 to 512 tokens, responses lognormal with mean about 640, at most 2,048. A call is all
of it: rows balanced over the ranks by tokens, written, read and selected by each rank, answers joined in the order of
the batch. `local`: LocalCluster; `ray`: RayCluster; `padded`: int64 tensors padded to the longest prompt and response
(prompts, responses, input ids, attention mask, position ids), cut in four, as arguments of Ray actors that answer with
float32 tensors. Medians of wall-clock time, the three in turn.

Before that, 64 local workers are started, the fork server included, in one torch.distributed world;
`worker_private_mib` is the largest memory that one of them shares with nobody, after a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ray
import torch

from tandem.cluster.local import LocalCluster
from tandem.cluster.ray import RayCluster
from tandem.controller.groups import Cluster, WorkerGroup
from tandem.controller.pools import ResourcePool
from tandem.types import Batch, FloatArray, TokenColumns
from tandem.workers.host import Worker
from tandem.workers.registration import Dispatch, Returns, register

ROWS, WORKERS, MANY = 1024, 4, 64
MAX_PROMPT, MAX_RESPONSE = 512, 2048
WARM_UP = 5


def make_batch() -> Batch:
    rng = np.random.default_rng(0)
    prompts = rng.integers(40, MAX_PROMPT + 1, ROWS)
    responses = np.clip(rng.lognormal(6.25, 0.7, ROWS), 1, MAX_RESPONSE).astype(np.int64)
    tokens = int(responses.sum())
    return Batch(
        prompt_ids=rng.integers(0, 150_000, prompts.sum(), dtype=np.int32),
        prompt_offsets=np.r_[0, prompts.cumsum()],
        response_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
        response_offsets=np.r_[0, responses.cumsum()],
        loss_mask=np.ones(tokens, np.bool_),
        versions=np.zeros(tokens, np.int32),
        groups=np.arange(ROWS, dtype=np.int32) // 8,
        trajectories=np.arange(ROWS, dtype=np.int32),
        prompts=np.arange(ROWS, dtype=np.int32),
        rewards=np.zeros(ROWS, np.float32),
        scored=np.ones(ROWS, np.bool_),
        tokens=TokenColumns(),
    )


class Reader(Worker[None]):
    """Reads every token, answers a number for each of a response."""

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def column(self, batch: Batch) -> FloatArray:
        return batch.response_ids.astype(np.float32) + np.float32(batch.prompt_ids.sum() * 0)

    @register(Dispatch.ALL)
    def private_mib(self) -> float:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@ray.remote(num_cpus=0.01)
class PaddedReader:
    def column(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["responses"].float() + tensors["input_ids"].sum() * 0


def pad(batch: Batch) -> dict[str, torch.Tensor]:
    prompts, responses = np.diff(batch.prompt_offsets), np.diff(batch.response_offsets)
    prompt_mask = np.arange(MAX_PROMPT) >= MAX_PROMPT - prompts[:, None]  # on the left
    response_mask = np.arange(MAX_RESPONSE) < responses[:, None]
    padded = np.zeros((ROWS, MAX_PROMPT), np.int64), np.zeros((ROWS, MAX_RESPONSE), np.int64)
    padded[0][prompt_mask], padded[1][response_mask] = batch.prompt_ids, batch.response_ids
    mask = np.concatenate((prompt_mask, response_mask), axis=1).astype(np.int64)
    columns = {
        "prompts": padded[0],
        "responses": padded[1],
        "input_ids": np.concatenate(padded, axis=1),
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def group_call(cluster: Cluster, batch: Batch) -> Callable[[], None]:
    group = WorkerGroup(cluster.spawn(ResourcePool("main", (WORKERS,))), "reader", Reader)

    def call() -> None:
        column = group.column(batch).get()
        assert len(column) == len(batch.response_ids) and column[-1] == batch.response_ids[-1]

    return call


def padded_call(batch: Batch) -> Callable[[], None]:
    tensors = pad(batch)
    actors = [PaddedReader.remote() for _ in range(WORKERS)]

    def call() -> None:
        parts = [{name: tensor[part::WORKERS] for name, tensor in tensors.items()} for part in range(WORKERS)]
        parts = [{name: tensor.contiguous() for name, tensor in part.items()} for part in parts]
        answers = ray.get([actor.column.remote(part) for actor, part in zip(actors, parts, strict=True)])
        assert sum(len(answer) for answer in answers) == ROWS

    return call


def start_many(batch: Batch) -> dict[str, float]:
    start = time.perf_counter()
    cluster = LocalCluster()
    ranks = cluster.spawn(ResourcePool("many", (MANY,)))
    up_s = time.perf_counter() - start
    group = WorkerGroup(ranks, "reader", Reader)
    assert len(group.column(batch).get()) == len(batch.response_ids)
    private_mib = max(group.private_mib().get())
    cluster.close()
    return {f"{MANY}_workers_up_s": round(up_s, 2), "worker_private_mib": round(private_mib, 1)}


def milliseconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    batch = make_batch()
    lengths = np.diff(batch.response_offsets)
    print(f"responses: mean {lengths.mean():.0f}, maximum {lengths.max()}; {lengths.sum()} response tokens")
    many = start_many(batch)
    clusters = LocalCluster(), RayCluster()
    try:
        calls = dict(zip(("local", "ray"), (group_call(cluster, batch) for cluster in clusters), strict=True))
        calls["padded"] = padded_call(batch)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(WARM_UP + rounds):
            for name, call in calls.items():
                for _ in range(1 if name == "padded" else 5):
                    took = milliseconds(call)
                    times[name] += [took] if number >= WARM_UP else []
    finally:
        for cluster in clusters:
            cluster.close()
    median = {name: statistics.median(taken) for name, taken in times.items()}
    figures = {f"{name}_ms": round(value, 2) for name, value in median.items()}
    figures |= {f"{name}_min_ms": round(min(taken), 2) for name, taken in times.items()} | many
    ratio = {name: round(median["padded"] / median[name], 1) for name in ("local", "ray")}
    baseline = "padded int64 tensors, pickled, through Ray"
    print(json.dumps({"benchmark": "data_plane", "figures": figures, "baseline": baseline, "ratio": ratio}))


if __name__ == "__main__":
    main()
