"""The data of a whole training step, to four workers and back: rows that stay on the ranks, against sending the batch
with each call, and against padded tensors through Ray.

Run: python benchmarks/data_plane.py [--rounds N]
     python benchmarks/data_plane.py --samples 8192 --tokens 4096    the controller's memory, on local processes

A step of PPO in `--minibatches` optimizer steps: log-probs, reference log-probs and values of all rows come to the
controller, advantages and returns go out, then each optimizer step trains actor and critic on its rows. The workers
read every token that they are called about and compute nothing else. 1,024 trajectories: 128 prompts of 40 to 512
tokens, each answered eight times; responses lognormal with mean about 640, at most 2,048.

placed   `tandem.controller.placed`: rows balanced over ranks and sent once; optimizer steps are cut there by index, all
         of a role's in one call
sent     each call gets a Batch: as things were before, and still are for a dataflow that passes batches
padded   int64 tensors padded to the longest prompt and response (prompts, responses, input ids, attention mask,
         position ids) and float32 columns of responses, in five calls (each trains all its optimizer steps), cut in
         four, as arguments of Ray actors that answer with float32 tensors

Medians of wall-clock time, all in turn; then, all in turn again, the CPU time of all processes above their idle one,
which other work on the machine changes less. Before that, `--started` local workers (64) are started, the fork server
included, in one torch.distributed world; `worker_private_mib` is the largest memory that one of them shares with
nobody, after a call.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import psutil
import ray
import torch
from command_line import parse_arguments

from tandem.algorithms import make_algorithm
from tandem.batching.balance import BalancedPass
from tandem.batching.packing import select_rows, split_groups
from tandem.cluster.local import LocalCluster
from tandem.cluster.ray import RayCluster
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import Roles
from tandem.controller.dataflow import compute_advantages, prepare
from tandem.controller.learning import placed_step, update
from tandem.controller.placed import Placed
from tandem.controller.pools import ResourcePool
from tandem.controller.roles import Actor, Critic, Policy
from tandem.controller.worker_groups import Cluster, Future, Ranks, WorkerGroup
from tandem.types import Batch, FloatArray, IntArray, StepMetrics, TokenColumns
from tandem.workers.host import Worker, WorkerHost
from tandem.workers.registration import Calls, Dispatch, Mesh, Returns, register

ROWS, SIBLINGS, WORKERS = 1024, 8, 4
MAX_PROMPT, MAX_RESPONSE = 512, 2048
WARM_UP = 5
LOSS: Any = None


def lengths_of_a_step() -> tuple[IntArray, IntArray]:
    """Of prompts and of responses."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(40, MAX_PROMPT + 1, ROWS // SIBLINGS)
    return prompts.repeat(SIBLINGS), np.clip(rng.lognormal(6.25, 0.7, ROWS), 1, MAX_RESPONSE).astype(np.int64)


def make_batch(prompts: IntArray, responses: IntArray) -> Batch:
    rng, rows, tokens = np.random.default_rng(0), len(prompts), int(responses.sum())
    groups = np.arange(rows, dtype=np.int32) // SIBLINGS
    of_groups = [rng.integers(0, 150_000, length, dtype=np.int32) for length in prompts[::SIBLINGS]]
    return Batch(
        prompt_ids=np.concatenate([of_groups[group] for group in groups]),
        prompt_offsets=np.r_[0, prompts.cumsum()],
        response_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
        response_offsets=np.r_[0, responses.cumsum()],
        loss_mask=np.ones(tokens, np.bool_),
        versions=np.zeros(tokens, np.int32),
        groups=groups,
        trajectories=np.arange(rows, dtype=np.int32),
        prompts=groups,
        rewards=np.arange(rows, dtype=np.float32),
        scored=np.ones(rows, np.bool_),
        tokens=TokenColumns(rollout_logprobs=np.zeros(tokens, np.float32)),
    )


