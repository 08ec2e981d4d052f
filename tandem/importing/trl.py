"""A script or configuration of TRL -> a configuration of ours, and what became of each of its arguments.

What one argument alone says is a row of `trl_tables.py`; here is what takes several. Only what TRL was told is read,
and those of its defaults that differ from ours; facts about them are from its published configuration classes and
`transformers.TrainingArguments`.
"""

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from tandem.config.counterparts import int_or_zero, key_in, listed
from tandem.errors import UserError
from tandem.importing.outcome import ForeignConfig, Imported, Keys, known, put, sort_the_rest
from tandem.importing.trl_best import best_counterparts, best_keys, best_without_effect
from tandem.importing.trl_source import DatasetSource, own_files
from tandem.importing.trl_tables import EIGHT_BITS, HARMLESS, LEARNING_RATES, MENDS, WITHOUT_EFFECT, table

COMMANDS: Mapping[str, str] = {
    "sft": "sft", "dpo": "dpo", "kto": "dpo", "orpo": "dpo", "reward": "reward-model", "grpo": "train", "rloo": "train",
    "ppo": "train",
}  # fmt: skip
"""TRL's trainer -> the command of ours that takes the configuration."""
_PEFT_DEFAULT = ["q_proj", "v_proj"]
_VALUE_HEADS = ("score", "classifier")
"""What TRL's reward models call theirs."""
_PREFERENCES = {"sigmoid": "dpo", "ipo": "ipo"}
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


def convert(source: ForeignConfig) -> Imported:
    """The configuration of ours, with what became of every argument. Raises UserError for a trainer without one."""
    if source.method not in COMMANDS:
        raise UserError(f"TRL's {source.method} has no counterpart here; these have one: {', '.join(COMMANDS)}")
    keys, made = Keys(source.values, table(source.method)), Imported({}, notes=list(source.notes))
    tree, method = made.tree, source.method
    if method in ("grpo", "rloo"):
        tree |= _openings(keys, method, made)
    keys.take_rows(made)
    tree["model"] |= _precision(keys) | _adapters(keys, made)
    whole_layers = listed(keys.values.get("lora_modules_to_save"))
    if method == "reward" and all(layer in _VALUE_HEADS for layer in whole_layers):
        keys.take("lora_modules_to_save", ours="a value head always learns beside model.lora")
    tree["data"] = _files(keys, made) | tree.get("data", {})
    {"grpo": _online, "rloo": _online, "ppo": _ppo}.get(method, _offline)(keys, method, made)
    _optimizer(keys, tree["training"]["optimizer"], made)
    ranks = int_or_zero(keys.take("launcher.num_processes", 1))
    tree |= {"cluster": {"ranks": ranks}} if ranks > 1 else {}
    tree["trainer"] |= _trainer(keys, method, tree, made)
    tree |= _tracking(keys)
    keys.texts |= best_counterparts(keys, method, tree)
    without_effect = {**WITHOUT_EFFECT, **_without_validation(keys), **best_without_effect(keys, _evaluates(keys))}
    if "lora" not in tree["model"]:
        without_effect["lora_*"] = "without use_peft the whole model learns"
    sort_the_rest(keys, made, without_effect, HARMLESS, MENDS)
    return made


def _precision(keys: Keys) -> dict[str, Any]:
    given = {key: keys.take(key) for key in ("bf16", "fp16", "dtype", "model_init_kwargs")}
    return {"dtype": "float32" if given["bf16"] is False or given["fp16"] is True else "bfloat16"}


def _adapters(keys: Keys, made: Imported) -> dict[str, Any]:
    if not keys.take("use_peft"):
        return {}
    target = keys.take("lora_target_modules")
    if target is None:
        made.notes.append("model.lora.target_modules: PEFT's choice for most families is written; all-linear is usual")
    one = target if target == "all-linear" else listed(target or _PEFT_DEFAULT)
    return {"lora": {"rank": keys.take("lora_r", 16), "alpha": keys.take("lora_alpha", 32), "target_modules": one}}


def _files(keys: Keys, made: Imported) -> dict[str, Any]:
    """The data set's id on the Hub or its files, or a stand-in for what a script loads; its test split if TRL
    evaluates."""
    if mixed := keys.take("datasets"):
        return _mixed_files(mixed, keys, made)
    asked = (("dataset_name", None), ("dataset_config", None), ("dataset_train_split", "train"), ("data_files", None))
    rows = DatasetSource(*(keys.take(key, default) for key, default in asked))
    files = {"train_files": _rows_of(rows, "data.train_files", "TRAIN.parquet", made)}
    if _evaluates(keys):
        rows = rows._replace(split=keys.take("dataset_test_split", "test"))
        if other := keys.values.get("eval_dataset"):
            rows = DatasetSource(str(other).strip("⟨⟩"), rows.configuration, "", None)
        own = keys.take("eval_data_files")
        files["val_files"] = own or _rows_of(rows, "data.val_files", "VAL.parquet", made)
    return files


