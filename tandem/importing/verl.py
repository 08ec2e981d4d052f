"""What a program of verl was told -> a configuration of ours, and what became of each of its keys.

Only what verl was told is read, and those of its defaults that differ from ours; facts about them are from verl's
published configuration files.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from tandem.config.verl_keys import COUNTERPARTS
from tandem.importing.outcome import Imported, Keys, Source, known, listed, parsed, put, sort_the_rest, whole
from tandem.importing.verl_ahead import apart, prompts_of_a_fully_asynchronous_step, runs_ahead
from tandem.importing.verl_distillation import distilled
from tandem.importing.verl_sft import supervised
from tandem.importing.verl_tables import HARMLESS, WITHOUT_EFFECT
from tandem.importing.verl_trainer import list_of, tracked, trainer_of

COMMANDS: Mapping[str, str] = {"ppo": "train", "one_step_off": "train", "fully_async": "train", "sft": "sft"}
"""What a program of verl does -> the command of ours that takes the configuration."""
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_ESTIMATORS |= {"kl+": "k1+", "k1+": "k1+", "low_var_kl+": "k3+", "k3+": "k3+"}
_AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean", "seq-mean-token-sum-norm": "fixed_length",
}  # fmt: skip
_ALGORITHMS = {
    "gae": "ppo", "grpo": "grpo", "reinforce_plus_plus": "reinforce_plus_plus", "remax": "remax", "rloo": "rloo",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "opo": "opo", "gpg": "gpg",
    "optimal_token_baseline": "otb", "gdpo": "gdpo",
}  # fmt: skip
_LOSSES = {
    "vanilla": "clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "gpg": "reinforce",
}
_LOSSES |= {"geo_mean": "gmpo", "cispo": "cispo"}
_COMPARES_SIBLINGS = ("grpo", "rloo", "opo", "gpg", "otb", "gdpo", "reinforce_plus_plus_baseline")
_OVERLONG = (
    "reward_model.overlong_buffer", "custom_reward_function.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.overlong_buffer_cfg",
)  # fmt: skip
_DEGREES = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
}
_CORRECTION = "algorithm.rollout_correction."
_LEAST_TOKENS = 4096
"""Of a micro-batch, where verl counts rows."""


def convert(source: Source) -> Imported:
    """The configuration of ours, with what became of every key of verl's."""
    keys, made = Keys(source.values), Imported({}, notes=list(source.notes))
    if source.method == "sft":
        return supervised(keys, made)
    tree = made.tree
    tree["model"] = _model(keys)
    tree["data"] = _data(keys)
    if source.method == "fully_async":
        tree["data"]["prompts_per_step"] = prompts_of_a_fully_asynchronous_step(keys)
    tree["algorithm"] = _algorithm(keys, tree["data"]["prompts_per_step"], made)
    if tree["algorithm"]["type"] == "ppo":
        tree["model"] |= _adapters(keys, "critic.model.", "critic_lora")
    tree["generation"] = _generation(keys)
    tree["training"] = _training(keys, tree, made)
    tree |= _conversation(keys, made)
    tree |= _reward(keys)
    tree |= _processes(keys) if source.method == "ppo" else apart(keys)
    tree["trainer"] = trainer_of(keys, epochs=30)
    if source.method != "ppo":
        runs_ahead(source.method, keys, tree, made)
    tree |= tracked(keys)
    sort_the_rest(keys, made, WITHOUT_EFFECT, HARMLESS, COUNTERPARTS)
    return made


def _adapters(keys: Keys, theirs: str, name: str) -> dict[str, Any]:
    """The section of this name in `model`, of the keys that begin with `theirs`; none without a rank."""
    ours = f"model.{name}"
    rank = keys.take(f"{theirs}lora.rank", f"{ours}.rank", keys.take(f"{theirs}lora_rank", f"{ours}.rank"))
    if not rank:
        return {}
    alpha = keys.take(f"{theirs}lora_alpha", f"{ours}.alpha", 16)
    alpha = keys.take(f"{theirs}lora.alpha", f"{ours}.alpha", alpha)
    target = keys.take(f"{theirs}target_modules", f"{ours}.target_modules", "all-linear")
    return {name: {"rank": rank, "alpha": alpha, "target_modules": target}}


