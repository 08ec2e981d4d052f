"""A script or configuration of TRL -> a configuration of ours, and what became of each of its arguments.

Only what TRL was told is read, and those of its defaults that differ from ours; facts about them are from its published
configuration classes, and those of `transformers.TrainingArguments`.
"""

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from tandem.errors import UserError
from tandem.importing.outcome import Imported, Keys, Source, known, listed, put, sort_the_rest, whole
from tandem.importing.trl_best import best_counterparts, best_keys, best_without_effect
from tandem.importing.trl_source import Rows, own_files
from tandem.importing.trl_tables import COUNTERPARTS, EIGHT_BITS, HARMLESS, MENDS, WITHOUT_EFFECT

COMMANDS: Mapping[str, str] = {
    "sft": "sft", "dpo": "dpo", "kto": "dpo", "orpo": "dpo", "reward": "reward-model", "grpo": "train", "rloo": "train",
    "ppo": "train",
}  # fmt: skip
"""TRL's trainer -> the command of ours that takes the configuration."""
_LEARNING_RATES = {
    "sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "orpo": 1e-6, "reward": 1e-4, "grpo": 1e-6, "rloo": 1e-6, "ppo": 3e-6,
}  # fmt: skip
_PEFT_DEFAULT = ["q_proj", "v_proj"]
_VALUE_HEADS = ("score", "classifier")
"""What TRL's reward models call theirs."""
_PREFERENCES = {"sigmoid": "dpo", "ipo": "ipo"}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_SCHEDULES |= {"cosine_with_min_lr": "cosine"}
_GRPO_LOSSES = {
    "dapo": ("clip", "token_mean"), "bnpo": ("clip", "token_mean"), "grpo": ("clip", "sequence_mean_token_mean"),
    "dr_grpo": ("clip", "fixed_length"), "cispo": ("cispo", "token_mean"), "sapo": ("sapo", "sequence_mean_token_mean"),
}  # fmt: skip
_CORRECTIONS = {
    "sequence_mask": {"type": "mask", "level": "sequence"}, "token_mask": {"type": "mask"},
    "sequence_truncate": {"type": "truncate", "level": "sequence"}, "token_truncate": {"type": "truncate"},
}  # fmt: skip
_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Of `trl.rewards`, which its command line knows by name."""


def convert(source: Source) -> Imported:
    """The configuration of ours, with what became of every argument. Raises UserError for a trainer without one."""
    if source.method not in COMMANDS:
        raise UserError(f"TRL's {source.method} has no counterpart here; these have one: {', '.join(COMMANDS)}")
    keys, made = Keys(source.values), Imported({}, notes=list(source.notes))
    tree = made.tree
    tree["model"] = _model(keys, made)
    whole_layers = listed(keys.values.get("lora_modules_to_save"))
    if source.method == "reward" and all(layer in _VALUE_HEADS for layer in whole_layers):
        keys.take("lora_modules_to_save", "a value head always learns beside model.lora")
    tree["data"] = _files(keys, made)
    {"grpo": _online, "rloo": _online, "ppo": _ppo}.get(source.method, _offline)(keys, source.method, made)
    checkpointing = keys.take("gradient_checkpointing", "training.activation_checkpointing", True)
    training: dict[str, Any] = {"activation_checkpointing": True} if checkpointing else {}
    tree["training"] = training | {"optimizer": _optimizer(keys, source.method, made)}
    ranks = whole(keys.take("launcher.num_processes", "cluster.ranks", 1))
    tree |= {"cluster": {"ranks": ranks}} if ranks > 1 else {}
    tree["trainer"] = _trainer(keys, source.method, tree, made)
    tree |= _tracking(keys)
    without_effect = {**WITHOUT_EFFECT, **_without_validation(keys), **best_without_effect(keys, _evaluates(keys))}
    counterparts = {**COUNTERPARTS, **best_counterparts(keys, source.method, tree)}
    sort_the_rest(keys, made, without_effect, HARMLESS, counterparts, MENDS)
    return made


def _model(keys: Keys, made: Imported) -> dict[str, Any]:
    path = keys.take("model_name_or_path", "model.path", "MODEL_DIRECTORY")
    model: dict[str, Any] = {"path": path, "dtype": "bfloat16"}
    whole_precision = [keys.take("bf16", "model.dtype") is False, keys.take("fp16", "model.dtype") is True]
    keys.take("dtype", "model.dtype")
    keys.take("model_init_kwargs", "model.dtype")
    if any(whole_precision):
        model["dtype"] = "float32"
    if keys.take("trust_remote_code", "model.trust_remote_code"):
        model["trust_remote_code"] = True
    if file := keys.take("chat_template_path", "model.chat_template.file"):
        model["chat_template"] = {"file": file}
    if arguments := keys.take("chat_template_kwargs", "model.chat_template.arguments"):
        model["chat_template"] = {"arguments": arguments}
    if keys.take("use_peft", "model.lora"):
        target = keys.take("lora_target_modules", "model.lora.target_modules")
        if target is None:
            made.notes.append(
                "model.lora.target_modules: PEFT's choice for most families is written; all-linear is usual"
            )
        one = target if target == "all-linear" else listed(target or _PEFT_DEFAULT)
        rank = keys.take("lora_r", "model.lora.rank", 16)
        model["lora"] = {"rank": rank, "alpha": keys.take("lora_alpha", "model.lora.alpha", 32), "target_modules": one}
    return model


def _files(keys: Keys, made: Imported) -> dict[str, Any]:
    """The data set's id on the Hub or its files, or a stand-in for what a script loads; its test split if TRL
    evaluates."""
    if mixed := keys.take("datasets", "data.train_files"):
        return _mixed_files(mixed, keys, made)
    asked = (("dataset_name", None), ("dataset_config", None), ("dataset_train_split", "train"), ("data_files", None))
    rows = Rows(*(keys.take(key, "data.train_files", default) for key, default in asked))
    files = {"train_files": _rows_of(rows, "data.train_files", "TRAIN.parquet", made)}
    if _evaluates(keys):
        rows = rows._replace(split=keys.take("dataset_test_split", "data.val_files", "test"))
        if other := keys.values.get("eval_dataset"):
            rows = Rows(str(other).strip("⟨⟩"), rows.configuration, "", None)
        own = keys.take("eval_data_files", "data.val_files")
        files["val_files"] = own or _rows_of(rows, "data.val_files", "VAL.parquet", made)
    return files


def _mixed_files(mixed: Any, keys: Keys, made: Imported) -> dict[str, Any]:
    """`datasets` of a YAML file: all their rows together, whatever `dataset_name` says."""
    train: list[str] = []
    for number, one in enumerate(listed(mixed), start=1):
        given = one if isinstance(one, dict) else {"path": one}
        rows = Rows(given.get("path"), given.get("name"), given.get("split", "train"), given.get("data_files"))
        if given.get("data_dir"):
            rows = rows._replace(name=f"{rows.name} of {given['data_dir']}")
        train += _rows_of(rows, "data.train_files", f"TRAIN_{number}.parquet", made)
    files = {"train_files": train}
    if _evaluates(keys):
        held_out = Rows(f"rows of your own (test_split_size={keys.values.get('test_split_size')})", None, "", None)
        files["val_files"] = _rows_of(held_out, "data.val_files", "VAL.parquet", made)
    return files


def _rows_of(rows: Rows, key: str, stand_in: str, made: Imported) -> list[str]:
    name, configuration, split, files = rows
    if own := own_files(rows):
        return own
    whole_split = files is None and re.fullmatch(r"[\w.-]+", str(split))
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and whole_split:
        return [f"hub:{name}{f'/{configuration}' if configuration else ''}[{split}]"]
    of_files = f" {files}" if files is not None else ""
    what = f"{name}{of_files}{f', split {split}' if split else ''}" if name else "what the script loads"
    made.notes.append(
        f"{key}: put {what} in the place of {stand_in}, as parquet or JSON lines; columns of TRL are read as they are"
    )
    return [stand_in]


def _evaluates(keys: Keys) -> bool:
    """TRL does not, unless it is told to."""
    return keys.values.get("eval_strategy") in ("steps", "epoch")


def _without_validation(keys: Keys) -> dict[str, str]:
    """Arguments of an evaluation that TRL never makes."""
    strategy = keys.values.get("eval_strategy")
    if strategy in (None, "no", False):
        why = "TRL does not evaluate without eval_strategy: steps or epoch"
        return dict.fromkeys(
            ("eval_steps", "dataset_test_split", "eval_dataset", "eval_data_files", "num_generations_eval"), why
        )
    return {"eval_steps": "eval_strategy is epoch"} if strategy == "epoch" else {}


def _offline(keys: Keys, method: str, made: Imported) -> None:
    """SFT, DPO and reward models: rows, and what is made of them."""
    data, rows = made.tree["data"], _rows(keys, made)
    data["rows_per_step"] = rows
    data["max_tokens"] = keys.take("max_length", "data.max_tokens", 1024) or 32_768
    data["on_bad_row"] = "skip"
    made.notes.append(f"a row of more than {data['max_tokens']} tokens is skipped here; TRL cut its end off")
    if keys.take("shuffle_dataset", "data.shuffle") is False:
        data["shuffle"] = False
    if method == "sft":
        if keys.take("packing", "data.rows_per_step"):
            made.notes.append(f"with packing TRL's {rows} rows a step were each max_length tokens of several; choose")
        if not keys.values.get("assistant_only_loss"):
            made.notes.append("TRL learned all tokens of `messages` without assistant_only_loss; here the assistant's")
    if method == "dpo":
        made.tree["preference"] = _preference(keys, made)
    elif method in ("kto", "orpo"):
        made.tree["preference"] = _rated(keys, method, made)


def _preference(keys: Keys, made: Imported) -> dict[str, Any]:
    given = keys.take("loss_type", "preference.loss", "sigmoid")
    kinds = listed(given)
    if len(kinds) > 1:
        made.notes.append(f"loss_type={given}: a sum of losses has no counterpart; the first is taken")
    if kinds[0] == "sigmoid_norm":
        preference: dict[str, Any] = {"loss": "dpo", "length_normalized": True}
    else:
        preference = {"loss": known(_PREFERENCES, kinds[0], "loss_type", made)}
    put(preference, "beta", keys.take("beta", "preference.beta", 0.1), default=0.1)
    put(preference, "label_smoothing", keys.take("label_smoothing", "preference.label_smoothing", 0), default=0)
    return preference


def _rated(keys: Keys, method: str, made: Imported) -> dict[str, Any]:
    """KTO and ORPO."""
    preference: dict[str, Any] = {"loss": method, "beta": keys.take("beta", "preference.beta", 0.1)}
    if method == "orpo":
        made.notes.append("TRL's ORPO learns the likelihood of prompt and answer; here the answer's")
        return preference
    if (kind := keys.take("loss_type", "preference.loss", "kto")) != "kto":
        made.notes.append(f"loss_type={kind}: there is none of that name here; kto stands in its place")
    for name in ("desirable_weight", "undesirable_weight"):
        put(preference, name, keys.take(name, f"preference.{name}", 1.0), default=1.0)
    return preference


def _rows(keys: Keys, made: Imported) -> int:
    """Of an optimizer step, over all devices."""
    each = whole(keys.take("per_device_train_batch_size", "rows of a step", 8))
    passes = whole(keys.take("gradient_accumulation_steps", "rows of a step", 1))
    devices = keys.values.get("launcher.num_processes")
    if devices is None:
        made.notes.append("rows of a step: TRL's were these times the number of devices, which the script does not say")
    return max(1, each * passes * (whole(devices) or 1))


def _online(keys: Keys, method: str, made: Imported) -> None:
    """GRPO and RLOO: a generation batch of completions, taken apart into optimizer steps."""
    rows = _rows(keys, made)
    passes = whole(keys.values.get("gradient_accumulation_steps", 1)) or 1
    group = whole(keys.take("num_generations", "algorithm.group_size", 8 if method == "grpo" else 2))
    each = keys.take("steps_per_generation", "algorithm.minibatches", passes)
    completions = keys.take("generation_batch_size", "data.prompts_per_step", rows * whole(each) // passes)
    minibatches = max(1, ceil(completions / rows))
    algorithm: dict[str, Any] = {"type": method, "group_size": group}
    put(algorithm, "minibatches", minibatches, default=1)
    put(algorithm, "epochs", keys.take("num_iterations", "algorithm.epochs", 1), default=1)
    made.tree["data"]["prompts_per_step"] = max(minibatches, completions // max(group, 1))
    if prompt := keys.take("max_prompt_length", "data.max_prompt_tokens"):
        made.tree["data"]["max_prompt_tokens"] = prompt
    if keys.take("shuffle_dataset", "data.shuffle") is False:
        made.tree["data"]["shuffle"] = False
    entropy = keys.take("entropy_coef", "algorithm.entropy_coefficient", 0)
    put(algorithm, "entropy_coefficient", entropy, default=0)
    made.tree["algorithm"] = algorithm
    if method == "grpo":
        _grpo(keys, algorithm, made)
    else:
        _rloo(keys, algorithm, made)
    made.tree["generation"] = _generation(keys, made)
    if made.tree["generation"]["type"] == "vllm" and method == "grpo":
        _correction(keys, algorithm, made)
    made.tree |= _rewards(keys, made)


def _grpo(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    kinds = {name: name for name in _GRPO_LOSSES}
    kind, aggregation = _GRPO_LOSSES[known(kinds, keys.take("loss_type", "algorithm.loss", "dapo"), "loss_type", made)]
    if keys.take("importance_sampling_level", "algorithm.loss.type", "token") == "sequence":
        kind = "gspo"
    loss: dict[str, Any] = {"type": kind, "aggregation": aggregation}
    if kind == "sapo":
        put(loss, "temperature_negative", keys.take("sapo_temperature_neg", "algorithm.loss", 1.05), default=1.05)
        put(loss, "temperature_positive", keys.take("sapo_temperature_pos", "algorithm.loss", 1.0), default=1.0)
    else:
        _clip_range(keys, loss)
    if kind == "clip" and (delta := keys.take("delta", "algorithm.loss.dual_clip")):
        loss["dual_clip"] = delta
    algorithm["loss"] = loss
    scale = keys.take("scale_rewards", "algorithm.normalize_by_std", "group")
    if scale in (False, "none", "batch"):
        algorithm["normalize_by_std"] = False
    if scale == "batch":
        made.notes.append(
            "scale_rewards=batch: rewards are not scaled by a batch's deviation here; they are not scaled"
        )
    truncated = keys.take("mask_truncated_completions", "algorithm.mask_truncated", False)
    put(algorithm, "mask_truncated", truncated, default=False)
    if beta := keys.take("beta", "algorithm.kl.coefficient", 0.0):
        algorithm["kl"] = {"place": "loss", "coefficient": beta, "estimator": "k3"}


def _clip_range(keys: Keys, loss: dict[str, Any]) -> None:
    low = keys.take("epsilon", "algorithm.loss.clip_ratio_low and clip_ratio_high", 0.2)
    loss["clip_ratio_low"] = low
    loss["clip_ratio_high"] = keys.take("epsilon_high", "algorithm.loss.clip_ratio_high", low)


def _rloo(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    """TRL clips the ratio of whole answers, and takes the KL term from the reward."""
    algorithm["loss"] = {"type": "clip", "aggregation": "sequence_mean_token_sum"}
    _clip_range(keys, algorithm["loss"])
    made.notes.append("TRL's RLOO clips the ratio of a whole answer; here the ratio of each token is clipped")
    if beta := keys.take("beta", "algorithm.kl.coefficient", 0.05):
        algorithm["kl"] = {"place": "reward", "coefficient": beta, "estimator": "k1"}
    if keys.take("normalize_advantages", "algorithm"):
        made.notes.append("normalize_advantages: advantages are not scaled by a batch's deviation here")
    if (bounds := keys.take("reward_clip_range", "algorithm.clip_rewards")) is not None:
        algorithm["clip_rewards"] = listed(bounds)[-1]


def _generation(keys: Keys, made: Imported) -> dict[str, Any]:
    vllm = keys.take("use_vllm", "generation.type", False) or "vllm_mode" in keys.values
    generation: dict[str, Any] = {"type": "vllm" if vllm else "native"}
    generation["max_response_tokens"] = keys.take("max_completion_length", "generation.max_response_tokens", 512)
    put(generation, "temperature", keys.take("temperature", "generation.temperature", 1.0), default=1.0)
    put(generation, "top_p", keys.take("top_p", "generation.top_p", 1.0), default=1.0)
    put(generation, "top_k", max(0, whole(keys.take("top_k", "generation.top_k", 0))), default=0)
    if vllm:
        if keys.take("vllm_mode", "generation.type", "colocate") == "server":
            made.notes.append("vllm_mode=server: give the engine devices of its own with placement.pools and .roles")
        parallel = keys.take("vllm_tensor_parallel_size", "generation.tensor_parallel", 1)
        put(generation, "tensor_parallel", parallel, default=1)
        share = keys.take("vllm_gpu_memory_utilization", "generation.memory_share")
        put(generation, "memory_share", share, default=None)
        keys.take("vllm_enable_sleep_mode", "generation.sleep")
    if _evaluates(keys):
        samples = keys.take("num_generations_eval", "generation.eval.samples", made.tree["algorithm"]["group_size"])
        generation["eval"] = {"samples": samples, "temperature": generation.get("temperature", 1.0)}
        put(generation["eval"], "top_p", generation.get("top_p"), default=None)
    return generation


def _correction(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    """For log-probs of vLLM's that differ from the trainer's; TRL corrects unless it is told not to."""
    if not keys.take("vllm_importance_sampling_correction", "algorithm.rollout_correction", True):
        return
    names = {name: name for name in _CORRECTIONS}
    given = keys.take("vllm_importance_sampling_mode", "algorithm.rollout_correction", "sequence_mask")
    mode = known(names, given, "vllm_importance_sampling_mode", made)
    upper = keys.take("vllm_importance_sampling_clip_max", "algorithm.rollout_correction.upper", 3.0)
    upper = keys.take("vllm_importance_sampling_cap", "algorithm.rollout_correction.upper", upper)
    algorithm["rollout_correction"] = {**_CORRECTIONS[mode], "upper": upper}
    if low := keys.take("vllm_importance_sampling_clip_min", "algorithm.rollout_correction.lower"):
        algorithm["rollout_correction"]["lower"] = low


def _rewards(keys: Keys, made: Imported) -> dict[str, Any]:
    if path := keys.take("reward_model_name_or_path", "model.reward_model_path"):
        made.tree["model"]["reward_model_path"] = path
    names = listed(keys.take("reward_funcs", "reward.functions", []))
    weights = listed(keys.take("reward_weights", "reward.functions", [1.0] * len(names)))
    functions: list[Any] = []
    for name, weight in zip(names, weights, strict=False):
        spelled = _reference(str(name))
        if spelled.startswith("REWARDS.py:") and not any("REWARDS.py" in note for note in made.notes):
            made.notes.append(
                f"reward.functions: write the file that has {name} in the place of REWARDS.py, and in it a function of "
                "that name; where it is a reward model, write it as model.reward_model_path"
            )
        functions.append(spelled if weight == 1.0 else {"function": spelled, "weight": weight})
    if not functions and not path:
        made.notes.append("reward.functions: the script does not name its rewards; give file.py:function")
    return {"reward": {"functions": functions}} if functions else {}


def _reference(name: str) -> str:
    """`trl.rewards`' own by their names, `package.module.function`, or what is in a file already."""
    if ":" in name:
        return name
    module, _, function = name.rpartition(".")
    if module and all(part.isidentifier() for part in name.split(".")):
        return f"{module}:{function}"
    return f"trl.rewards:{name}" if name in _REWARDS else f"REWARDS.py:{name}"