def _mixed_files(mixed: Any, keys: Keys, made: Imported) -> dict[str, Any]:
    """`datasets` of a YAML file: all their rows together, whatever `dataset_name` says."""
    train: list[str] = []
    for number, one in enumerate(listed(mixed), start=1):
        given = one if isinstance(one, dict) else {"path": one}
        rows = DatasetSource(given.get("path"), given.get("name"), given.get("split", "train"), given.get("data_files"))
        if given.get("data_dir"):
            rows = rows._replace(name=f"{rows.name} of {given['data_dir']}")
        train += _rows_of(rows, "data.train_files", f"TRAIN_{number}.parquet", made)
    files = {"train_files": train}
    if _evaluates(keys):
        held_out = DatasetSource(
            f"rows of your own (test_split_size={keys.values.get('test_split_size')})", None, "", None
        )
        files["val_files"] = _rows_of(held_out, "data.val_files", "VAL.parquet", made)
    return files


def _rows_of(rows: DatasetSource, key: str, stand_in: str, made: Imported) -> list[str]:
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
    data |= {"rows_per_step": rows, "on_bad_row": "skip"}
    made.notes.append(f"a row of more than {data['max_tokens']} tokens is skipped here; TRL cut its end off")
    if method == "sft":
        if keys.take("packing"):
            made.notes.append(f"with packing TRL's {rows} rows a step were each max_length tokens of several; choose")
        if not keys.values.get("assistant_only_loss"):
            made.notes.append("TRL learned all tokens of `messages` without assistant_only_loss; here the assistant's")
    if method in ("dpo", "kto", "orpo"):
        preferred = _preferred(keys, made) if method == "dpo" else _rated(keys, method, made)
        made.tree["preference"] = preferred | made.tree.get("preference", {})


def _preferred(keys: Keys, made: Imported) -> dict[str, Any]:
    given = keys.take("loss_type", "sigmoid")
    kinds = listed(given)
    if len(kinds) > 1:
        made.notes.append(f"loss_type={given}: a sum of losses has no counterpart; the first is taken")
    if kinds[0] == "sigmoid_norm":
        return {"loss": "dpo", "length_normalized": True}
    return {"loss": known(_PREFERENCES, kinds[0], "loss_type", made)}


def _rated(keys: Keys, method: str, made: Imported) -> dict[str, Any]:
    """KTO and ORPO."""
    if method == "orpo":
        made.notes.append("TRL's ORPO learns the likelihood of prompt and answer; here the answer's")
    elif (kind := keys.take("loss_type", "kto")) != "kto":
        made.notes.append(f"loss_type={kind}: there is none of that name here; kto stands in its place")
    return {"loss": method}


def _rows(keys: Keys, made: Imported) -> int:
    """Of an optimizer step, over all devices."""
    each = int_or_zero(keys.take("per_device_train_batch_size", 8))
    passes = int_or_zero(keys.take("gradient_accumulation_steps", 1))
    devices = keys.values.get("launcher.num_processes")
    if devices is None:
        made.notes.append("rows of a step: TRL's were these times the number of devices, which the script does not say")
    return max(1, each * passes * (int_or_zero(devices) or 1))


def _openings(keys: Keys, method: str, made: Imported) -> dict[str, Any]:
    """What other arguments depend on: the loss, and the engine."""
    vllm = keys.take("use_vllm", False) or "vllm_mode" in keys.values
    loss = {"type": "clip", "aggregation": "sequence_mean_token_sum"} if method == "rloo" else _loss(keys, made)
    return {"algorithm": {"type": method, "loss": loss}, "generation": {"type": "vllm" if vllm else "native"}}


def _loss(keys: Keys, made: Imported) -> dict[str, Any]:
    kinds = {name: name for name in _GRPO_LOSSES}
    kind, aggregation = _GRPO_LOSSES[known(kinds, keys.take("loss_type", "dapo"), "loss_type", made)]
    sequence = keys.take("importance_sampling_level", "token") == "sequence"
    return {"type": "gspo" if sequence else kind, "aggregation": aggregation}