class Reader(Worker[None]):
    """A model that reads tokens, and answers a number for each of a response."""

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def logprobs(self, batch: Batch) -> FloatArray:
        return batch.response_ids.astype(np.float32) * np.float32(-1e-6) + np.float32(batch.prompt_ids.sum() * 0)

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def values(self, batch: Batch) -> FloatArray:
        return self.logprobs(batch)

    @register(Dispatch.DATA_PARALLEL, returns=(Returns.SAME, Returns.PER_TOKEN))
    def learn(self, batch: Batch, loss: Any) -> tuple[StepMetrics, FloatArray]:
        tokens = batch.tokens
        assert tokens.advantages is not None and tokens.loss_weights is not None and tokens.old_logprobs is not None
        read = self.logprobs(batch) * np.float32(0)
        for column in (tokens.advantages, tokens.loss_weights, tokens.old_logprobs):
            read += column
        return {"actor/grad_norm": 0.0}, read

    @register(Dispatch.ALL)
    def private_mib(self) -> float:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@ray.remote(num_cpus=0.01)
class PaddedReader:
    def column(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["responses"].float() + tensors["input_ids"].sum() * 0

    def learn(self, tensors: dict[str, torch.Tensor]) -> float:
        return float(sum(tensor.sum() for tensor in tensors.values()))


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


def pad_columns(batch: Batch, count: int) -> list[torch.Tensor]:
    columns = torch.zeros(count, ROWS, MAX_RESPONSE)
    columns[:, torch.from_numpy(np.arange(MAX_RESPONSE) < np.diff(batch.response_offsets)[:, None])] = 1.0
    return list(columns)


class Models(NamedTuple):
    actor: Actor
    reference: Policy
    critic: Critic


class Counted:
    """Ranks in this process; what they are sent and what they answer is pickled, and counted."""

    size = WORKERS

    def __init__(self) -> None:
        self.hosts = [WorkerHost(rank, self.size) for rank in range(self.size)]
        self.bytes = 0

    def create(self, name: str, kind: Any, spec: Any) -> dict[str, Mesh]:
        return [*(host.create(name, kind, spec) for host in self.hosts)].pop()

    def submit(self, name: str, method: str, calls: Calls) -> Future[dict[int, Any]]:
        answers = {
            rank: self.carried(self.hosts[rank].call(name, method, self.carried(arguments)))
            for rank, arguments in calls.items()
        }
        return Future(lambda: answers, notify=[].append)

    def carried(self, value: Any) -> Any:
        data = pickle.dumps(value)
        self.bytes += len(data)
        return pickle.loads(data)

    def close(self) -> None:
        """Nothing is open."""


def carried_mib(batch: Batch, minibatches: int) -> dict[str, float]:
    """What a step moves between the controller and the workers, there and back."""
    found: dict[str, float] = {}
    for name, make in (("placed", placed_call), ("sent", sent_call)):
        ranks = Counted()
        make(models_on(ranks), batch, minibatches)()
        found[name] = ranks.bytes
    tensors, column = sum(t.nbytes for t in pad(batch).values()), pad_columns(batch, 1)[0].nbytes
    found["padded"] = 5 * tensors + (0 + 1 + 2 + 6 + 6) * column + 3 * column
    return {f"{name}_mib": round(count / 2**20, 1) for name, count in found.items()}


def models(cluster: Cluster) -> Models:
    return models_on(cluster.spawn(ResourcePool("main", (WORKERS,))))


def models_on(ranks: Ranks) -> Models:
    kind = cast("Any", Reader)
    return Models(Actor(ranks, "actor", kind), Policy(ranks, "reference", kind), Critic(ranks, "critic", kind))


def placed_call(own: Models, batch: Batch, minibatches: int) -> Callable[[], None]:
    cuts = split_groups(batch, minibatches, seed=0)
    lengths = np.diff(batch.response_offsets)

    def call() -> None:
        batch.tokens = TokenColumns(rollout_logprobs=batch.tokens.rollout_logprobs)
        passes = [BalancedPass(np.arange(len(batch))), *(BalancedPass(rows, 3.0) for rows in cuts)]
        with Placed(batch, passes) as placed:
            filling = [own.actor.logprobs(placed.rows(fills=("old_logprobs",)))]
            filling.append(own.reference.logprobs(placed.rows(fills=("ref_logprobs",))))
            filling.append(own.critic.values(placed.rows(fills=("values",))))
            for column in filling:
                check(batch, column.get())
            batch.tokens.advantages, batch.tokens.returns = np.zeros((2, len(batch.response_ids)), np.float32)
            weights = [np.ones(lengths[rows].sum(), np.float32) for rows in cuts]
            steps = [
                placed.rows(rows, weights=of_rows, to_controller=False)
                for rows, of_rows in zip(cuts, weights, strict=True)
            ]
            learning = own.actor.learn_steps(steps, LOSS)
            own.critic.learn_steps(steps, LOSS).get()
            learning.get()

    return call


def sent_call(own: Models, batch: Batch, minibatches: int) -> Callable[[], None]:
    cuts = split_groups(batch, minibatches, seed=0)

    def call() -> None:
        batch.tokens = TokenColumns(rollout_logprobs=batch.tokens.rollout_logprobs)
        tokens = batch.tokens
        filling = [own.actor.logprobs(batch), own.reference.logprobs(batch), own.critic.values(batch)]
        tokens.old_logprobs, tokens.ref_logprobs, tokens.values = (column.get() for column in filling)
        check(batch, tokens.values)
        tokens.advantages, tokens.returns = np.zeros((2, len(batch.response_ids)), np.float32)
        tokens.loss_weights, tokens.shares = np.ones((2, len(batch.response_ids)), np.float32)
        for rows in cuts:
            part = select_rows(batch, rows)
            learning = own.actor.learn(part, LOSS)
            own.critic.learn(part, LOSS).get()
            learning.get()

    return call


def check(batch: Batch, column: FloatArray) -> None:
    assert len(column) == len(batch.response_ids) and column[-1] == np.float32(batch.response_ids[-1]) * np.float32(
        -1e-6
    )


def padded_call(batch: Batch) -> Callable[[], None]:
    tensors, columns = pad(batch), pad_columns(batch, 5)
    actors = [PaddedReader.remote() for _ in range(WORKERS)]

    def cut(whole: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return [{name: tensor[part::WORKERS].contiguous() for name, tensor in whole.items()} for part in range(WORKERS)]

    def call() -> None:
        whole = dict(tensors)
        for name in ("old_log_probs", "ref_log_prob", "values"):
            answers = ray.get([actor.column.remote(part) for actor, part in zip(actors, cut(whole), strict=True)])
            whole[name] = torch.cat(answers)
            assert len(whole[name]) == ROWS
        whole |= {"advantages": columns[0], "returns": columns[1], "token_level_rewards": columns[2]}
        for _ in ("critic", "actor"):
            ray.get([actor.learn.remote(part) for actor, part in zip(actors, cut(whole), strict=True)])

    return call


def start_many(batch: Batch, many: int) -> dict[str, float]:
    start = time.perf_counter()
    cluster = LocalCluster()
    ranks = cluster.spawn(ResourcePool("many", (many,)))
    up_s = time.perf_counter() - start
    group = WorkerGroup(ranks, "reader", Reader)
    assert len(group.logprobs(batch).get()) == len(batch.response_ids)
    private_mib = max(group.private_mib().get())
    cluster.close()
    return {f"{many}_workers_up_s": round(up_s, 2), "worker_private_mib": round(private_mib, 1)}


def milliseconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def cpu_ms(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """CPU time of a call, of this process and all that it has started, Ray's own ones among them, less what all of them
    use in as long a time without a call. Clocks of processes tick each 10 ms, so that short calls are repeated more."""
    repeats = {name: 1 if name == "padded" else 8 for name in calls}
    used, took, idle, rested = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 0.0), 0.0, 0.0
    for _ in range(rounds):
        for name, call in calls.items():
            start, before = time.perf_counter(), cpu_s()
            for _ in range(repeats[name]):
                call()
            used[name] += cpu_s() - before
            took[name] += time.perf_counter() - start
        start, before = time.perf_counter(), cpu_s()
        time.sleep(1.0)
        idle += cpu_s() - before
        rested += time.perf_counter() - start
    return {name: (used[name] - took[name] * idle / rested) * 1e3 / rounds / repeats[name] for name in calls}


def cpu_s() -> float:
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def memory(samples: int, tokens: int) -> dict[str, float]:
    """What the controller takes for a step of PPO above what it has before the batch is there, by the real dataflow."""
    config = TrainConfig.model_validate(
        {
            "model": {"path": Path("unused")},
            "data": {"prompts_per_step": samples // SIBLINGS},
            "algorithm": {"type": "ppo", "group_size": SIBLINGS, "minibatches": 4},
            "generation": {"max_response_tokens": tokens},
            "trainer": {"run_dir": "unused", "steps": 1},
        }
    )
    algorithm = make_algorithm(config.algorithm, tokens)
    cluster = LocalCluster()
    try:
        own = models(cluster)
        roles = Roles(cast("Any", None), own.actor, None, own.critic)
        before = resident_mib()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        batch = make_batch(np.full(samples, 512), np.full(samples, tokens))
        made = resident_mib()
        start = time.perf_counter()
        with placed_step(batch, algorithm, config, step=1) as placed:
            prepare(roles, algorithm, placed)
            compute_advantages(algorithm, (), batch, (0, 1))
            update(roles.actor, roles.critic, algorithm, placed, config)
        seconds = time.perf_counter() - start
        peak = resident_mib("VmHWM") - before
    finally:
        cluster.close()
    response_tokens = samples * tokens
    return {
        "response_tokens": response_tokens,
        "batch_mib": round(made - before),
        "peak_mib": round(peak),
        "bytes_a_token": round(peak * 2**20 / response_tokens, 1),
        "step_s": round(seconds, 1),
    }


def resident_mib(name: str = "VmRSS") -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--started", type=int, default=64, metavar="WORKERS")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parse_arguments(parser, rounds=1, started=2)
    if arguments.samples:
        print(json.dumps({"benchmark": "data_plane", "figures": memory(arguments.samples, arguments.tokens)}))
        return
    batch = make_batch(*lengths_of_a_step())
    lengths = np.diff(batch.response_offsets)
    print(f"responses: mean {lengths.mean():.0f}, maximum {lengths.max()}; {lengths.sum()} response tokens")
    carried = carried_mib(batch, arguments.minibatches)
    print(json.dumps(carried))
    many = start_many(batch, arguments.started)
    clusters = {"local": LocalCluster(), "ray": RayCluster()}
    times: dict[str, list[float]] = {}
    try:
        calls: dict[str, Callable[[], None]] = {}
        for name, cluster in clusters.items():
            own = models(cluster)
            calls[name] = placed_call(own, batch, arguments.minibatches)
            calls[f"{name}_sent"] = sent_call(own, batch, arguments.minibatches)
        calls["padded"] = padded_call(batch)
        for number in range(WARM_UP + arguments.rounds):
            for name, call in calls.items():
                took = milliseconds(call)
                times.setdefault(name, []).extend([took] if number >= WARM_UP else [])
        cpu = cpu_ms(calls, arguments.rounds)
    finally:
        for cluster in clusters.values():
            cluster.close()
    median = {name: statistics.median(taken) for name, taken in times.items()}
    figures = {f"{name}_ms": round(value, 2) for name, value in median.items()}
    figures |= {f"{name}_cpu_ms": round(value, 1) for name, value in cpu.items()}
    figures |= {f"{name}_min_ms": round(min(taken), 2) for name, taken in times.items()} | many | carried
    ratio = {name: round(median["padded"] / value, 1) for name, value in median.items() if name != "padded"}
    ratio |= {f"{name}_cpu": round(cpu["padded"] / value, 1) for name, value in cpu.items() if name != "padded"}
    baseline = "padded int64 tensors, pickled, through Ray"
    print(json.dumps({"benchmark": "data_plane", "figures": figures, "baseline": baseline, "ratio": ratio}))


if __name__ == "__main__":
    main()