def _ppo(keys: Keys, method: str, made: Imported) -> None:
    made.tree["data"]["prompts_per_step"] = _rows(keys, made)
    loss: dict[str, Any] = {"type": "clip"}
    loss["clip_ratio_low"] = loss["clip_ratio_high"] = keys.take(
        "cliprange", "algorithm.loss.clip_ratio_low, _high", 0.2
    )
    algorithm: dict[str, Any] = {
        "type": method,
        "epochs": keys.take("num_ppo_epochs", "algorithm.epochs", 4),
        "gae_lambda": keys.take("lam", "algorithm.gae_lambda", 0.95),
        "loss": loss,
    }
    put(algorithm, "minibatches", keys.take("num_mini_batches", "algorithm.minibatches", 1), default=1)
    put(algorithm, "gamma", keys.take("gamma", "algorithm.gamma", 1.0), default=1.0)
    put(algorithm, "value_clip", keys.take("cliprange_value", "algorithm.value_clip", 0.2), default=0.2)
    coefficient = keys.take("kl_coef", "algorithm.kl.coefficient", 0.05)
    estimator = keys.take("kl_estimator", "algorithm.kl.estimator", "k1")
    algorithm["kl"] = {"place": "reward", "coefficient": coefficient, "estimator": estimator}
    critic: dict[str, Any] = {"lr": keys.values.get("learning_rate", _LEARNING_RATES["ppo"])}
    if keys.values.get("optim") in EIGHT_BITS:
        critic["type"] = "adamw_8bit"
    algorithm["critic_optimizer"] = critic
    made.tree["algorithm"] = algorithm
    model = made.tree["model"]
    model["reward_model_path"] = keys.take("reward_model_path", "model.reward_model_path", "REWARD_MODEL_DIRECTORY")
    made.notes.append("TRL's critic starts from the reward model; here from model.critic_path, by default the policy")
    start = keys.take("sft_model_path", "model.path")
    if start:
        model["path"] = start
    made.tree["generation"] = {
        "type": "native",
        "max_response_tokens": keys.take("response_length", "generation.max_response_tokens", 53),
        "temperature": keys.take("temperature", "generation.temperature", 0.7),
    }
    if penalty := keys.take("missing_eos_penalty", "algorithm.overlong_buffer"):
        made.notes.append(f"missing_eos_penalty={penalty}: algorithm.overlong_buffer punishes answers that run long")


