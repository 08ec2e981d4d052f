"""A launch script of OpenRLHF -> a configuration of ours, and what became of each of its arguments.

Facts about its arguments and their defaults are from its published command lines, `openrlhf.cli.train_*`.
"""

import re
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.importing.best import DEFAULT, reward_metric, source_of
from tandem.importing.openrlhf_tables import COUNTERPARTS, HARMLESS, OLDER, WITHOUT_EFFECT
from tandem.importing.outcome import Imported, Keys, Source, known, put, sort_the_rest, whole
from tandem.importing.shell import flags_of, launched, read_text, why_nothing

COMMANDS: Mapping[str, str] = {"ppo_ray": "train", "sft": "sft", "dpo": "dpo", "rm": "reward-model"}
"""OpenRLHF's trainer -> the command of ours that takes the configuration."""
_ALGORITHMS = {
    "gae": "ppo", "reinforce": "reinforce_plus_plus", "rloo": "rloo", "group_norm": "grpo", "dr_grpo": "dr_grpo",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}  # fmt: skip
_COMPARES_SIBLINGS = ("rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline")
_LEARNING_RATES = {"ppo_ray": 1e-6, "sft": 5e-6, "dpo": 1e-5, "rm": 9e-6}
_CORRECTIONS = {
    "tis": {"type": "truncate"}, "icepop": {"type": "mask"}, "seq-mask-tis": {"type": "mask", "level": "geometric"},
}  # fmt: skip
_TRAINER = re.compile(r"openrlhf[./]cli[./]train_(\w+?)(?:\.py)?")
_BEST = "ckpt.best_metric_key"
_LONGEST = {"ppo_ray": 2048, "sft": 2048, "dpo": 512, "rm": 512}


def read(path: Path, arguments: Sequence[str] = (), command: int | None = None) -> Source:
    """Which trainer the script starts, with what; of several the `command`th. Raises UserError where it starts none."""
    text = read_text(path)
    launch = launched(path, text, lambda words: _trainer_of(words) is not None, arguments, command)
    if launch is None:
        raise UserError(
            f"{path}: no openrlhf.cli.train_… is started in it; give a launch script of OpenRLHF"
            + why_nothing(path, text, arguments)
        )
    _place, method = _trainer_of(launch.command.words) or (0, "")
    if method not in COMMANDS:
        raise UserError(f"{path}: train_{method} has no counterpart here; these have one: {', '.join(COMMANDS)}")
    given = launch.values(lambda command: _flags(command.words))
    return Source(method, {_newer(name, method): value for name, value in given.items()}, launch.notes)


def _flags(words: Sequence[str]) -> dict[str, Any]:
    place, _method = _trainer_of(words) or (0, "")
    return flags_of(words[place + 1 :])


def _trainer_of(words: Sequence[str]) -> tuple[int, str] | None:
    """Where among the words, and which."""
    named = ((place, _TRAINER.fullmatch(word)) for place, word in enumerate(words))
    return next(((place, found[1]) for place, found in named if found), None)


def _newer(name: str, method: str) -> str:
    newer = OLDER.get(name, name)
    if method != "ppo_ray" and newer.startswith("actor."):
        return {"actor.gradient_checkpointing_enable": "model.gradient_checkpointing_enable"}.get(
            newer, newer.replace("actor.", "model.")
        )
    return newer


def convert(source: Source) -> Imported:
    """The configuration of ours, with what became of every argument."""
    keys, made = Keys(source.values), Imported({}, notes=list(source.notes))
    prefix = "actor." if source.method == "ppo_ray" else "model."
    tree = made.tree
    tree["model"] = _model(keys, prefix)
    checkpointing = keys.take(f"{prefix}gradient_checkpointing_enable", "training.activation_checkpointing")
    training: dict[str, Any] = {"activation_checkpointing": True} if checkpointing else {}
    put(training, "context_parallel", keys.take("ds.ring_attn_size", "training.context_parallel", 1), default=1)
    if keys.take("ds.adam_offload", "training.optimizer_offload"):
        training["optimizer_offload"] = True
    if tokens := keys.take("train.max_tokens_per_gpu", "training.tokens_per_micro_batch"):
        training["tokens_per_micro_batch"] = tokens * training.get("context_parallel", 1)
    optimizer = "actor." if source.method == "ppo_ray" else ""
    training["optimizer"] = _optimizer(keys, optimizer, "training.optimizer", _LEARNING_RATES[source.method], made)
    tree["data"] = _files(keys, made)
    (_online if source.method == "ppo_ray" else _offline)(keys, source.method, made)
    tree["training"] = training
    tree["trainer"] = _trainer(keys, source.method)
    unmeasured = _best(keys, made)
    tree |= _tracking(keys)
    sort_the_rest(keys, made, {**WITHOUT_EFFECT, **unmeasured}, HARMLESS, COUNTERPARTS)
    return made


