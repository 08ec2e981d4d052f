"""Arguments of OpenRLHF: what each is here, those of its older versions, and those that become nothing of ours."""

from collections.abc import Mapping
from typing import Any

from tandem.config.counterparts import Key, Table, if_true, listed, nonzero, positive, precision, together, under
from tandem.importing.outcome import by_pattern

_LEARNING_RATES = {"ppo_ray": 1e-6, "sft": 5e-6, "dpo": 1e-5, "rm": 9e-6}
LONGEST = {"ppo_ray": 2048, "sft": 2048, "dpo": 512, "rm": 512}
"""Tokens of a row."""
_SCHEDULES = {
    "cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant",
    "constant_with_warmup": "constant",
}  # fmt: skip
_PPO = ("algorithm.type", "ppo")


def _targets(given: Any) -> Any:
    return given if given == "all-linear" else listed(given)


def _preferred_by(ipo: Any) -> str:
    return "ipo" if ipo else "dpo"


def _loss_of(given: Any) -> str:
    return "gspo" if given == "gspo" else "clip"


_OPTIMIZER: Table = {
    "adam.betas": Key("betas", [0.9, 0.95], list),
    "adam.weight_decay": Key("weight_decay", unless=0),
    "adam.eps": Key("eps", unless=1e-8),
    "max_norm": Key("max_grad_norm", unless=1.0),
    "lr_scheduler": Key("schedule", "cosine_with_min_lr", _SCHEDULES),
    "min_lr_ratio": "min_lr_ratio",
    "lr_warmup_ratio": "warmup_steps",
}


def table(method: str) -> Table:
    """The arguments of a trainer, and their defaults there."""
    own: Table = _ONLINE if method == "ppo_ray" else _offline(method)
    policy, optimizer = ("actor.", "actor.") if method == "ppo_ray" else ("model.", "")
    return {
        f"{policy}model_name_or_path": Key("model.path", "MODEL_DIRECTORY"),
        "ds.bf16": "model.dtype",
        "ds.param_dtype": Key("model.dtype", "bf16", precision),
        **under("ds.lora.", "model.lora.", {
            "rank": Key("rank", convert=nonzero),
            "alpha": Key("alpha", 16, when=("rank",)),
            "target_modules": Key("target_modules", "all-linear", _targets, when=("rank",)),
        }),
        "actor.freeze_visual_encoder": Key("model.vision_tower", convert=if_true("frozen")),
        "critic.model_name_or_path": Key("model.critic_path", convert=nonzero),
        "reward.model_name_or_path": Key("model.reward_model_path", convert=nonzero),
        **together(
            "data.train_files", "data.prompt_dataset", "data.dataset", "data.prompt_split", "data.dataset_split",
            "data.max_samples",
        ),
        **together("data.val_files", "eval.dataset", "eval.split"),
        **own,
        f"{policy}gradient_checkpointing_enable": Key("training.activation_checkpointing", convert=if_true(True)),
        "ds.ring_attn_size": Key("training.context_parallel", unless=1),
        "ds.adam_offload": Key("training.optimizer_offload", convert=if_true(True)),
        **together("training.tokens_per_micro_batch", "train.max_tokens_per_gpu", "train.micro_batch_size"),
        f"{optimizer}adam.lr": Key("training.optimizer.lr", _LEARNING_RATES[method]),
        **under(optimizer, "training.optimizer.", _OPTIMIZER),
        "ckpt.output_dir": Key("trainer.run_dir", "runs/imported"),
        "ckpt.save_steps": Key("trainer.save_every", convert=positive),
        "eval.steps": Key("trainer.eval_every", convert=positive),
        "ckpt.max_num": Key("trainer.keep_last"),
        "train.seed": Key("trainer.seed"),
        "ckpt.best_metric_key": "trainer.best_metric, as val/default/reward/mean@N",
        "logger.wandb.project": "tracking.wandb.project",
        "logger.tensorboard_dir": "tracking.tensorboard",
        "train.agent_func_path": "conversation.environment, with a class of yours (docs/agents.md)",
        "ds.tensor_parallel_size": "training.type: megatron with tensor_parallel",
        "actor.aux_loss_coef": "training.load_balancing_loss, with training.type: megatron",
        "data.tokenizer_chat_template": "model.chat_template.file",
        "data.input_template": "the text of `prompt` as the model is to read it",
    }  # fmt: skip


def _offline(method: str) -> Table:
    pairs: Table = {
        "ipo_enable": Key("loss", False, _preferred_by),
        "beta": Key("beta", 0.1),
        "label_smoothing": Key("label_smoothing", unless=0),
    }
    return {
        "train.batch_size": Key("data.rows_per_step", 128),
        "data.max_len": Key("data.max_tokens", LONGEST[method]),
        "train.max_epochs": Key("trainer.epochs", 2 if method == "sft" else 1),
        **(under("model.", "preference.", pairs) if method == "dpo" else {}),
    }