def _optimizer(keys: Keys, method: str, made: Imported) -> dict[str, Any]:
    optimizer: dict[str, Any] = {"lr": keys.take("learning_rate", "training.optimizer.lr", _LEARNING_RATES[method])}
    if keys.values.get("optim") in EIGHT_BITS:
        optimizer["type"] = _eight_bits(keys, made)
    put(optimizer, "weight_decay", keys.take("weight_decay", "training.optimizer.weight_decay", 0.0), default=0.0)
    first = keys.take("adam_beta1", "training.optimizer.betas", 0.9)
    second = keys.take("adam_beta2", "training.optimizer.betas", 0.999)
    put(optimizer, "betas", [first, second], default=[0.9, 0.999])
    put(optimizer, "eps", keys.take("adam_epsilon", "training.optimizer.eps", 1e-8), default=1e-8)
    put(optimizer, "max_grad_norm", keys.take("max_grad_norm", "training.optimizer.max_grad_norm", 1.0), default=1.0)
    given = keys.take("lr_scheduler_type", "training.optimizer.schedule", "linear")
    optimizer["schedule"] = known(_SCHEDULES, given, "lr_scheduler_type", made)
    options = keys.take("lr_scheduler_kwargs", "training.optimizer.min_lr_ratio")
    if isinstance(options, dict) and "min_lr_rate" in options:
        optimizer["min_lr_ratio"] = options["min_lr_rate"]
    put(optimizer, "warmup_steps", _warmup_steps(keys), default=0)
    return optimizer