def _model(keys: Keys, prefix: str) -> dict[str, Any]:
    model: dict[str, Any] = {"path": keys.take(f"{prefix}model_name_or_path", "model.path", "MODEL_DIRECTORY")}
    keys.take("ds.bf16", "model.dtype")
    half = keys.take("ds.param_dtype", "model.dtype", "bf16")
    model["dtype"] = "float32" if half in ("fp32", "float32") else "bfloat16"
    if rank := keys.take("ds.lora.rank", "model.lora.rank", 0):
        target = keys.take("ds.lora.target_modules", "model.lora.target_modules", "all-linear")
        alpha = keys.take("ds.lora.alpha", "model.lora.alpha", 16)
        one = target if target == "all-linear" or isinstance(target, list) else [target]
        model["lora"] = {"rank": rank, "alpha": alpha, "target_modules": one}
    if keys.take("actor.freeze_visual_encoder", "model.vision_tower"):
        model["vision_tower"] = "frozen"
    if critic := keys.take("critic.model_name_or_path", "model.critic_path"):
        model["critic_path"] = critic
    if reward := keys.take("reward.model_name_or_path", "model.reward_model_path"):
        model["reward_model_path"] = reward
    return model


def _files(keys: Keys, made: Imported) -> dict[str, Any]:
    names = [keys.take(key, "data.train_files") for key in ("data.prompt_dataset", "data.dataset")]
    splits = [keys.take(key, "data.train_files") for key in ("data.prompt_split", "data.dataset_split")]
    held_out, split = keys.take("eval.dataset", "data.val_files"), keys.take("eval.split", "data.val_files", "train")
    data = {"train_files": [_rows_of(next(filter(None, names), None), next(filter(None, splits), "train"), made)]}
    if held_out:
        data["val_files"] = [_rows_of(held_out, split, made)]
    if most := keys.take("data.max_samples", "data.train_files"):
        made.notes.append(f"data.max_samples={most}: rows are not cut off here; write as many as there should be")
    return data


def _rows_of(name: Any, split: str, made: Imported) -> str:
    """The data set's id on the Hub, or a stand-in for local files."""
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return f"hub:{name}[{split}]"
    made.notes.append(f"data: put {name or 'the rows'} in the place of ROWS.parquet, as parquet or JSON lines")
    return "ROWS.parquet"


def _offline(keys: Keys, method: str, made: Imported) -> None:
    data = made.tree["data"]
    data["rows_per_step"] = keys.take("train.batch_size", "data.rows_per_step", 128)
    data["max_tokens"] = keys.take("data.max_len", "data.max_tokens", _LONGEST[method])
    data["on_bad_row"] = "skip"
    made.notes.append(f"a row of more than {data['max_tokens']} tokens is skipped here; OpenRLHF cuts it")
    keys.take("train.micro_batch_size", "training.tokens_per_micro_batch")
    if method == "dpo":
        loss = "ipo" if keys.take("model.ipo_enable", "preference.loss") else "dpo"
        made.tree["preference"] = {"loss": loss, "beta": keys.take("model.beta", "preference.beta", 0.1)}
        smoothing = keys.take("model.label_smoothing", "preference.label_smoothing", 0)
        put(made.tree["preference"], "label_smoothing", smoothing, default=0)