def _model(keys: Keys) -> dict[str, Any]:
    model: dict[str, Any] = {"path": keys.take(f"{_MODEL}path", "model.path", "MODEL_DIRECTORY"), "dtype": "bfloat16"}
    if keys.take(f"{_ACTOR}fsdp_config.model_dtype", "model.dtype") in ("fp32", "float32"):
        model["dtype"] = "float32"
    if keys.take(f"{_MODEL}trust_remote_code", "model.trust_remote_code"):
        model["trust_remote_code"] = True
    model |= _adapters(keys, _MODEL, "lora")
    if keys.take(f"{_ACTOR}freeze_vision_tower", "model.vision_tower"):
        model["vision_tower"] = "frozen"
    if critic := keys.take("critic.model.path", "model.critic_path"):
        model |= {} if critic == model["path"] else {"critic_path": critic}
    for section, path_key in (("reward_model", "model.path"), ("reward.reward_model", "model_path")):
        scores = keys.values.get(f"{section}.enable")
        if scores and (path := keys.take(f"{section}.{path_key}", "model.reward_model_path")):
            keys.take(f"{section}.enable", "model.reward_model_path")
            model["reward_model_path"] = path
    return model


def _data(keys: Keys) -> dict[str, Any]:
    data: dict[str, Any] = {
        "train_files": listed(keys.take("data.train_files", "data.train_files", "TRAIN.parquet")),
        "val_files": listed(keys.take("data.val_files", "data.val_files", [])),
        "prompts_per_step": keys.take("data.train_batch_size", "data.prompts_per_step", 1024),
        "max_prompt_tokens": keys.take("data.max_prompt_length", "data.max_prompt_tokens", 512),
    }
    long = keys.take("data.filter_overlong_prompts", "data.on_bad_row", False)
    cut = keys.take("data.truncation", "data.on_bad_row", "error")
    if long or cut != "error":
        data["on_bad_row"] = "skip"
    if keys.take("data.shuffle", "data.shuffle", True) is False:
        data["shuffle"] = False
    return data


def _algorithm(keys: Keys, prompts: Any, made: Imported) -> dict[str, Any]:
    estimator = keys.take("algorithm.adv_estimator", "algorithm.type", "gae")
    taught = keys.values.get("distillation.enabled") is True
    kind = "on_policy_distillation" if taught else known(_ALGORITHMS, estimator, "algorithm.adv_estimator", made)
    algorithm: dict[str, Any] = {"type": kind}
    group = keys.take(f"{_ROLLOUT}n", "algorithm.group_size", 1)
    if group == 1 and algorithm["type"] in _COMPARES_SIBLINGS:
        group = 8
        made.notes.append(f"{estimator} compares siblings, and one sample a prompt has none; 8 stand there: choose")
    algorithm["group_size"] = group
    algorithm |= _minibatches(keys, prompts, made)
    put(algorithm, "epochs", keys.take(f"{_ACTOR}ppo_epochs", "algorithm.epochs", 1), default=1)
    put(
        algorithm,
        "entropy_coefficient",
        keys.take(f"{_ACTOR}entropy_coeff", "algorithm.entropy_coefficient", 0),
        default=0,
    )
    by_std = keys.take("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_by_std", True)
    put(algorithm, "normalize_by_std", by_std, default=True)
    if algorithm["type"] in ("ppo", "reinforce_plus_plus"):
        put(algorithm, "gamma", keys.take("algorithm.gamma", "algorithm.gamma", 1.0), default=1.0)
    if algorithm["type"] == "ppo":
        algorithm |= _of_ppo(keys, made)
    algorithm["loss"] = _loss(keys, made)
    if level := keys.take(f"{_CORRECTION}rollout_is", "algorithm.rollout_correction.level"):
        most = keys.take(f"{_CORRECTION}rollout_is_threshold", "algorithm.rollout_correction.upper", 2.0)
        algorithm["rollout_correction"] = _correction(level, most)
    if kl := _kl(keys, made):
        algorithm["kl"] = kl
    if taught:
        algorithm |= distilled(keys, whole(group), _on_megatron(keys), made)
    if kind == "gdpo":
        algorithm["rewards"] = _rewards_of_gdpo(keys, made)
    if keys.take("algorithm.filter_groups.enable", "algorithm.resample_rounds"):
        most = keys.take("algorithm.filter_groups.max_num_gen_batches", "algorithm.resample_rounds", 10)
        algorithm["resample_rounds"] = most or 100
    _overlong(keys, algorithm, made)
    return algorithm