def _warmup_steps(keys: Keys) -> int:
    """Optimizer steps. A number below 1 is a share of the run, which is not taken over where its length is unknown."""
    steps = whole(keys.values.get("max_steps"))
    given = (keys.values.get(key) for key in ("warmup_steps", "warmup_ratio"))
    warmup = next((number for number in given if isinstance(number, int | float) and number), 0)
    unknown = 0 < warmup < 1 and steps < 1
    for key in ("warmup_steps", "warmup_ratio"):
        if not (unknown and keys.values.get(key)):
            keys.take(key, "training.optimizer.warmup_steps")
    if unknown:
        return 0
    return ceil(warmup * steps) if warmup < 1 else int(warmup)


def _eight_bits(keys: Keys, made: Imported) -> str:
    """The type of an optimizer that is bitsandbytes' there."""
    given = keys.take("optim", "training.optimizer.type")
    paged = "; nothing is paged: training.optimizer_offload has the state in host memory" if "paged" in given else ""
    made.notes.append(
        f"optim={given}: adamw_8bit is our own, with blocks of at most 256 numbers within a row, where bitsandbytes' "
        f"are of the whole weight, and with embeddings in 8 bits, which transformers leaves in 32{paged}"
    )
    return "adamw_8bit"


def _trainer(keys: Keys, method: str, tree: Mapping[str, Any], made: Imported) -> dict[str, Any]:
    trainer: dict[str, Any] = {"run_dir": keys.take("output_dir", "trainer.run_dir", "runs/imported")}
    algorithm = tree.get("algorithm", {})
    inner = algorithm.get("minibatches", 1) * algorithm.get("epochs", 1)
    steps = whole(keys.take("max_steps", "trainer.steps", -1))
    epochs = keys.take("num_train_epochs", "trainer.epochs", 3)
    episodes = whole(keys.take("total_episodes", "trainer.steps"))
    if method == "ppo" and episodes:
        trainer["steps"] = ceil(episodes / tree["data"]["prompts_per_step"])
    elif steps > 0:
        trainer["steps"] = ceil(steps / inner)
    else:
        trainer["epochs"] = max(1, ceil(epochs))
    if inner > 1:
        made.notes.append(f"steps: one of ours is a generation with {inner} optimizer steps, which TRL counts each")
    saves_best = keys.values.get("save_strategy") == "best"
    strategy, every = "no" if saves_best else keys.take("save_strategy", "trainer.save_every", "steps"), 0
    if strategy not in ("no", "epoch", False):
        every = _interval(keys, "save_steps", "trainer.save_every", 500, made)
    put(trainer, "save_every", ceil(every / inner), default=0)
    if _evaluates(keys):
        put(trainer, "eval_every", ceil(_evaluation_interval(keys, made) / inner), default=0)
        trainer |= best_keys(keys, method, tree, made)
    put(trainer, "keep_last", keys.take("save_total_limit", "trainer.keep_last"), default=None)
    put(trainer, "seed", keys.take("seed", "trainer.seed"), default=None)
    return trainer