def _online(keys: Keys, method: str, made: Imported) -> None:
    tree = made.tree
    prompts = whole(keys.take("rollout.batch_size", "data.prompts_per_step", 1024))
    tree["data"]["prompts_per_step"] = prompts
    keys.take("train.micro_batch_size", "training.tokens_per_micro_batch")
    tree["algorithm"] = _algorithm(keys, prompts, made)
    if tree["algorithm"]["type"] == "ppo" and "lora" in tree["model"]:
        tree["model"]["critic_lora"] = _of_the_critic(keys, tree["model"]["lora"])
    longest = whole(keys.take("data.max_len", "generation.max_response_tokens", _LONGEST[method]))
    prompt = whole(keys.take("data.prompt_max_len", "data.max_prompt_tokens", 0))
    answer = whole(keys.take("rollout.max_new_tokens", "generation.max_response_tokens", 0))
    if not answer and not prompt:
        answer = prompt = longest // 2
        made.notes.append(f"data.max_len={longest} is of prompt and answer together; each has half of it here: choose")
    tree["data"]["max_prompt_tokens"] = prompt or max(1, longest - answer)
    tree["generation"] = _generation(keys, answer or max(1, longest - prompt))
    if path := keys.take("reward.remote_url", "reward.functions"):
        tree["reward"] = {"functions": ["REWARDS.py:score"]}
        made.notes.append(
            f"reward.functions: {path} has reward_func(queries, prompts, labels) or is a server; write a function of "
            "`completions` and the columns it needs (docs/rewards.md)"
        )
    if keys.take("train.async_enable", "trainer.max_staleness"):
        made.notes.append(
            "train.async_enable: trainer.max_staleness: 1 is written; more is how far generation runs ahead"
        )
    nodes = whole(keys.take("actor.num_nodes", "placement.pools", 1))
    each = whole(keys.take("actor.num_gpus_per_node", "cluster.ranks", 8))
    if nodes > 1:
        tree |= {"cluster": {"type": "ray"}, "placement": {"pools": {"main": [each] * nodes}}}
    else:
        tree["cluster"] = {"ranks": each}


def _of_the_critic(keys: Keys, lora: Mapping[str, Any]) -> dict[str, Any]:
    """OpenRLHF's critic has adapters where its policy does."""
    for name in lora:
        keys.take(f"ds.lora.{name}", f"model.lora.{name} and model.critic_lora.{name}")
    return {**lora}


def _algorithm(keys: Keys, prompts: int, made: Imported) -> dict[str, Any]:
    name = keys.take("algo.advantage.estimator", "algorithm.type", "gae")
    algorithm: dict[str, Any] = {"type": known(_ALGORITHMS, name, "algo.advantage.estimator", made)}
    group = whole(keys.take("rollout.n_samples_per_prompt", "algorithm.group_size", 1))
    if group == 1 and algorithm["type"] in _COMPARES_SIBLINGS:
        group = 8
        made.notes.append(f"{name} compares siblings, and one sample a prompt has none; 8 stand there: choose")
    algorithm["group_size"] = group
    batch = whole(keys.take("train.batch_size", "algorithm.minibatches", 128)) or 1
    put(algorithm, "minibatches", min(prompts, max(1, ceil(prompts * group / batch))), default=1)
    put(algorithm, "epochs", keys.take("train.max_epochs", "algorithm.epochs", 1), default=1)
    entropy = keys.take("actor.entropy_coef", "algorithm.entropy_coefficient", 0) or 0
    put(algorithm, "entropy_coefficient", entropy, default=0)
    if keys.take("algo.advantage.no_std_norm", "algorithm.normalize_by_std") and algorithm["type"] == "grpo":
        algorithm["normalize_by_std"] = False
    if algorithm["type"] in ("ppo", "reinforce_plus_plus"):
        put(algorithm, "gamma", keys.take("algo.advantage.gamma", "algorithm.gamma", 1), default=1)
    else:
        keys.take("algo.advantage.gamma", "algorithm.type")
    if algorithm["type"] == "ppo":
        put(algorithm, "gae_lambda", keys.take("algo.advantage.lambd", "algorithm.gae_lambda", 1), default=1)
        algorithm["value_clip"] = keys.take("critic.value_clip", "algorithm.value_clip", 0.5)
        algorithm["critic_optimizer"] = _optimizer(keys, "critic.", "algorithm.critic_optimizer", 9e-6, made)
    algorithm["loss"] = _loss(keys)
    if kl := _kl(keys):
        algorithm["kl"] = kl
    if keys.take("algo.advantage.is_correction_enable", "algorithm.rollout_correction"):
        algorithm["rollout_correction"] = _correction(keys, made)
    _rewards(keys, algorithm, made)
    return algorithm