def _minibatches(keys: Keys, prompts: Any, made: Imported) -> dict[str, int]:
    minibatch = keys.take(f"{_ACTOR}ppo_mini_batch_size", "algorithm.minibatches", 256)
    if not isinstance(prompts, int) or not isinstance(minibatch, int) or not 0 < minibatch < prompts:
        return {}
    count = ceil(prompts / minibatch)
    if prompts % minibatch:
        made.notes.append(f"{prompts} prompts in optimizer steps of {minibatch} become {count} equal ones")
    return {"minibatches": count}


def _of_ppo(keys: Keys, made: Imported) -> dict[str, Any]:
    found: dict[str, Any] = {}
    put(found, "gae_lambda", keys.take("algorithm.lam", "algorithm.gae_lambda", 1.0), default=1.0)
    put(found, "value_clip", keys.take("critic.cliprange_value", "algorithm.value_clip", 0.5), default=0.2)
    critic = _optimizer(keys, "critic.optim.", "algorithm.critic_optimizer", lr=1e-5, made=made)
    found["critic_optimizer"] = critic
    # verl's policy learns from the step of that number on, and its first step is 1
    warmup = whole(keys.take("trainer.critic_warmup", "algorithm.critic_warmup_steps", 0))
    put(found, "critic_warmup_steps", max(warmup - 1, 0), default=0)
    return found


def _correction(level: Any, bounds: Any) -> dict[str, Any]:
    """Weights truncated at a number, or, between `lower_upper`, masked."""
    lower, apart, upper = str(bounds).partition("_")
    if apart:
        return {"type": "mask", "level": level, "lower": parsed(lower), "upper": parsed(upper)}
    return {"type": "truncate", "level": level, "upper": parsed(str(bounds))}


def _rewards_of_gdpo(keys: Keys, made: Imported) -> dict[str, float]:
    names = [str(name) for name in listed(list_of(keys.take("algorithm.gdpo_reward_keys", "algorithm.rewards", [])))]
    if not names:
        made.notes.append("algorithm.rewards: name the metrics of the reward function that are normalised apart")
    weights = listed(list_of(keys.take("algorithm.gdpo_reward_weights", "algorithm.rewards", [])))
    return dict(zip(names or ["reward"], [*weights, *[1.0] * max(len(names), 1)], strict=False))


def _loss(keys: Keys, made: Imported) -> dict[str, Any]:
    mode = keys.take(f"{_ACTOR}policy_loss.loss_mode", "algorithm.loss.type", "vanilla")
    loss: dict[str, Any] = {"type": known(_LOSSES, mode, f"{_ACTOR}policy_loss.loss_mode", made)}
    both = keys.take(f"{_ACTOR}clip_ratio", "algorithm.loss.clip_ratio_low and clip_ratio_high", 0.2)
    low = keys.take(f"{_ACTOR}clip_ratio_low", "algorithm.loss.clip_ratio_low", both)
    high = keys.take(f"{_ACTOR}clip_ratio_high", "algorithm.loss.clip_ratio_high", both)
    if loss["type"] not in ("reinforce", "sapo", "gmpo"):
        put(loss, "clip_ratio_low", low, default=0.2 if loss["type"] == "clip" else None)
        put(loss, "clip_ratio_high", high, default=0.2 if loss["type"] == "clip" else None)
    if loss["type"] == "clip":
        loss["dual_clip"] = keys.take(f"{_ACTOR}clip_ratio_c", "algorithm.loss.dual_clip", 3.0)
    aggregation = keys.take(f"{_ACTOR}loss_agg_mode", "algorithm.loss.aggregation", "token-mean")
    put(loss, "aggregation", known(_AGGREGATIONS, aggregation, f"{_ACTOR}loss_agg_mode", made), default="token_mean")
    return loss


