"""Best-of-n distillation, a dataflow of its own: sample, keep each prompt's best answer, imitate it, repeat.

python examples/best_of_n.py CONFIG.yaml [key=value …]      as for `tandem train`; cluster.type=ray works unchanged

The model is then in trainer.run_dir, which `tandem eval` and `tandem serve` take for one.
"""

import math

import tandem


def best_of(group: tandem.Group) -> tandem.Demonstration:
    values = [-math.inf if score.value is None else score.value for score in group.scores]
    best = group.trajectories[values.index(max(values))]
    return tandem.Demonstration(best.prompt.index, best.prompt.token_ids, best.response_ids, best.loss_mask)


def main(config: tandem.TrainConfig) -> None:
    with tandem.Dataflow(config) as flow:
        for step in range(1, flow.total_steps + 1):
            prompts = next(flow.prompts)
            requests = tandem.seeded_requests(prompts, config.algorithm.group_size, config.trainer.seed, step)
            groups = flow.reward.score(flow.rollout.generate(requests).get(), step)
            flow.reward.check_share(groups)
            scored = [group for group in groups if any(score.value is not None for score in group.scores)]
            batch = tandem.demonstrations_to_batch([best_of(group) for group in scored])
            batch.tokens.loss_weights = batch.tokens.shares = tandem.token_shares(batch.loss_mask)
            metrics, _ = flow.actor.learn(batch, tandem.NextTokenLoss()).get()
            flow.publish(step)
            values = [score.value for group in groups for score in group.scores if score.value is not None]
            print(f"step {step}: reward {sum(values) / len(values):.4f}, loss {metrics['sft/loss']:.6f}", flush=True)
        flow.save(flow.total_steps)


if __name__ == "__main__":
    tandem.run_program(tandem.TrainConfig, main)
