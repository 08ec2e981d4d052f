"""verl's keys: what each is here, for `tandem import verl` and for those who bring a file of verl's.

Defaults are those of verl's published configuration files, where they differ from ours.
"""

from collections.abc import Iterator
from typing import Any, cast

from tandem.config.counterparts import (
    Key,
    Table,
    if_false,
    if_true,
    int_or_zero,
    key_in,
    list_of,
    listed,
    nonzero,
    not_minus_one,
    positive,
    precision,
    texts,
    together,
    under,
)

SECTIONS = (
    "actor_rollout_ref", "critic", "reward_model", "custom_reward_function", "ray_kwargs", "global_profiler",
    "async_training",
)  # fmt: skip
"""Sections of a configuration of verl that ours does not have."""
OVERLONG = (
    "reward_model.overlong_buffer", "custom_reward_function.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.overlong_buffer_cfg",
)  # fmt: skip
"""Sections that verl has had its overlong buffer in."""
_LOSSES = {
    "vanilla": "clip", "gspo": "gspo", "sapo": "sapo", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "gpg": "reinforce",
    "geo_mean": "gmpo", "cispo": "cispo",
}  # fmt: skip
_AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean", "seq-mean-token-sum-norm": "fixed_length",
}  # fmt: skip
_PPO = ("algorithm.type", "ppo")
_FSDP, _MEGATRON = ("training.type", "fsdp"), ("training.type", "megatron")
_SERVED = ("generation.type", "vllm", "sglang")


def engine_of(given: Any) -> str:
    """`generation.type`."""
    return {"hf": "native"}.get(given, given if given in ("vllm", "sglang") else "vllm")


def cosine(given: Any) -> str | None:
    """`schedule` of an optimizer; the other one that verl has is the default here."""
    return "cosine" if given == "cosine" else None


def skip_long(given: Any) -> str | None:
    """`data.on_bad_row`."""
    return "skip" if given != "error" else None


def warmed(given: Any) -> int:
    """Steps of the critic alone: verl's policy learns from the step of that number on, and its first step is 1."""
    return max(int_or_zero(given) - 1, 0)


