"""Arguments of TRL: what each is here, and those that become nothing of ours."""

from collections.abc import Mapping
from typing import Any

from tandem.config.counterparts import Key, Table, if_false, if_true, nonzero, positive, together
from tandem.importing.outcome import by_pattern

LEARNING_RATES = {
    "sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "orpo": 1e-6, "reward": 1e-4, "grpo": 1e-6, "rloo": 1e-6, "ppo": 3e-6,
}  # fmt: skip
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_SCHEDULES |= {"cosine_with_min_lr": "cosine"}


def _least_rate(options: Any) -> Any:
    return options.get("min_lr_rate") if isinstance(options, dict) else None


def _longest(given: Any) -> Any:
    """Tokens of a row, where TRL's 0 has no limit."""
    return given or 32_768


def table(method: str) -> Table:
    """The arguments of a trainer, and their defaults there."""
    own: Mapping[str, Table] = {
        "sft": _ROWS, "reward": _ROWS, "dpo": {**_ROWS, **_PAIRS}, "kto": {**_ROWS, **_RATED},
        "orpo": {**_ROWS, **_ODDS}, "grpo": {**_SAMPLED, **_GRPO}, "rloo": {**_SAMPLED, **_RLOO}, "ppo": _PPO,
    }  # fmt: skip
    return {
        "model_name_or_path": Key("model.path", "MODEL_DIRECTORY"),
        "learning_rate": Key("training.optimizer.lr", LEARNING_RATES[method]),
        **own[method],
        **_ALL,
    }