def _loss(keys: Keys) -> dict[str, Any]:
    gspo = keys.take("actor.policy_loss_type", "algorithm.loss.type", "ppo") == "gspo"
    loss: dict[str, Any] = {"type": "gspo" if gspo else "clip"}
    both = keys.take("actor.eps_clip", "algorithm.loss.clip_ratio_low and clip_ratio_high", 0.2)
    low, high = keys.take("actor.eps_clip_low_high", "algorithm.loss.clip_ratio_low and clip_ratio_high", [both, both])
    loss |= {"clip_ratio_low": low, "clip_ratio_high": high}
    if not gspo and (dual := keys.take("actor.dual_clip", "algorithm.loss.dual_clip")):
        loss["dual_clip"] = dual
    return loss


def _kl(keys: Keys) -> dict[str, Any]:
    coefficient = keys.take("algo.kl.init_coef", "algorithm.kl.coefficient", 0.01)
    in_loss = keys.take("algo.kl.use_loss", "algorithm.kl.place", False)
    estimator = keys.take("algo.kl.estimator", "algorithm.kl.estimator", "k1")
    target = keys.take("algo.kl.target", "algorithm.kl.target")
    horizon = keys.take("algo.kl.horizon", "algorithm.kl.horizon_trajectories", 10_000)
    if not coefficient:
        return {}
    kl = {"place": "loss" if in_loss else "reward", "coefficient": coefficient, "estimator": estimator}
    if target and not in_loss:
        kl |= {"control": "adaptive", "target": target, "horizon_trajectories": horizon}
    return kl


def _correction(keys: Keys, made: Imported) -> dict[str, Any]:
    kinds = {name: name for name in _CORRECTIONS}
    given = keys.take("algo.advantage.is_correction_type", "algorithm.rollout_correction", "tis")
    kind = known(kinds, given, "algo.advantage.is_correction_type", made)
    bounds = keys.take("algo.advantage.is_correction_threshold", "algorithm.rollout_correction", [0.5, 5.0])
    correction: dict[str, Any] = {**_CORRECTIONS[kind], "upper": bounds[1]}
    if correction["type"] == "mask":
        correction["lower"] = bounds[0]
    else:
        made.notes.append(f"rollout_correction: weights below {bounds[0]} are not raised to it here, as OpenRLHF's are")
    return correction


