"""PPO as articles on verl show it: roles mapped to workers, workers to pools, then fit.

    python examples/ray_ppo_trainer.py CONFIG.yaml

`tandem train CONFIG.yaml cluster.type=ray` does the same without a program.
"""

from tandem import (
    RayPPOTrainer,
    RayWorkerGroup,
    ResourcePoolManager,
    RewardManager,
    Role,
    RolloutWorker,
    TrainConfig,
    TrainWorker,
    load_tokenizer,
    run_program,
)


def main(config: TrainConfig) -> None:
    tokenizer = load_tokenizer(config.model)

    role_worker_mapping = {
        Role.ActorRollout: TrainWorker,
        Role.Rollout: RolloutWorker,
        Role.Critic: TrainWorker,
        Role.RefPolicy: TrainWorker,
    }

    processes_per_node, nodes = config.cluster.ranks or 1, 1
    global_pool_id = "global_pool"
    resource_pool_spec = {global_pool_id: [processes_per_node] * nodes}
    mapping = {Role.ActorRollout: global_pool_id, Role.Critic: global_pool_id, Role.RefPolicy: global_pool_id}
    resource_pool_manager = ResourcePoolManager(resource_pool_spec=resource_pool_spec, mapping=mapping)

    trainer = RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=resource_pool_manager,
        ray_worker_group_cls=RayWorkerGroup,
        reward_fn=RewardManager(config.reward, seed=config.trainer.seed),
        val_reward_fn=RewardManager(config.reward, seed=config.trainer.seed),
    )
    trainer.init_workers()
    trainer.fit()


if __name__ == "__main__":
    run_program(TrainConfig, main)