_ALL: Table = {
    **together("model.dtype", "bf16", "fp16", "dtype", "model_init_kwargs"),
    "trust_remote_code": Key("model.trust_remote_code", convert=if_true(True)),
    "chat_template_path": Key("model.chat_template.file", convert=nonzero),
    "chat_template_kwargs": Key("model.chat_template.arguments", convert=nonzero),
    "use_peft": "model.lora",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    "lora_modules_to_save": "nothing: adapters alone learn",
    "lora_dropout": "nothing: adapters have no dropout",
    **together("model.lora alone: weights are not quantised", "load_in_4bit", "load_in_8bit"),
    **together("data.train_files", "datasets", "dataset_name", "dataset_config", "dataset_train_split", "data_files"),
    **together("data.val_files", "dataset_test_split", "eval_data_files"),
    "test_split_size": "data.val_files, with rows that you leave out of data.train_files",
    **together("rows of a step", "per_device_train_batch_size", "gradient_accumulation_steps"),
    "gradient_checkpointing": Key("training.activation_checkpointing", True, if_true(True)),
    "optim": "training.optimizer.type: adamw, adamw_8bit or muon",
    "weight_decay": Key("training.optimizer.weight_decay", unless=0.0),
    **together("training.optimizer.betas", "adam_beta1", "adam_beta2"),
    "adam_epsilon": Key("training.optimizer.eps", unless=1e-8),
    "max_grad_norm": Key("training.optimizer.max_grad_norm", unless=1.0),
    "lr_scheduler_type": Key("training.optimizer.schedule", "linear", _SCHEDULES),
    "lr_scheduler_kwargs": Key("training.optimizer.min_lr_ratio", convert=_least_rate),
    **together(
        "training.optimizer.warmup_steps, that share of the run's optimizer steps", "warmup_steps", "warmup_ratio",
    ),
    "launcher.num_processes": "cluster.ranks",
    "max_tool_calling_iterations": "conversation.max_turns beside conversation.environment",
    "min_p": "generation.top_p",
    "output_dir": Key("trainer.run_dir", "runs/imported"),
    **together("trainer.steps", "max_steps", "total_episodes"),
    "num_train_epochs": "trainer.epochs",
    **together("trainer.best_metric", "save_strategy", "load_best_model_at_end", "metric_for_best_model"),
    "save_steps": "trainer.save_every",
    "eval_strategy": "trainer.eval_every and data.val_files",
    "eval_steps": "trainer.eval_every, with data.val_files",
    "greater_is_better": "trainer.best_mode",
    "save_total_limit": Key("trainer.keep_last"),
    "seed": Key("trainer.seed"),
    **together("tracking", "report_to", "project"),
}  # fmt: skip
_ROWS: Table = {
    "max_length": Key("data.max_tokens", 1024, _longest),
    "shuffle_dataset": Key("data.shuffle", convert=if_false(False)),
    "packing": "data.rows_per_step",
}
_PAIRS: Table = {
    "loss_type": "preference.loss",
    "beta": Key("preference.beta", unless=0.1),
    "label_smoothing": Key("preference.label_smoothing", unless=0),
}
_ODDS: Table = {"beta": Key("preference.beta", 0.1)}
_RATED: Table = {
    **_ODDS,
    "loss_type": "preference.loss",
    "desirable_weight": Key("preference.desirable_weight", unless=1.0),
    "undesirable_weight": Key("preference.undesirable_weight", unless=1.0),
}
_SERVED = ("generation.type", "vllm")
_SAMPLED: Table = {
    "num_generations": "algorithm.group_size",
    "steps_per_generation": "algorithm.minibatches",
    "generation_batch_size": "data.prompts_per_step",
    "num_iterations": Key("algorithm.epochs", unless=1),
    "max_prompt_length": Key("data.max_prompt_tokens", convert=nonzero),
    "shuffle_dataset": Key("data.shuffle", convert=if_false(False)),
    "entropy_coef": Key("algorithm.entropy_coefficient", unless=0),
    **together("generation.type", "use_vllm", "vllm_mode"),
    "max_completion_length": Key("generation.max_response_tokens", 512),
    "temperature": Key("generation.temperature", unless=1.0),
    "top_p": Key("generation.top_p", unless=1.0),
    "top_k": Key("generation.top_k", convert=positive),
    "vllm_tensor_parallel_size": Key("generation.tensor_parallel", unless=1, when=_SERVED),
    "vllm_gpu_memory_utilization": Key("generation.memory_share", when=_SERVED),
    "vllm_enable_sleep_mode": "generation.sleep",
    "num_generations_eval": "generation.eval.samples",
    "epsilon": "algorithm.loss.clip_ratio_low and algorithm.loss.clip_ratio_high",
    "epsilon_high": "algorithm.loss.clip_ratio_high",
    "beta": "algorithm.kl.coefficient",
    "reward_model_name_or_path": Key("model.reward_model_path", convert=nonzero),
    **together("reward.functions", "reward_funcs", "reward_weights"),
}
_SAPO = ("algorithm.loss.type", "sapo")
_GRPO: Table = {
    "loss_type": "algorithm.loss",
    "importance_sampling_level": "algorithm.loss.type",
    "sapo_temperature_neg": Key("algorithm.loss.temperature_negative", unless=1.05, when=_SAPO),
    "sapo_temperature_pos": Key("algorithm.loss.temperature_positive", unless=1.0, when=_SAPO),
    "delta": Key("algorithm.loss.dual_clip", convert=nonzero, when=("algorithm.loss.type", "clip")),
    "scale_rewards": "algorithm.normalize_by_std",
    "mask_truncated_completions": Key("algorithm.mask_truncated", unless=False),
    **together("algorithm.rollout_correction", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    **together(
        "algorithm.rollout_correction.upper", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"
    ),
    "vllm_importance_sampling_clip_min": "algorithm.rollout_correction.lower",
}
_RLOO: Table = {"normalize_advantages": "algorithm", "reward_clip_range": "algorithm.clip_rewards"}
_PPO: Table = {
    "sft_model_path": Key("model.path", convert=nonzero),
    "reward_model_path": Key("model.reward_model_path", "REWARD_MODEL_DIRECTORY"),
    "num_ppo_epochs": Key("algorithm.epochs", 4),
    "num_mini_batches": Key("algorithm.minibatches", unless=1),
    "gamma": Key("algorithm.gamma", unless=1.0),
    "lam": Key("algorithm.gae_lambda", 0.95),
    "cliprange": "algorithm.loss.clip_ratio_low and algorithm.loss.clip_ratio_high",
    "cliprange_value": Key("algorithm.value_clip", unless=0.2),
    "kl_coef": Key("algorithm.kl.coefficient", 0.05),
    "kl_estimator": Key("algorithm.kl.estimator", "k1"),
    "missing_eos_penalty": "algorithm.overlong_buffer",
    "response_length": Key("generation.max_response_tokens", 53),
    "temperature": Key("generation.temperature", 0.7),
}
WITHOUT_EFFECT = by_pattern({
    "attention is chosen for the device": ("attn_implementation",),
    "micro-batches are cut by tokens": ("auto_find_batch_size",),
    "a step's loss is one over all ranks": ("average_tokens_across_devices",),
    "model.dtype is of everything": ("bf16_full_eval",),
    "the engine's own cache": ("cache_implementation",),
    "rows are read once, at the start": ("dataloader_*", "dataset_num_proc", "dataset_streaming", "streaming"),
    "columns are told apart by name; tandem data columns renames others": ("dataset_text_field",),
    "ranks talk as they must": ("ddp_*",),
    "weights are published to the engine": ("ds3_gather_for_generation",),
    "training.type: fsdp shards over all ranks": ("deepspeed", "fsdp*"),
    "every dropout is 0": ("disable_dropout",),
    "progress is shown": ("disable_tqdm",),
    "trainer.eval_every": ("do_eval",),
    "it trains": ("do_train",),
    "validation is one call": ("eval_accumulation_steps", "per_device_eval_batch_size"),
    "trainer.eval_every validates before the first step, too": ("eval_on_start",),
    "rows are always packed": ("eval_packing",),
    "training.activation_checkpointing is the one switch": ("gradient_checkpointing_kwargs",),
    "tandem push is what uploads": ("hub_*",),
    "gradients are summed without hooks": ("ignore_bias_buffers",),
    "throughput is always measured": ("include_*",),
    "cluster and placement say where it runs": ("launcher.*",),
    "training.tokens_per_micro_batch is of all passes": ("local_rollout_forward_batch_size",),
    "trajectories are always written": ("log_completions", "log_multimodal", "log_unique_prompts"),
    "each step is logged": ("logging_*",),
    "the model says it": ("lora_task_type", "task_type"),
    "there is one adapter": ("model_adapter_name", "ref_adapter_name"),
    "a local directory has one": ("model_revision",),
    "tandem show prints any answer": ("num_completions_to_print",),
    "validation answers are always written": ("num_sample_generations",),
    "a run directory is never overwritten": ("overwrite_output_dir",),
    "rows are packed, not padded": ("pad_to*", "pad_token", "padding_*"),
    "the reference is computed in each step": ("precompute_ref_*",),
    "validation has its metrics": ("prediction_loss_only",),
    "rows keep their columns": ("remove_unused_columns",),
    "--resume RUN restores everything": ("restore_callback_states_from_checkpoint",),
    "--resume RUN on the command line": ("resume_from_checkpoint",),
    "trainer.run_dir names the run": ("run_name",),
    "a checkpoint has all that a resume needs": ("save_only_model",),
    "weights are always safetensors": ("save_safetensors",),
    "PyTorch's own switch, in the environment": ("tf32",),
    "roles on the same devices take turns by themselves": ("torch_empty_cache_steps",),
    "tracking.trackio has keys of its own": ("trackio_*",),
    "the device is found": ("use_cpu",),
    "log-probs are always computed without the whole logits": ("use_liger_kernel",),
    "free ports are found": ("vllm_group_port",),
    "the engine takes it from the model": ("vllm_max_model_length",),
    "vLLM's own": ("vllm_model_impl",),
    "engines are started with the run": ("vllm_server_*",),
    "native generation is continuous batching": ("use_transformers_*", "transformers_continuous_batching_config"),
})  # fmt: skip
"""Pattern of an argument -> why it needs no counterpart; the first that fits."""
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "load_best_model_at_end": (False,),
    "load_in_*": (False,),
    "min_p": (None, 0, 0.0),
    "optim": ("adamw_torch", "adamw_torch_fused", "adamw"),
    "push_to_hub": (False,),
    "repetition_penalty": (1, 1.0),
    "shuffle_dataset": (True,),
    "sync_ref_model": (False,),
    "top_entropy_quantile": (1, 1.0),
    "truncation_mode": ("keep_start",),
    "use_bias_correction_kl": (False,),
    "use_dora": (False,),
    "use_rslora": (False,),
    "vf_coef": (0.1,),
    "completion_only_loss": (True, None),
    "assistant_only_loss": (True,),
    "f_divergence_type": ("reverse_kl",),
    "use_weighting": (False,),
    "activation_offloading": (False,),
    "bias": ("none",),
    "exclude_modules": (None,),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "whiten_rewards": (False,),
    "stop_token": ("eos",),
    "eval_strategy": ("no", False),
}
"""Pattern of an argument -> values with which it does nothing that we do not do."""
EIGHT_BITS = ("paged_adamw_8bit", "adamw_8bit", "adamw_bnb_8bit")
"""Values of `optim` that are AdamW with moments of 8 bits."""
MENDS: Mapping[str, str] = {
    "eos_token": "set it as eos_token in the model's tokenizer_config.json, and its id as eos_token_id in "
    "generation_config.json: these say where an answer ends",
    "push_to_hub": "run `tandem push RUN OWNER/NAME` afterwards: nothing is uploaded while training",
}
"""Argument -> what to do instead, where that is no key of a configuration."""