def _rewards(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    if keys.take("algo.dynamic_filtering_enable", "algorithm.resample_rounds"):
        algorithm["resample_rounds"] = 100
    if keys.take("reward.normalize_enable", "algorithm.normalize_rewards"):
        algorithm["normalize_rewards"] = True
    if bounds := keys.take("reward.clip_range", "algorithm.clip_rewards"):
        algorithm["clip_rewards"] = bounds[1]
    elif "reward_model_path" in made.tree["model"]:
        algorithm["clip_rewards"] = 10
    most = whole(keys.values.get("rollout.max_new_tokens"))
    buffer = keys.take("reward.overlong_buffer_len", "algorithm.overlong_buffer")
    factor = keys.take("reward.overlong_penalty_factor", "algorithm.overlong_buffer", 1)
    if buffer and most:
        algorithm["overlong_buffer"] = round(buffer / most, 6)
        if factor != 1:
            made.notes.append(f"the overlong punishment is 1.0 at most here; OpenRLHF's factor was {factor}")


def _generation(keys: Keys, answer: int) -> dict[str, Any]:
    generation: dict[str, Any] = {"type": "vllm", "max_response_tokens": answer}
    put(generation, "temperature", keys.take("rollout.temperature", "generation.temperature", 1.0), default=1.0)
    put(generation, "top_p", keys.take("rollout.top_p", "generation.top_p", 1.0), default=1.0)
    parallel = keys.take("vllm.tensor_parallel_size", "generation.tensor_parallel", 1)
    put(generation, "tensor_parallel", parallel, default=1)
    put(generation, "memory_share", keys.take("vllm.gpu_memory_utilization", "generation.memory_share"), default=None)
    if keys.take("vllm.enforce_eager", "generation.engine_args.enforce_eager"):
        generation["engine_args"] = {"enforce_eager": True}
    samples = keys.take("eval.n_samples_per_prompt", "generation.eval.samples")
    temperature = keys.take("eval.temperature", "generation.eval.temperature")
    if samples or temperature:
        temperature = 0.6 if temperature is None else temperature
        generation["eval"] = {"temperature": temperature, "samples": samples or 4}
    return generation


def _optimizer(keys: Keys, prefix: str, ours: str, lr: float, made: Imported) -> dict[str, Any]:
    optimizer: dict[str, Any] = {"lr": keys.take(f"{prefix}adam.lr", f"{ours}.lr", lr)}
    optimizer["betas"] = list(keys.take(f"{prefix}adam.betas", f"{ours}.betas", [0.9, 0.95]))
    decay = keys.take(f"{prefix}adam.weight_decay", f"{ours}.weight_decay", 0)
    put(optimizer, "weight_decay", decay, default=0)
    put(optimizer, "eps", keys.take(f"{prefix}adam.eps", f"{ours}.eps", 1e-8), default=1e-8)
    put(optimizer, "max_grad_norm", keys.take(f"{prefix}max_norm", f"{ours}.max_grad_norm", 1.0), default=1.0)
    kind = keys.take(f"{prefix}lr_scheduler", f"{ours}.schedule", "cosine_with_min_lr")
    schedules = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant"}
    schedules["constant_with_warmup"] = "constant"
    optimizer["schedule"] = known(schedules, kind, f"{prefix}lr_scheduler", made)
    least = keys.take(f"{prefix}min_lr_ratio", f"{ours}.min_lr_ratio", 0.1)
    if kind == "cosine_with_min_lr":
        optimizer["min_lr_ratio"] = least
    share = keys.take(f"{prefix}lr_warmup_ratio", f"{ours}.warmup_steps", 0.03)
    made.notes.append(f"{ours}.warmup_steps: OpenRLHF warms up over {share:g} of the run; give a number of steps")
    return optimizer


def _trainer(keys: Keys, method: str) -> dict[str, Any]:
    trainer: dict[str, Any] = {"run_dir": keys.take("ckpt.output_dir", "trainer.run_dir", "runs/imported")}
    if method == "ppo_ray":
        trainer["epochs"] = keys.take("train.num_episodes", "trainer.epochs", 1)
        if keys.values.get("train.async_enable"):
            trainer["max_staleness"] = 1
    else:
        trainer["epochs"] = keys.take("train.max_epochs", "trainer.epochs", 2 if method == "sft" else 1)
    for key, ours in (("ckpt.save_steps", "save_every"), ("eval.steps", "eval_every")):
        put(trainer, ours, max(0, whole(keys.take(key, f"trainer.{ours}", 0))), default=0)
    put(trainer, "keep_last", keys.take("ckpt.max_num", "trainer.keep_last"), default=None)
    put(trainer, "seed", keys.take("train.seed", "trainer.seed"), default=None)
    return trainer


def _best(keys: Keys, made: Imported) -> dict[str, str]:
    """`trainer.best_metric`, where answers are validated; else why the key does nothing. OpenRLHF's
    `eval_<source>_pass1` is the mean reward; where the key is empty it takes the first of these."""
    key, tree = keys.values.get(_BEST), made.tree
    if not (tree["trainer"].get("eval_every") and tree["data"].get("val_files")):
        return {_BEST: "OpenRLHF does not evaluate without eval.steps and eval.dataset"}
    named = re.fullmatch("eval_(.+)_pass1", str(key))
    if key is None or not (named or key == ""):
        return {}
    keys.take(_BEST, "trainer.best_metric")
    source = named[1] if named else source_of([], made)
    samples = tree.get("generation", {}).get("eval", {}).get("samples", 1)
    tree["trainer"]["best_metric"] = reward_metric(source, samples)
    if source != DEFAULT:
        made.notes.append(f"trainer.best_metric: {source} is what the column data_source is to hold, theirs datasource")
    return {}


def _tracking(keys: Keys) -> dict[str, Any]:
    tracking: dict[str, Any] = {}
    project = keys.take("logger.wandb.project", "tracking.wandb.project")
    if "logger.wandb.key" in keys.values:
        tracking["wandb"] = {"project": project} if project else True
    if keys.take("logger.tensorboard_dir", "tracking.tensorboard"):
        tracking["tensorboard"] = True
    return {"tracking": tracking} if tracking else {}