def _online(keys: Keys, method: str, made: Imported) -> None:
    """GRPO and RLOO: a generation batch of completions, taken apart into optimizer steps."""
    algorithm, rows = made.tree["algorithm"], _rows(keys, made)
    passes = int_or_zero(keys.values.get("gradient_accumulation_steps", 1)) or 1
    group = int_or_zero(keys.take("num_generations", 8 if method == "grpo" else 2))
    each = keys.take("steps_per_generation", passes)
    completions = keys.take("generation_batch_size", rows * int_or_zero(each) // passes)
    minibatches = max(1, ceil(completions / rows))
    algorithm["group_size"] = group
    put(algorithm, "minibatches", minibatches, unless=1)
    made.tree["data"]["prompts_per_step"] = max(minibatches, completions // max(group, 1))
    if algorithm["loss"]["type"] != "sapo":
        low = keys.take("epsilon", 0.2)
        algorithm["loss"] |= {"clip_ratio_low": low, "clip_ratio_high": keys.take("epsilon_high", low)}
    (_grpo if method == "grpo" else _rloo)(keys, algorithm, made)
    _engine(keys, made.tree["generation"], group, made)
    if made.tree["generation"]["type"] == "vllm" and method == "grpo":
        _correction(keys, algorithm, made)
    made.tree |= _rewards(keys, made)


def _grpo(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    scale = keys.take("scale_rewards", "group")
    if scale in (False, "none", "batch"):
        algorithm["normalize_by_std"] = False
    if scale == "batch":
        made.notes.append(
            "scale_rewards=batch: rewards are not scaled by a batch's deviation here; they are not scaled"
        )
    if beta := keys.take("beta", 0.0):
        algorithm["kl"] = {"place": "loss", "coefficient": beta, "estimator": "k3"}


def _rloo(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    """TRL clips the ratio of whole answers, and takes the KL term from the reward."""
    made.notes.append("TRL's RLOO clips the ratio of a whole answer; here the ratio of each token is clipped")
    if beta := keys.take("beta", 0.05):
        algorithm["kl"] = {"place": "reward", "coefficient": beta, "estimator": "k1"}
    if keys.take("normalize_advantages"):
        made.notes.append("normalize_advantages: advantages are not scaled by a batch's deviation here")
    if (bounds := keys.take("reward_clip_range")) is not None:
        algorithm["clip_rewards"] = listed(bounds)[-1]


def _engine(keys: Keys, generation: dict[str, Any], group: int, made: Imported) -> None:
    if generation["type"] == "vllm":
        if keys.take("vllm_mode", "colocate") == "server":
            made.notes.append("vllm_mode=server: give the engine devices of its own with placement.pools and .roles")
        keys.take("vllm_enable_sleep_mode")
    if _evaluates(keys):
        samples = keys.take("num_generations_eval", group)
        generation["eval"] = {"samples": samples, "temperature": generation.get("temperature", 1.0)}
        put(generation["eval"], "top_p", generation.get("top_p"))


def _correction(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    """For log-probs of vLLM's that differ from the trainer's; TRL corrects unless it is told not to."""
    if not keys.take("vllm_importance_sampling_correction", True):
        return
    names = {name: name for name in _CORRECTIONS}
    given = keys.take("vllm_importance_sampling_mode", "sequence_mask")
    mode = known(names, given, "vllm_importance_sampling_mode", made)
    upper = keys.take("vllm_importance_sampling_clip_max", 3.0)
    upper = keys.take("vllm_importance_sampling_cap", upper)
    algorithm["rollout_correction"] = {**_CORRECTIONS[mode], "upper": upper}
    if low := keys.take("vllm_importance_sampling_clip_min"):
        algorithm["rollout_correction"]["lower"] = low


def _rewards(keys: Keys, made: Imported) -> dict[str, Any]:
    names = listed(keys.take("reward_funcs", []))
    weights = listed(keys.take("reward_weights", [1.0] * len(names)))
    functions: list[Any] = []
    for name, weight in zip(names, weights, strict=False):
        spelled = _reference(str(name))
        if spelled.startswith("REWARDS.py:") and not any("REWARDS.py" in note for note in made.notes):
            made.notes.append(
                f"reward.functions: write the file that has {name} in the place of REWARDS.py, and in it a function of "
                "that name; where it is a reward model, write it as model.reward_model_path"
            )
        functions.append(spelled if weight == 1.0 else {"function": spelled, "weight": weight})
    if not functions and "reward_model_path" not in made.tree["model"]:
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
    tree = made.tree
    tree["data"]["prompts_per_step"] = _rows(keys, made)
    clip = keys.take("cliprange", 0.2)
    critic: dict[str, Any] = {"lr": keys.values.get("learning_rate", LEARNING_RATES["ppo"])}
    if keys.values.get("optim") in EIGHT_BITS:
        critic["type"] = "adamw_8bit"
    tree["algorithm"] |= {
        "type": method,
        "loss": {"type": "clip", "clip_ratio_low": clip, "clip_ratio_high": clip},
        "critic_optimizer": critic,
    }
    tree["algorithm"]["kl"]["place"] = "reward"
    tree["generation"]["type"] = "native"
    made.notes.append("TRL's critic starts from the reward model; here from model.critic_path, by default the policy")
    if penalty := keys.take("missing_eos_penalty"):
        made.notes.append(f"missing_eos_penalty={penalty}: algorithm.overlong_buffer punishes answers that run long")


def _optimizer(keys: Keys, optimizer: dict[str, Any], made: Imported) -> None:
    if keys.values.get("optim") in EIGHT_BITS:
        optimizer["type"] = _eight_bits(keys, made)
    put(optimizer, "betas", [keys.take("adam_beta1", 0.9), keys.take("adam_beta2", 0.999)], unless=[0.9, 0.999])
    put(optimizer, "warmup_steps", _warmup_steps(keys), unless=0)


def _warmup_steps(keys: Keys) -> int:
    """Optimizer steps. A number below 1 is a share of the run, which is not taken over where its length is unknown."""
    steps = int_or_zero(keys.values.get("max_steps"))
    given = (keys.values.get(key) for key in ("warmup_steps", "warmup_ratio"))
    warmup = next((number for number in given if isinstance(number, int | float) and number), 0)
    unknown = 0 < warmup < 1 and steps < 1
    for key in ("warmup_steps", "warmup_ratio"):
        if not (unknown and keys.values.get(key)):
            keys.take(key)
    if unknown:
        return 0
    return ceil(warmup * steps) if warmup < 1 else int(warmup)


def _eight_bits(keys: Keys, made: Imported) -> str:
    """The type of an optimizer that is bitsandbytes' there."""
    given = keys.take("optim")
    paged = "; nothing is paged: training.optimizer_offload has the state in host memory" if "paged" in given else ""
    made.notes.append(
        f"optim={given}: adamw_8bit is our own, with blocks of at most 256 numbers within a row, where bitsandbytes' "
        f"are of the whole weight, and with embeddings in 8 bits, which transformers leaves in 32{paged}"
    )
    return "adamw_8bit"


def _trainer(keys: Keys, method: str, tree: Mapping[str, Any], made: Imported) -> dict[str, Any]:
    trainer = dict[str, Any]()
    algorithm = tree.get("algorithm", {})
    inner = algorithm.get("minibatches", 1) * algorithm.get("epochs", 1)
    steps = int_or_zero(keys.take("max_steps", -1))
    epochs = keys.take("num_train_epochs", 3)
    episodes = int_or_zero(keys.take("total_episodes"))
    if method == "ppo" and episodes:
        trainer["steps"] = ceil(episodes / tree["data"]["prompts_per_step"])
    elif steps > 0:
        trainer["steps"] = ceil(steps / inner)
    else:
        trainer["epochs"] = max(1, ceil(epochs))
    if inner > 1:
        made.notes.append(f"steps: one of ours is a generation with {inner} optimizer steps, which TRL counts each")
    saves_best = keys.values.get("save_strategy") == "best"
    strategy, every = "no" if saves_best else keys.take("save_strategy", "steps", ours="trainer.save_every"), 0
    if strategy not in ("no", "epoch", False):
        every = _interval(keys, "save_steps", 500, made)
    put(trainer, "save_every", ceil(every / inner), unless=0)
    if _evaluates(keys):
        put(trainer, "eval_every", ceil(_evaluation_interval(keys, made) / inner), unless=0)
        trainer |= best_keys(keys, method, tree, made)
    return trainer


def _evaluation_interval(keys: Keys, made: Imported) -> int:
    """Optimizer steps between evaluations; 0 where it takes a run to tell."""
    if keys.take("eval_strategy") == "steps":
        return _interval(keys, "eval_steps", keys.values.get("logging_steps", 10), made)
    made.notes.append("eval_strategy=epoch: give trainer.eval_every, the steps of an epoch of data.train_files")
    return 0


def _interval(keys: Keys, key: str, default: Any, made: Imported) -> int:
    """Optimizer steps; 0 where TRL was given a share of the run, or what only a run would tell."""
    every = keys.take(key, default)
    if isinstance(every, int | float) and every >= 1:
        return int(every)
    made.notes.append(f"{key}={every}: no number of steps; give {key_in(keys.texts[key])}")
    return 0


def _tracking(keys: Keys) -> dict[str, Any]:
    from tandem.config.tracking import TrackingConfig

    given = listed(keys.take("report_to", []))
    known_ones: dict[str, Any] = {name: True for name in given if name in TrackingConfig.model_fields}
    project = keys.take("project")
    for name in known_ones:
        if project and name in ("wandb", "trackio", "swanlab"):
            known_ones[name] = {"project": project}
    return {"tracking": known_ones} if known_ones else {}
