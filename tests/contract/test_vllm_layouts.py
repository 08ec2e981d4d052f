"""FSDP on 1, 2 and 4 ranks to tensor parallel 1 and 2: after each publish both sides have the same log-probs."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from letters import letters
from test_generation import ask, request

from tandem.algorithms.supervised import NextTokenLoss
from tandem.batching.packing import to_batch, token_shares
from tandem.cluster.local import LocalCluster
from tandem.config.generation import VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.controller.pools import ResourcePool
from tandem.controller.roles import Actor
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.start import start_engine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, Completion, Group, Prompt, Request, Score, Trajectory
from tandem.weights.bridge import Receiver
from tandem.workers.training import TrainSpec, TrainWorker

BOUND = 2e-5
ASKED = tuple(request(*range(1, place + 2), seeds=range(4), max_tokens=20) for place in range(8))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="tensor parallel 1"),
        pytest.param(2, id="tensor parallel 2", marks=pytest.mark.nightly),
    ],
)
def engine(request: pytest.FixtureRequest, vllm: None, served_directory: Path) -> Iterator[ReplicatedEngine]:
    if request.param == 1:
        yield request.getfixturevalue("vllm_engine")
        return
    options = {"gpu_memory_utilization": 0.1}
    config = VllmGenerationConfig(type="vllm", tensor_parallel=request.param, engine_args=options)
    with closing(start_engine(ModelConfig(path=served_directory), config, letters())) as made:
        yield made


def answered(engine: ReplicatedEngine) -> Batch:
    def trajectory(asked: Request, done: Completion) -> Trajectory:
        prompt = Prompt(0, asked.token_ids, "", "", None)
        mask = np.ones(len(done.token_ids), dtype=np.bool_)
        return Trajectory(prompt, done.sample, done.token_ids, mask, done.logprobs, done.versions, "", done.status)

    rows = [
        [trajectory(asked, done) for done in answer] for asked, answer in zip(ASKED, ask(engine, *ASKED), strict=True)
    ]
    batch = to_batch([Group(group, [Score(1.0)] * len(group)) for group in rows])
    batch.tokens.loss_weights = batch.tokens.shares = token_shares(batch.loss_mask)
    return batch


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2, 4])
def test_after_each_step_and_publish_vllm_has_the_trainers_logprobs(
    engine: ReplicatedEngine, served_directory: Path, ranks: int
) -> None:
    engine.wake()
    with closing(LocalCluster(timeout_s=1200)) as cluster:
        pool = cluster.spawn(ResourcePool("acting", (ranks,)))
        spec = TrainSpec(ModelConfig(path=served_directory), FsdpTrainingConfig(), AdamWConfig(lr=1e-2), total_steps=10)
        actor = Actor(pool, "actor", TrainWorker, spec)
        address = actor.open_bridge(1, delta=False).get()
        joining = actor.join_bridge(address)
        receiver = Receiver(address, 0)
        joining.get()
        seen = []
        for version in (1, 2, 3):
            sending = actor.send_weights()
            engine.load_weights(version, receiver.receive())
            sending.get()
            batch = answered(engine)
            assert set(batch.versions.tolist()) == {version}
            np.testing.assert_allclose(batch.tokens.rollout_logprobs, actor.logprobs(batch).get(), atol=BOUND, rtol=0)
            seen.append(float(actor.learn(batch, NextTokenLoss()).get()[0]["sft/loss"]))
        assert seen[2] < seen[0] - 0.05, "the policy moved between the publishes"