def _evaluation_interval(keys: Keys, made: Imported) -> int:
    """Optimizer steps between evaluations; 0 where it takes a run to tell."""
    if keys.take("eval_strategy", "trainer.eval_every and data.val_files") == "steps":
        return _interval(keys, "eval_steps", "trainer.eval_every", keys.values.get("logging_steps", 10), made)
    made.notes.append("eval_strategy=epoch: give trainer.eval_every, the steps of an epoch of data.train_files")
    return 0


def _interval(keys: Keys, key: str, ours: str, default: Any, made: Imported) -> int:
    """Optimizer steps; 0 where TRL was given a share of the run, or what only a run would tell."""
    every = keys.take(key, ours, default)
    if isinstance(every, int | float) and every >= 1:
        return int(every)
    made.notes.append(f"{key}={every}: no number of steps; give {ours}")
    return 0


def _tracking(keys: Keys) -> dict[str, Any]:
    from tandem.config.tracking import TrackingConfig

    given = listed(keys.take("report_to", "tracking", []))
    known_ones: dict[str, Any] = {name: True for name in given if name in TrackingConfig.model_fields}
    project = keys.take("project", "tracking")
    for name in known_ones:
        if project and name in ("wandb", "trackio", "swanlab"):
            known_ones[name] = {"project": project}
    return {"tracking": known_ones} if known_ones else {}