_ADAPTERS: Table = {
    "lora.rank": Key("rank", convert=nonzero, older=("lora_rank",)),
    "lora.alpha": Key("alpha", 16, older=("lora_alpha",), when=("rank",)),
    "target_modules": Key("target_modules", "all-linear", when=("rank",)),
}
_OPTIMIZER: Table = {
    "weight_decay": Key("weight_decay", 0.01),
    "lr_warmup_steps": Key("warmup_steps", convert=positive),
    "lr_warmup_steps_ratio": "warmup_steps, a number of optimizer steps",
    "lr_scheduler_type": Key("schedule", convert=cosine, older=("warmup_style",)),
    "min_lr_ratio": Key("min_lr_ratio"),
    "betas": Key("betas", convert=list_of),
    "clip_grad": Key("max_grad_norm"),
}
TRAINER: Table = {
    **together("trainer.run_dir", "trainer.default_local_dir", "trainer.experiment_name"),
    "trainer.total_training_steps": "trainer.steps",
    "trainer.total_epochs": "trainer.epochs",
    "trainer.save_freq": Key("trainer.save_every", convert=positive),
    "trainer.test_freq": Key("trainer.eval_every", convert=positive),
    "trainer.max_actor_ckpt_to_keep": Key("trainer.keep_last", older=("trainer.max_ckpt_to_keep",)),
    "data.seed": Key("trainer.seed", older=("trainer.seed",)),
    "trainer.logger": "tracking",
    "trainer.project_name": "tracking.wandb.project",
    "trainer.n_gpus_per_node": "cluster.ranks, or placement.pools for several nodes",
    "trainer.nnodes": "placement.pools",
}
"""Keys that all programs of verl have."""
KEYS: Table = {
    **under("actor_rollout_ref.model.", "model.", {
        "path": Key("path", "MODEL_DIRECTORY"),
        "trust_remote_code": Key("trust_remote_code", convert=if_true(True)),
    }),
    "data.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": Key("model.dtype", "bfloat16", precision),
    "actor_rollout_ref.rollout.dtype": "model.dtype",
    **under("actor_rollout_ref.model.", "model.lora.", _ADAPTERS),
    "actor_rollout_ref.actor.freeze_vision_tower": Key(
        "model.vision_tower", convert=if_true("frozen"), say="model.vision_tower: frozen"
    ),
    "critic.model.path": Key("model.critic_path", convert=nonzero),
    **under("critic.model.", "model.critic_lora.", _ADAPTERS, _PPO),
    **together(
        "model.reward_model_path", "reward_model.enable", "reward_model.model.path", "reward.reward_model.enable",
        "reward.reward_model.model_path",
    ),
    **under("data.", "data.", {
        "train_files": Key("train_files", "TRAIN.parquet", listed),
        "val_files": Key("val_files", [], listed),
        "train_batch_size": Key("prompts_per_step"),
        "max_prompt_length": Key("max_prompt_tokens", 512),
        "filter_overlong_prompts": Key("on_bad_row", convert=if_true("skip"), say="on_bad_row: skip"),
        "truncation": Key("on_bad_row", convert=skip_long, say="on_bad_row: skip"),
        "shuffle": Key("shuffle", convert=if_false(False)),
    }),
    **under("algorithm.", "algorithm.", {
        "adv_estimator": "type, where gae is ppo",
        "norm_adv_by_std_in_grpo": Key("normalize_by_std", unless=True),
        "gamma": Key("gamma", unless=1.0, when=("type", "ppo", "reinforce_plus_plus")),
        "lam": Key("gae_lambda", unless=1.0, when=("type", "ppo")),
        **together("rewards", "gdpo_reward_keys", "gdpo_reward_weights"),
        "use_kl_in_reward": "kl.place: reward",
        "kl_penalty": "kl.estimator",
        "kl_ctrl": "kl",
        "kl_ctrl.type": "kl.control",
        "kl_ctrl.kl_coef": "kl.coefficient",
        "kl_ctrl.target_kl": "kl.target",
        "kl_ctrl.horizon": "kl.horizon_trajectories",
        **together("resample_rounds", "filter_groups", "filter_groups.enable", "filter_groups.max_num_gen_batches"),
        "rollout_correction.rollout_is": "rollout_correction.level",
        "rollout_correction.rollout_is_threshold": "rollout_correction.upper",
        "rollout_correction.bypass_mode": "rollout_correction.skip_old_logprobs",
    }),
    **under("actor_rollout_ref.actor.", "algorithm.", {
        "ppo_mini_batch_size": "minibatches, the number of optimizer steps an epoch",
        "ppo_epochs": Key("epochs", unless=1),
        "entropy_coeff": Key("entropy_coefficient", unless=0),
        "policy_loss.loss_mode": Key("loss.type", "vanilla", _LOSSES),
        "clip_ratio": "loss.clip_ratio_low and algorithm.loss.clip_ratio_high",
        "clip_ratio_low": "loss.clip_ratio_low",
        "clip_ratio_high": "loss.clip_ratio_high",
        "clip_ratio_c": Key("loss.dual_clip", 3.0, when=("loss.type", "clip")),
        "loss_agg_mode": Key("loss.aggregation", convert=_AGGREGATIONS, unless="token_mean"),
        "use_kl_loss": "kl.place: loss",
        "kl_loss_coef": "kl.coefficient",
        "kl_loss_type": "kl.estimator",
    }),
    "critic.cliprange_value": Key("algorithm.value_clip", 0.5, unless=0.2, when=_PPO),
    "critic.optim.lr": Key("algorithm.critic_optimizer.lr", 1e-5, when=_PPO),
    **under("critic.optim.", "algorithm.critic_optimizer.", _OPTIMIZER, _PPO),
    "trainer.critic_warmup": Key("algorithm.critic_warmup_steps", convert=warmed, unless=0, when=_PPO),
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    **under("distillation.", "algorithm.", {
        **together("type: on_policy_distillation", "enabled", "distillation_loss.use_policy_gradient"),
        "distillation_loss.distillation_loss_coef": Key(
            "distillation_coefficient", unless=1.0, when=("type", "on_policy_distillation")
        ),
        **together(
            "reward_weight, with algorithm.type: on_policy_distillation", "distillation_loss.use_policy_loss",
            "distillation_loss.use_task_rewards",
        ),
        **together(
            "top_k, with algorithm.type: on_policy_distillation", "distillation_loss.loss_mode",
            "distillation_loss.topk",
        ),
    }),
    **dict.fromkeys(
        (f"{section}.{name}" for section in OVERLONG for name in ("enable", "len", "penalty_factor", "log")),
        "algorithm.overlong_buffer",
    ),
    "actor_rollout_ref.rollout.name": Key("generation.type", "vllm", engine_of),
    "data.max_response_length": Key("generation.max_response_tokens", 512),
    **under("actor_rollout_ref.rollout.", "generation.", {
        "response_length": "max_response_tokens",
        "temperature": Key("temperature", unless=1.0),
        "top_p": Key("top_p", unless=1),
        "top_k": Key("top_k", convert=not_minus_one, unless=0, say="top_k, where 0 keeps all tokens"),
        "val_kwargs.do_sample": "eval.temperature, where 0 is greedy",
        "val_kwargs.temperature": "eval.temperature",
        "val_kwargs.top_p": Key("eval.top_p", unless=1.0),
        "val_kwargs.n": Key("eval.samples", unless=1),
    }),
    **under("actor_rollout_ref.rollout.", "generation.", {
        "tensor_model_parallel_size": Key("tensor_parallel", 2, unless=1),
        "free_cache_engine": Key("sleep", convert=if_false("never")),
        "gpu_memory_utilization": Key("memory_share", 0.5),
        "max_model_len": "engine_args.max_model_len",
        "max_num_seqs": Key("engine_args.max_num_seqs"),
        "max_num_batched_tokens": Key("engine_args.max_num_batched_tokens"),
        "enforce_eager": Key("engine_args.enforce_eager"),
    }, _SERVED),
    **together("training.type", "actor_rollout_ref.actor.strategy", "model_engine"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Key(
        "training.activation_checkpointing", True, if_true(True)
    ),
    **under("actor_rollout_ref.actor.", "training.", {
        "ulysses_sequence_parallel_size": Key(
            "context_parallel", unless=1, older=("fsdp_config.ulysses_sequence_parallel_size",)
        ),
        "fsdp_config.fsdp_size": Key("shard_size", convert=not_minus_one),
        **together("cpu_offload", "fsdp_config.param_offload", "fsdp_config.optimizer_offload"),
    }, _FSDP),
    **under("actor_rollout_ref.actor.megatron.", "training.", {
        "tensor_model_parallel_size": Key("tensor_parallel", unless=1),
        "pipeline_model_parallel_size": Key("pipeline_parallel", unless=1),
        "virtual_pipeline_model_parallel_size": Key("virtual_pipeline", unless=1),
        "context_parallel_size": Key("context_parallel", unless=1),
        "expert_model_parallel_size": Key("expert_parallel", unless=1),
        "expert_tensor_parallel_size": Key("expert_tensor_parallel", unless=1),
    }, _MEGATRON),
    **under("actor_rollout_ref.actor.", "training.", {
        **together(
            "tokens_per_micro_batch, which counts tokens", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
        ),
        "ppo_max_token_len_per_gpu": "tokens_per_micro_batch",
        "optim.lr": Key("optimizer.lr", 1e-6),
    }),
    **under("actor_rollout_ref.actor.optim.", "training.optimizer.", _OPTIMIZER),
    "actor_rollout_ref.actor.grad_clip": Key("training.optimizer.max_grad_norm", unless=1.0),
    **under("actor_rollout_ref.rollout.multi_turn.", "conversation.", {
        "tool_config_path": "environment.tools",
        "interaction_config_path": "environment.user",
        **together("max_turns", "max_assistant_turns", "max_turns"),
        "enable": "environment",
    }),
    **under("", "reward.functions: ", {
        **together(
            "[path/to/file.py:function]", "custom_reward_function.path", "custom_reward_function.name",
            "reward.custom_reward_function.path", "reward.custom_reward_function.name",
        ),
        **together(
            "[{function: …, arguments: {…}}]", "custom_reward_function.reward_kwargs",
            "reward.custom_reward_function.reward_kwargs",
        ),
    }),
    **TRAINER,
    "trainer.val_before_train": "trainer.eval_every, which validates before the first step, too",
    "trainer.resume_mode": "--resume RUN on the command line",
    "async_training.staleness_threshold": "trainer.max_staleness, which counts training steps and bounds every token",
    "async_training.partial_rollout": "generation.partial_rollouts",
    "async_training.use_rollout_log_probs": "algorithm.rollout_correction.skip_old_logprobs",
    **together(
        "data.prompts_per_step, those from one publish to the next", "async_training.trigger_parameter_sync_step",
        "async_training.require_batches",
    ),
    **together("placement.pools", "rollout.n_gpus_per_node", "rollout.nnodes"),
    "rollout.total_rollout_steps": "trainer.steps",
    "rollout.test_freq": "trainer.eval_every",
}  # fmt: skip
"""The keys of its programs that generate."""
COUNTERPARTS = {theirs: text for theirs, text in texts(KEYS).items() if key_in(text) != theirs}
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
