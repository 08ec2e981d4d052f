"""Two pools: FSDP on two ranks trains, two native engines generate; after each publish both have the same log-probs."""

from contextlib import closing
from pathlib import Path

import numpy as np
from letters import letters

from tandem.algorithms.supervised import NextTokenLoss
from tandem.batching.packing import to_batch, token_shares
from tandem.cluster.local import LocalCluster
from tandem.config.generation import NativeGenerationConfig
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.controller.assembly import connect
from tandem.controller.placement import Placement
from tandem.controller.pools import ResourcePoolManager, Role
from tandem.controller.roles import Actor, Rollout
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, Group, Prompt, Score
from tandem.workers.rollout import RolloutSpec, RolloutWorker, seeded_requests
from tandem.workers.training import TrainSpec, TrainWorker

BOUND = 2e-5
POOLS = {"training": [2], "generation": [2]}


def answered(rollout: Rollout) -> Batch:
    prompts = [Prompt(row, np.arange(1, row + 3, dtype=np.int32), "", "", None) for row in range(8)]
    answers = rollout.generate(seeded_requests(prompts, 4, 0)).get()
    batch = to_batch([Group(answer, [Score(1.0)] * len(answer)) for answer in answers])
    batch.tokens.loss_weights = batch.tokens.shares = token_shares(batch.loss_mask)
    return batch


def test_after_each_step_and_publish_both_pools_have_the_same_logprobs(served_directory: Path) -> None:
    model = ModelConfig(path=served_directory)
    training = TrainSpec(model, FsdpTrainingConfig(), AdamWConfig(lr=1e-2), total_steps=10)
    serving = RolloutSpec(model, NativeGenerationConfig(max_response_tokens=20), letters())
    with closing(LocalCluster(timeout_s=120)) as cluster:
        placement = Placement(cluster, ResourcePoolManager(POOLS, {Role.Actor: "training", Role.Rollout: "generation"}))
        actor = placement.group(Role.Actor, Actor, TrainWorker, training)
        rollout = placement.group(Role.Rollout, Rollout, RolloutWorker, serving)
        publish = connect(actor, rollout, placement)
        seen = []
        for version in (1, 2, 3):
            publish(version)
            batch = answered(rollout)
            assert set(batch.versions.tolist()) == {version}
            np.testing.assert_allclose(batch.tokens.rollout_logprobs, actor.logprobs(batch).get(), atol=BOUND, rtol=0)
            seen.append(float(actor.learn(batch, NextTokenLoss()).get()[0]["sft/loss"]))
        assert seen[2] < seen[0] - 0.05, "the policy moved between the publishes"