_ONLINE: Table = {
    "rollout.batch_size": "data.prompts_per_step",
    "rollout.n_samples_per_prompt": "algorithm.group_size",
    "train.batch_size": "algorithm.minibatches",
    "train.max_epochs": Key("algorithm.epochs", unless=1),
    "train.num_episodes": Key("trainer.epochs", 1),
    **under("actor.", "algorithm.", {
        "entropy_coef": Key("entropy_coefficient", convert=nonzero),
        "policy_loss_type": Key("loss.type", "ppo", _loss_of),
        **together("loss.clip_ratio_low and algorithm.loss.clip_ratio_high", "eps_clip", "eps_clip_low_high"),
        "dual_clip": Key("loss.dual_clip", convert=nonzero, when=("loss.type", "clip")),
    }),
    **under("algo.", "algorithm.", {
        "advantage.estimator": "type",
        "advantage.no_std_norm": "normalize_by_std",
        "advantage.gamma": Key("gamma", unless=1, when=("type", "ppo", "reinforce_plus_plus")),
        "advantage.lambd": Key("gae_lambda", unless=1, when=("type", "ppo")),
        **together(
            "rollout_correction", "advantage.is_correction_enable", "advantage.is_correction_type",
            "advantage.is_correction_threshold",
        ),
        "kl.init_coef": "kl.coefficient",
        "kl.use_loss": "kl.place",
        "kl.estimator": "kl.estimator",
        "kl.target": "kl.target",
        "kl.horizon": "kl.horizon_trajectories",
        "dynamic_filtering_enable": Key("resample_rounds", convert=if_true(100)),
    }),
    "critic.value_clip": Key("algorithm.value_clip", 0.5, when=_PPO),
    "critic.adam.lr": Key("algorithm.critic_optimizer.lr", 9e-6, when=_PPO),
    **under("critic.", "algorithm.critic_optimizer.", _OPTIMIZER, _PPO),
    **under("reward.", "algorithm.", {
        "normalize_enable": Key("normalize_rewards", convert=if_true(True)),
        "clip_range": "clip_rewards",
        **together("overlong_buffer", "overlong_buffer_len", "overlong_penalty_factor"),
    }),
    "reward.remote_url": "reward.functions",
    **together("generation.max_response_tokens", "data.max_len", "rollout.max_new_tokens"),
    "data.prompt_max_len": "data.max_prompt_tokens",
    "rollout.temperature": Key("generation.temperature", unless=1.0),
    "rollout.top_p": Key("generation.top_p", unless=1.0),
    "vllm.tensor_parallel_size": Key("generation.tensor_parallel", unless=1),
    "vllm.gpu_memory_utilization": Key("generation.memory_share"),
    "vllm.enforce_eager": Key("generation.engine_args.enforce_eager", convert=if_true(True)),
    "eval.n_samples_per_prompt": "generation.eval.samples",
    "eval.temperature": "generation.eval.temperature",
    "train.async_enable": "trainer.max_staleness",
    "actor.num_nodes": "placement.pools",
    "actor.num_gpus_per_node": "cluster.ranks",
}  # fmt: skip
OLDER: Mapping[str, str] = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "agent_func_path": "train.agent_func_path",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "ref_num_nodes": "ref.num_nodes",
    "ref_num_gpus_per_node": "ref.num_gpus_per_node",
    "critic_num_nodes": "critic.num_nodes",
    "critic_num_gpus_per_node": "critic.num_gpus_per_node",
    "reward_num_nodes": "reward.num_nodes",
    "reward_num_gpus_per_node": "reward.num_gpus_per_node",
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_sync_backend": "vllm.sync_backend",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "enforce_eager": "vllm.enforce_eager",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "async_train": "train.async_enable",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "save_hf_ckpt": "ckpt.save_hf",
    "max_ckpt_num": "ckpt.max_num",
    "load_checkpoint": "ckpt.load_enable",
    "micro_train_batch_size": "train.micro_batch_size",
    "train_batch_size": "train.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "max_samples": "data.max_samples",
    "max_len": "data.max_len",
    "prompt_max_len": "data.prompt_max_len",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "zero_stage": "ds.zero_stage",
    "bf16": "ds.bf16",
    "flash_attn": "ds.flash_attn",
    "packing_samples": "ds.packing_samples",
    "adam_offload": "ds.adam_offload",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "load_in_4bit": "ds.load_in_4bit",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "learning_rate": "adam.lr",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "kl_estimator": "algo.kl.estimator",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type",
    "entropy_loss_coef": "actor.entropy_coef",
    "value_clip": "critic.value_clip",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "normalize_reward": "reward.normalize_enable",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "prompt_data": "data.prompt_dataset",
    "prompt_split": "data.prompt_split",
    "dataset": "data.dataset",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_steps": "eval.steps",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "input_key": "data.input_key",
    "output_key": "data.output_key",
    "label_key": "data.label_key",
    "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "beta": "model.beta",
    "ipo": "model.ipo_enable",
    "label_smoothing": "model.label_smoothing",
    "nll_loss_coef": "model.nll_loss_coef",
    "l2": "adam.weight_decay",
    "seed": "train.seed",
    "logging_steps": "logger.logging_steps",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "use_tensorboard": "logger.tensorboard_dir",
}
"""As arguments were called before they had dots."""
WITHOUT_EFFECT = by_pattern({
    "a checkpoint has all that a resume needs": ("ckpt.disable_ds",),
    "--resume RUN on the command line": ("ckpt.load_enable",),
    "trainer.keep_last bounds checkpoints": ("ckpt.max_mem",),
    "checkpoints are in the run directory": ("ckpt.path",),
    "checkpoints are always Hugging Face directories": ("ckpt.save_hf",),
    "messages go through the chat template": ("data.apply_chat_template",),
    "the column is `chosen`; tandem data columns renames others": ("data.chosen_key",),
    "rows are read once, at the start": ("data.dataloader_num_workers",),
    "the column is `images`": ("data.image_key",),
    "the column is `prompt`; tandem data columns renames others": ("data.input_key",),
    "a reward function names the columns it needs": ("data.label_key",),
    "pictures of a row are counted": ("data.max_images_per_prompt",),
    "the column is `completion`; tandem data columns renames others": ("data.output_key",),
    "the column is `rejected`; tandem data columns renames others": ("data.rejected_key",),
    "attention is chosen for the device": ("ds.attn_implementation", "ds.flash_attn"),
    "roles on the same devices take turns by themselves": ("ds.enable_sleep", "ref.offload", "reward.offload"),
    "gradients are summed in float32": ("ds.grad_accum_dtype",),
    "layers are always fetched ahead": ("ds.overlap_comm",),
    "rows are always packed": ("ds.packing_samples",),
    "the ring has one way": ("ds.ring_attn_head_stride",),
    "log-probs are always computed without the whole logits": ("ds.use_liger_kernel",),
    "a reward model's head is found": ("ds.value_head_prefix",),
    "training.type: fsdp shards over all ranks": ("ds.zero_stage",),
    "training.shard_size says which ranks share a copy": ("ds.zpg",),
    "processes know their rank": ("local_rank",),
    "each step is logged": ("logger.logging_steps",),
    "tracking.wandb: true; the key stays in the environment": ("logger.wandb.key",),
    "trainer.run_dir names the run": ("logger.wandb.run_name",),
    "one kind is there": ("model.gradient_checkpointing_reentrant", "actor.gradient_checkpointing_reentrant"),
    "the reference is where the actor is, unless placement.roles says otherwise": ("ref.num_*",),
    "the reward model is where the actor is, unless placement.roles says otherwise": ("reward.num_*",),
    "the critic is where the actor is, unless placement.roles says otherwise": ("critic.num_*",),
    "training.tokens_per_micro_batch is of all passes": ("rollout.max_tokens_per_gpu", "rollout.micro_batch_size"),
    "as many prompts are asked as are needed": ("rollout.vllm_generate_batch_size",),
    "roles share devices unless placement.roles says otherwise": ("train.colocate_*",),
    "micro-batches are always cut by tokens": ("train.dynamic_batch_enable",),
    "generation.partial_rollouts is true where generation runs ahead": ("train.partial_rollout_enable",),
    "the engine's own default": ("vllm.enable_prefix_caching",),
    "generation.sleep": ("vllm.enable_sleep",),
    "generation.replicas on each rank that hosts an engine": ("vllm.num_engines",),
    "weights go where they are served": ("vllm.sync_*",),
    "a checkpoint has the critic": ("critic.save_value_network",),
    "the optimizer is AdamW": ("critic.muon.*", "actor.muon.*", "muon.*"),
    "models are local directories": ("use_ms",),
})  # fmt: skip
"""Pattern of an argument -> why it needs no counterpart; the first that fits."""
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "ckpt.best_metric_key": ("none",),
    "*optim": ("adam",),
    "algo.dynamic_filtering_range": ([0, 1], [0.0, 1.0]),
    "ds.load_in_4bit": (False,),
    "ds.lora.dropout": (0, 0.0),
    "ds.tensor_parallel_size": (1,),
    "model.loss_type": ("sigmoid",),
    "reward.stop_properly_penalty_coef": (None,),
    "*aux_loss_coef": (0, 0.0),
    "model.nll_loss_coef": (0, 0.0),
}
"""Pattern of an argument -> values with which it does nothing that we do not do."""
