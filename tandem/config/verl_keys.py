"""Keys of verl's PPO configuration, and what to write in their place: for those who bring a file of verl's."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

SECTIONS = (
    "actor_rollout_ref", "critic", "reward_model", "custom_reward_function", "ray_kwargs", "global_profiler",
    "async_training",
)  # fmt: skip
"""Sections of a configuration of verl that ours does not have."""
_MODEL, _ACTOR, _ROLLOUT = "actor_rollout_ref.model.", "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

COUNTERPARTS: Mapping[str, str] = {
    f"{_MODEL}path": "model.path",
    f"{_MODEL}enable_gradient_checkpointing": "training.activation_checkpointing",
    f"{_MODEL}trust_remote_code": "model.trust_remote_code",
    f"{_MODEL}lora_rank": "model.lora.rank",
    f"{_MODEL}lora_alpha": "model.lora.alpha",
    f"{_MODEL}target_modules": "model.lora.target_modules",
    f"{_ACTOR}strategy": "training.type",
    f"{_ACTOR}optim.lr": "training.optimizer.lr",
    f"{_ACTOR}optim.betas": "training.optimizer.betas",
    f"{_ACTOR}optim.weight_decay": "training.optimizer.weight_decay",
    f"{_ACTOR}optim.clip_grad": "training.optimizer.max_grad_norm",
    f"{_ACTOR}optim.lr_warmup_steps": "training.optimizer.warmup_steps",
    f"{_ACTOR}optim.lr_warmup_steps_ratio": "training.optimizer.warmup_steps, a number of optimizer steps",
    f"{_ACTOR}optim.min_lr_ratio": "training.optimizer.min_lr_ratio",
    f"{_ACTOR}optim.warmup_style": "training.optimizer.schedule",
    f"{_ACTOR}optim.lr_scheduler_type": "training.optimizer.schedule",
    f"{_ACTOR}grad_clip": "training.optimizer.max_grad_norm",
    f"{_ACTOR}ppo_epochs": "algorithm.epochs",
    f"{_ACTOR}ppo_mini_batch_size": "algorithm.minibatches, the number of optimizer steps a pass",
    f"{_ACTOR}ppo_micro_batch_size": "training.tokens_per_micro_batch, which counts tokens",
    f"{_ACTOR}ppo_micro_batch_size_per_gpu": "training.tokens_per_micro_batch, which counts tokens",
    f"{_ACTOR}ppo_max_token_len_per_gpu": "training.tokens_per_micro_batch",
    f"{_ACTOR}clip_ratio": "algorithm.loss.clip_ratio_low and algorithm.loss.clip_ratio_high",
    f"{_ACTOR}clip_ratio_low": "algorithm.loss.clip_ratio_low",
    f"{_ACTOR}clip_ratio_high": "algorithm.loss.clip_ratio_high",
    f"{_ACTOR}clip_ratio_c": "algorithm.loss.dual_clip",
    f"{_ACTOR}policy_loss.loss_mode": "algorithm.loss.type",
    f"{_ACTOR}loss_agg_mode": "algorithm.loss.aggregation",
    f"{_ACTOR}entropy_coeff": "algorithm.entropy_coefficient",
    f"{_ACTOR}use_kl_loss": "algorithm.kl.place: loss",
    f"{_ACTOR}kl_loss_coef": "algorithm.kl.coefficient",
    f"{_ACTOR}kl_loss_type": "algorithm.kl.estimator",
    f"{_ACTOR}ulysses_sequence_parallel_size": "training.context_parallel",
    f"{_ACTOR}fsdp_config.fsdp_size": "training.shard_size",
    f"{_ACTOR}fsdp_config.param_offload": "training.cpu_offload",
    f"{_ACTOR}fsdp_config.optimizer_offload": "training.cpu_offload",
    f"{_ACTOR}fsdp_config.model_dtype": "model.dtype",
    f"{_ACTOR}megatron.tensor_model_parallel_size": "training.tensor_parallel",
    f"{_ACTOR}megatron.pipeline_model_parallel_size": "training.pipeline_parallel",
    f"{_ACTOR}megatron.context_parallel_size": "training.context_parallel",
    f"{_ACTOR}megatron.expert_model_parallel_size": "training.expert_parallel",
    f"{_ACTOR}megatron.expert_tensor_parallel_size": "training.expert_tensor_parallel",
    f"{_ROLLOUT}name": "generation.type",
    f"{_ROLLOUT}n": "algorithm.group_size",
    f"{_ROLLOUT}temperature": "generation.temperature",
    f"{_ROLLOUT}top_p": "generation.top_p",
    f"{_ROLLOUT}top_k": "generation.top_k, where 0 keeps all tokens",
    f"{_ROLLOUT}response_length": "generation.max_response_tokens",
    f"{_ROLLOUT}dtype": "model.dtype",
    f"{_ROLLOUT}tensor_model_parallel_size": "generation.tensor_parallel",
    f"{_ROLLOUT}free_cache_engine": "generation.sleep",
    f"{_ROLLOUT}gpu_memory_utilization": "generation.memory_share",
    f"{_ROLLOUT}max_model_len": "generation.engine_args.max_model_len",
    f"{_ROLLOUT}max_num_seqs": "generation.engine_args.max_num_seqs",
    f"{_ROLLOUT}max_num_batched_tokens": "generation.engine_args.max_num_batched_tokens",
    f"{_ROLLOUT}enforce_eager": "generation.engine_args.enforce_eager",
    f"{_ROLLOUT}val_kwargs.n": "generation.eval.samples",
    f"{_ROLLOUT}val_kwargs.temperature": "generation.eval.temperature",
    f"{_ROLLOUT}val_kwargs.top_p": "generation.eval.top_p",
    f"{_ROLLOUT}val_kwargs.do_sample": "generation.eval.temperature, where 0 is greedy",
    "critic.model.path": "model.critic_path",
    "critic.model.lora_rank": "model.critic_lora.rank",
    "critic.model.lora_alpha": "model.critic_lora.alpha",
    "critic.model.target_modules": "model.critic_lora.target_modules",
    "critic.optim.lr": "algorithm.critic_optimizer.lr",
    "critic.optim.weight_decay": "algorithm.critic_optimizer.weight_decay",
    "critic.cliprange_value": "algorithm.value_clip",
    "reward_model.model.path": "model.reward_model_path",
    "reward_model.enable": "model.reward_model_path",
    "custom_reward_function.path": "reward.functions: [path/to/file.py:function]",
    "custom_reward_function.name": "reward.functions: [path/to/file.py:function]",
    "custom_reward_function.reward_kwargs": "reward.functions: [{function: …, arguments: {…}}]",
    "async_training.staleness_threshold": "trainer.max_staleness, which counts training steps and bounds every token",
    "async_training.partial_rollout": "generation.partial_rollouts",
    "algorithm.rollout_correction.bypass_mode": "algorithm.rollout_correction.skip_old_logprobs",
    "async_training.use_rollout_log_probs": "algorithm.rollout_correction.skip_old_logprobs",
    "data.train_batch_size": "data.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "generation.max_response_tokens",
    "data.filter_overlong_prompts": "data.on_bad_row: skip",
    "data.truncation": "data.on_bad_row: skip",
    "data.seed": "trainer.seed",
    "data.trust_remote_code": "model.trust_remote_code",
    "algorithm.adv_estimator": "algorithm.type, where gae is ppo",
    "algorithm.lam": "algorithm.gae_lambda",
    "algorithm.use_kl_in_reward": "algorithm.kl.place: reward",
    "algorithm.kl_penalty": "algorithm.kl.estimator",
    "algorithm.kl_ctrl": "algorithm.kl",
    "algorithm.kl_ctrl.type": "algorithm.kl.control",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coefficient",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl.target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl.horizon_trajectories",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_by_std",
    "algorithm.filter_groups": "algorithm.resample_rounds",
    "algorithm.filter_groups.enable": "algorithm.resample_rounds",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.resample_rounds",
    "trainer.total_epochs": "trainer.epochs",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.save_freq": "trainer.save_every",
    "trainer.test_freq": "trainer.eval_every",
    "trainer.val_before_train": "trainer.eval_every, which validates before the first step, too",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.experiment_name": "trainer.run_dir",
    "trainer.project_name": "trainer.run_dir",
    "trainer.logger": "tracking",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_last",
    "trainer.resume_mode": "--resume RUN on the command line",
    "trainer.n_gpus_per_node": "cluster.ranks, or placement.pools for several nodes",
    "trainer.nnodes": "placement.pools",
}
"""Key of verl -> key of ours, with a word on what differs."""


def describe(key: str, value: Any) -> list[str]:
    """What to say of an unknown key, one message for every key below it; empty where it is none of verl's."""
    if key.partition(".")[0] in SECTIONS or key in COUNTERPARTS:
        return [_message(leaf) for leaf in leaves(key, value)]
    return []


def _message(key: str) -> str:
    """`key` has no keys below it."""
    if key in COUNTERPARTS:
        return f"{key}: a key of verl; write {COUNTERPARTS[key]}"
    return f"{key}: a key of verl that has no counterpart here; leave it out (docs/configuration.md has all keys)"


def leaves(key: str, value: Any) -> Iterator[str]:
    """The keys below one, of the sections in its value."""
    if not isinstance(value, dict) or not value:
        yield key
        return
    for name, inner in cast(dict[Any, Any], value).items():
        yield from leaves(f"{key}.{name}", inner)
