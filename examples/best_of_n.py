"""Best-of-n distillation, a dataflow of its own: sample, keep each prompt's best answer, imitate it, repeat.

python examples/best_of_n.py CONFIG.yaml [key=value …]      as for `tandem train`; cluster.type=ray works unchanged
"""

import sys
from contextlib import closing
from pathlib import Path

from tandem import RewardManager, RLHFDataset, Role, TrainWorker
from tandem.algorithms.losses import NextTokenLoss
from tandem.batching.packing import demonstrations_to_batch
from tandem.cluster import make_cluster
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import actor_spec, connect, make_rollout
from tandem.controller.learning import token_shares
from tandem.controller.placement import Placement, pools_of
from tandem.controller.roles import Actor
from tandem.data.sampler import Sampler
from tandem.jobs.inputs import read_inputs
from tandem.types import Demonstration, Group
from tandem.workers.rollout import seeded_requests


def best_of(group: Group) -> Demonstration:
    answers = zip(group.trajectories, group.scores, strict=True)
    best, _ = max(answers, key=lambda answer: float("-inf") if answer[1].value is None else answer[1].value)
    return Demonstration(best.prompt.index, best.prompt.token_ids, best.response_ids, best.loss_mask)


def main() -> None:
    config = load_config(TrainConfig, Path(sys.argv[1]), sys.argv[2:])
    inputs = read_inputs(config, RLHFDataset)
    trainer, steps = config.trainer, config.trainer.steps or 1
    sampler = Sampler(len(inputs.train), config.data.prompts_per_step, config.data.shuffle, trainer.seed)
    with closing(make_cluster(config)) as cluster, closing(RewardManager(config.reward, trainer.seed)) as reward:
        placement = Placement(cluster, pools_of(config))
        actor = placement.group(Role.Actor, Actor, TrainWorker, actor_spec(config, steps))
        rollout = make_rollout(config, inputs.tokenizer, placement)
        publish = connect(actor, rollout, placement)
        publish(0)
        for step in range(1, steps + 1):
            prompts = [inputs.train[row] for row in next(sampler)]
            requests = seeded_requests(prompts, config.algorithm.group_size, trainer.seed, step)
            groups = reward.score(rollout.generate(requests).get(), step)
            batch = demonstrations_to_batch([best_of(group) for group in groups])
            batch.tokens.weights = batch.tokens.shares = token_shares(batch.loss_mask)
            metrics, _ = actor.learn(batch, NextTokenLoss()).get()
            publish(step)
            values = [score.value for group in groups for score in group.scores if score.value is not None]
            print(f"step {step}: reward {sum(values) / len(values):.4f}, loss {metrics['sft/loss']:.6f}", flush=True)


if __name__ == "__main__":
    main()