def _kl(keys: Keys, made: Imported) -> dict[str, Any]:
    in_loss = keys.take(f"{_ACTOR}use_kl_loss", "algorithm.kl.place", False)
    in_reward = keys.take("algorithm.use_kl_in_reward", "algorithm.kl.place", False)
    of_loss = keys.take(f"{_ACTOR}kl_loss_coef", "algorithm.kl.coefficient", 0.001)
    kind = keys.take(f"{_ACTOR}kl_loss_type", "algorithm.kl.estimator", "low_var_kl")
    of_reward = keys.take("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coefficient", 0.001)
    penalty = keys.take("algorithm.kl_penalty", "algorithm.kl.estimator", "kl")
    if in_loss and in_reward:
        made.notes.append("verl had a KL term in the loss and one in the reward; only the loss's is taken")
    if in_loss and of_loss:
        estimator = known(_ESTIMATORS, kind, f"{_ACTOR}kl_loss_type", made)
        return {"place": "loss", "coefficient": of_loss, "estimator": estimator}
    if in_reward and of_reward:
        estimator = known(_ESTIMATORS, penalty, "algorithm.kl_penalty", made)
        return {"place": "reward", "coefficient": of_reward, "estimator": estimator}
    return {}


def _overlong(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    """verl has had the buffer in three sections."""
    for section in _OVERLONG:
        tokens = keys.take(f"{section}.len", "algorithm.overlong_buffer")
        factor = keys.take(f"{section}.penalty_factor", "algorithm.overlong_buffer", 1.0)
        keys.take(f"{section}.log", "algorithm.overlong_buffer")
        most = keys.values.get("data.max_response_length", 512)
        if keys.take(f"{section}.enable", "algorithm.overlong_buffer") and tokens and isinstance(most, int):
            algorithm["overlong_buffer"] = round(tokens / most, 6)
            if factor != 1.0:
                made.notes.append(f"the overlong punishment is 1.0 at most here; verl's penalty_factor was {factor}")


def _generation(keys: Keys) -> dict[str, Any]:
    name = keys.take(f"{_ROLLOUT}name", "generation.type", "vllm")
    engine = {"hf": "native"}.get(name, name if name in ("vllm", "sglang") else "vllm")
    generation: dict[str, Any] = {
        "type": engine,
        "max_response_tokens": keys.take("data.max_response_length", "generation.max_response_tokens", 512),
    }
    put(generation, "temperature", keys.take(f"{_ROLLOUT}temperature", "generation.temperature", 1.0), default=1.0)
    put(generation, "top_p", keys.take(f"{_ROLLOUT}top_p", "generation.top_p", 1), default=1)
    top_k = keys.take(f"{_ROLLOUT}top_k", "generation.top_k", -1)
    put(generation, "top_k", top_k if top_k not in (-1, "-1") else 0, default=0)
    if engine != "native":
        parallel = keys.take(f"{_ROLLOUT}tensor_model_parallel_size", "generation.tensor_parallel", 2)
        put(generation, "tensor_parallel", parallel, default=1)
        if keys.take(f"{_ROLLOUT}free_cache_engine", "generation.sleep", True) is False:
            generation["sleep"] = "never"
        generation["memory_share"] = keys.take(f"{_ROLLOUT}gpu_memory_utilization", "generation.memory_share", 0.5)
        arguments = {
            argument: keys.values[f"{_ROLLOUT}{argument}"]
            for argument in ("max_num_seqs", "max_num_batched_tokens", "enforce_eager")
            if keys.take(f"{_ROLLOUT}{argument}", f"generation.engine_args.{argument}") is not None
        }
        if arguments:
            generation["engine_args"] = arguments
    sampled = keys.take(f"{_ROLLOUT}val_kwargs.do_sample", "generation.eval.temperature", False)
    given = keys.take(f"{_ROLLOUT}val_kwargs.temperature", "generation.eval.temperature", 1.0 if sampled else 0)
    evaluation: dict[str, Any] = {}
    put(evaluation, "temperature", given if sampled else 0, default=0)
    put(evaluation, "top_p", keys.take(f"{_ROLLOUT}val_kwargs.top_p", "generation.eval.top_p", 1.0), default=1.0)
    put(evaluation, "samples", keys.take(f"{_ROLLOUT}val_kwargs.n", "generation.eval.samples", 1), default=1)
    return generation | ({"eval": evaluation} if evaluation else {})


def _training(keys: Keys, tree: Mapping[str, Any], made: Imported) -> dict[str, Any]:
    for key in (f"{_ACTOR}strategy", "model_engine"):
        keys.take(key, "training.type")
    megatron = _on_megatron(keys)
    training: dict[str, Any] = {"type": "megatron" if megatron else "fsdp"}
    checkpointing = keys.take(f"{_MODEL}enable_gradient_checkpointing", "training.activation_checkpointing", True)
    if checkpointing:
        training["activation_checkpointing"] = True
    rows_tokens = whole(tree["data"]["max_prompt_tokens"]) + whole(tree["generation"]["max_response_tokens"])
    context = keys.take(f"{_ACTOR}fsdp_config.ulysses_sequence_parallel_size", "training.context_parallel", 1)
    context = keys.take(f"{_ACTOR}ulysses_sequence_parallel_size", "training.context_parallel", context)
    if megatron:
        for name, ours in _DEGREES.items():
            put(training, ours, keys.take(f"{_ACTOR}megatron.{name}", f"training.{ours}", 1), default=1)
        if training.get("tensor_parallel", 1) != 1 and training.get("expert_parallel", 1) != 1:
            training["sequence_parallel"] = True
    else:
        put(training, "context_parallel", context, default=1)
        size = keys.take(f"{_ACTOR}fsdp_config.fsdp_size", "training.shard_size", -1)
        put(training, "shard_size", size if size not in (-1, "-1") else None, default=None)
        offloads = [
            keys.take(f"{_ACTOR}fsdp_config.{what}_offload", "training.cpu_offload") for what in ("param", "optimizer")
        ]
        if all(offload is True for offload in offloads):
            training["cpu_offload"] = True
        elif offloads[1] is True:
            training["optimizer_offload"] = True
    tokens = keys.take(f"{_ACTOR}ppo_max_token_len_per_gpu", "training.tokens_per_micro_batch")
    rows = keys.take(f"{_ACTOR}ppo_micro_batch_size_per_gpu", "training.tokens_per_micro_batch")
    keys.take(f"{_ACTOR}ppo_micro_batch_size", "training.tokens_per_micro_batch")
    dynamic = keys.values.get(f"{_ACTOR}use_dynamic_bsz", False)
    if dynamic and whole(tokens):
        training["tokens_per_micro_batch"] = tokens * whole(context or 1)
    elif whole(rows) and rows_tokens:
        training["tokens_per_micro_batch"] = max(rows * rows_tokens, _LEAST_TOKENS)
        made.notes.append(f"{rows} rows a micro-batch of {rows_tokens} tokens at most are {rows * rows_tokens} tokens")
    training["optimizer"] = _optimizer(keys, f"{_ACTOR}optim.", "training.optimizer", lr=1e-6, made=made)
    clip = keys.take(f"{_ACTOR}grad_clip", "training.optimizer.max_grad_norm", 1.0)
    put(training["optimizer"], "max_grad_norm", clip, default=1.0)
    return training


def _on_megatron(keys: Keys) -> bool:
    told = (keys.values.get(key) for key in (f"{_ACTOR}strategy", "model_engine"))
    return "megatron" in told or any(key.startswith(f"{_ACTOR}megatron.") for key in keys.values)


def _optimizer(keys: Keys, prefix: str, ours: str, lr: float, made: Imported) -> dict[str, Any]:
    optimizer: dict[str, Any] = {"lr": keys.take(f"{prefix}lr", f"{ours}.lr", lr)}
    optimizer["weight_decay"] = keys.take(f"{prefix}weight_decay", f"{ours}.weight_decay", 0.01)
    steps = keys.take(f"{prefix}lr_warmup_steps", f"{ours}.warmup_steps", -1)
    ratio = keys.take(f"{prefix}lr_warmup_steps_ratio", f"{ours}.warmup_steps", 0.0)
    if whole(steps) > 0:
        optimizer["warmup_steps"] = steps
    elif ratio:
        made.notes.append(
            f"{prefix}lr_warmup_steps_ratio {ratio}: give {ours}.warmup_steps, a number of optimizer steps"
        )
    style = keys.take(f"{prefix}lr_scheduler_type", f"{ours}.schedule") or keys.take(
        f"{prefix}warmup_style", f"{ours}.schedule"
    )
    if style == "cosine":
        optimizer["schedule"] = "cosine"
    put(optimizer, "min_lr_ratio", keys.take(f"{prefix}min_lr_ratio", f"{ours}.min_lr_ratio", None), default=None)
    if (betas := keys.take(f"{prefix}betas", f"{ours}.betas")) is not None:
        optimizer["betas"] = list_of(betas)
    if (clip := keys.take(f"{prefix}clip_grad", f"{ours}.max_grad_norm")) is not None:
        optimizer["max_grad_norm"] = clip
    return optimizer


def _conversation(keys: Keys, made: Imported) -> dict[str, Any]:
    tools = keys.take(f"{_ROLLOUT}multi_turn.tool_config_path", "conversation.environment.tools")
    user = keys.take(f"{_ROLLOUT}multi_turn.interaction_config_path", "conversation.environment.user")
    turns = keys.take(f"{_ROLLOUT}multi_turn.max_assistant_turns", "conversation.max_turns")
    turns = keys.take(f"{_ROLLOUT}multi_turn.max_turns", "conversation.max_turns", turns)
    keys.take(f"{_ROLLOUT}multi_turn.enable", "conversation")
    if not tools and not user:
        return {}
    environment: dict[str, Any] = {}
    if tools:
        environment["tools"] = [{"type": "verl", "path": tools}]
    if user:
        environment["user"] = {"type": "verl", "path": user}
    made.notes.append("tools and interactions of verl import verl: put it, and the folder of your own, on PYTHONPATH")
    return {"conversation": {"environment": environment, **({"max_turns": turns} if turns else {})}}


def _reward(keys: Keys) -> dict[str, Any]:
    newer = any(key.startswith("reward.custom_reward_function.") for key in keys.values)
    section = "reward.custom_reward_function" if newer else "custom_reward_function"
    path = keys.take(f"{section}.path", "reward.functions")
    name = keys.take(f"{section}.name", "reward.functions", "compute_score")
    if not path:
        return {}
    arguments = {
        key.rpartition(".")[2]: keys.take(key, "reward.functions")
        for key in keys.values
        if key.startswith(f"{section}.reward_kwargs.")
    }
    function = f"{path}:{name}"
    return {"reward": {"functions": [{"function": function, "arguments": arguments} if arguments else function]}}


def _processes(keys: Keys) -> dict[str, Any]:
    nodes = keys.take("trainer.nnodes", "placement.pools", 1)
    each = keys.take("trainer.n_gpus_per_node", "cluster.ranks", 8)
    if not isinstance(nodes, int) or not isinstance(each, int) or nodes == 1:
        return {"cluster": {"type": "local", "ranks": each if isinstance(each, int) else 8}}
    return {"cluster": {"type": "ray"}, "placement": {"pools": {"main": [each] * nodes}}}
