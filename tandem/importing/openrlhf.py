"""A launch script of OpenRLHF -> a configuration of ours, and what became of each of its arguments.

What one argument alone says is a row of `openrlhf_tables.py`; here is what takes several. Facts about its arguments and
their defaults are from its published command lines, `openrlhf.cli.train_*`.
"""

import re
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from tandem.config.counterparts import int_or_zero
from tandem.errors import UserError
from tandem.importing.import_best import DEFAULT, reward_metric, source_of
from tandem.importing.openrlhf_tables import HARMLESS, LONGEST, OLDER, WITHOUT_EFFECT, table
from tandem.importing.outcome import ForeignConfig, Imported, Keys, known, put, sort_the_rest
from tandem.importing.shell import flags_of, launched, read_text, why_nothing

COMMANDS: Mapping[str, str] = {"ppo_ray": "train", "sft": "sft", "dpo": "dpo", "rm": "reward-model"}
"""OpenRLHF's trainer -> the command of ours that takes the configuration."""
_ALGORITHMS = {
    "gae": "ppo", "reinforce": "reinforce_plus_plus", "rloo": "rloo", "group_norm": "grpo", "dr_grpo": "dr_grpo",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}  # fmt: skip
_COMPARES_SIBLINGS = ("rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline")
_CORRECTIONS = {
    "tis": {"type": "truncate"}, "icepop": {"type": "mask"}, "seq-mask-tis": {"type": "mask", "level": "geometric"},
}  # fmt: skip
_TRAINER = re.compile(r"openrlhf[./]cli[./]train_(\w+?)(?:\.py)?")
_BEST = "ckpt.best_metric_key"


def read(path: Path, arguments: Sequence[str] = (), command: int | None = None) -> ForeignConfig:
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
    return ForeignConfig(method, {_newer(name, method): value for name, value in given.items()}, launch.notes)


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


def convert(source: ForeignConfig) -> Imported:
    """The configuration of ours, with what became of every argument."""
    keys, made = Keys(source.values, table(source.method)), Imported({}, notes=list(source.notes))
    online = source.method == "ppo_ray"
    if online:
        made.tree["algorithm"] = _groups(keys, made)
    keys.take_rows(made)
    tree = made.tree
    tree.setdefault("data", {}).update(_files(keys, made))
    for key in ("ds.bf16", "train.micro_batch_size"):
        keys.take(key)
    if tokens := keys.take("train.max_tokens_per_gpu"):
        tree["training"]["tokens_per_micro_batch"] = tokens * tree["training"].get("context_parallel", 1)
    _schedule(keys, "actor." if online else "", "training.optimizer", tree["training"]["optimizer"], made)
    if online:
        _online(keys, tree, made)
    else:
        tree["data"]["on_bad_row"] = "skip"
        made.notes.append(f"a row of more than {tree['data']['max_tokens']} tokens is skipped here; OpenRLHF cuts it")
    unmeasured = _best(keys, made)
    tree |= _tracking(keys)
    sort_the_rest(keys, made, {**WITHOUT_EFFECT, **unmeasured}, HARMLESS)
    return made


def _files(keys: Keys, made: Imported) -> dict[str, Any]:
    names = [keys.take(key) for key in ("data.prompt_dataset", "data.dataset")]
    splits = [keys.take(key) for key in ("data.prompt_split", "data.dataset_split")]
    held_out, split = keys.take("eval.dataset"), keys.take("eval.split", "train")
    data = {"train_files": [_rows_of(next(filter(None, names), None), next(filter(None, splits), "train"), made)]}
    if held_out:
        data["val_files"] = [_rows_of(held_out, split, made)]
    if most := keys.take("data.max_samples"):
        made.notes.append(f"data.max_samples={most}: rows are not cut off here; write as many as there should be")
    return data


def _rows_of(name: Any, split: str, made: Imported) -> str:
    """The data set's id on the Hub, or a stand-in for local files."""
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return f"hub:{name}[{split}]"
    made.notes.append(f"data: put {name or 'the rows'} in the place of ROWS.parquet, as parquet or JSON lines")
    return "ROWS.parquet"


def _groups(keys: Keys, made: Imported) -> dict[str, Any]:
    """The algorithm, how many siblings it compares, and in how many optimizer steps."""
    name = keys.take("algo.advantage.estimator", "gae")
    kind = known(_ALGORITHMS, name, "algo.advantage.estimator", made)
    group = int_or_zero(keys.take("rollout.n_samples_per_prompt", 1))
    if group == 1 and kind in _COMPARES_SIBLINGS:
        group = 8
        made.notes.append(f"{name} compares siblings, and one sample a prompt has none; 8 stand there: choose")
    prompts = int_or_zero(keys.take("rollout.batch_size", 1024))
    batch = int_or_zero(keys.take("train.batch_size", 128)) or 1
    algorithm: dict[str, Any] = {"type": kind, "group_size": group}
    put(algorithm, "minibatches", min(prompts, max(1, ceil(prompts * group / batch))), unless=1)
    return algorithm


def _online(keys: Keys, tree: dict[str, Any], made: Imported) -> None:
    tree["data"]["prompts_per_step"] = int_or_zero(keys.take("rollout.batch_size", 1024))
    _algorithm(keys, tree["algorithm"], made)
    if tree["algorithm"]["type"] == "ppo" and "lora" in tree["model"]:
        tree["model"]["critic_lora"] = _of_the_critic(keys, tree["model"]["lora"])
    longest = int_or_zero(keys.take("data.max_len", LONGEST["ppo_ray"]))
    prompt, answer = int_or_zero(keys.take("data.prompt_max_len")), int_or_zero(keys.take("rollout.max_new_tokens"))
    if not answer and not prompt:
        answer = prompt = longest // 2
        made.notes.append(f"data.max_len={longest} is of prompt and answer together; each has half of it here: choose")
    tree["data"]["max_prompt_tokens"] = prompt or max(1, longest - answer)
    opening = {"type": "vllm", "max_response_tokens": answer or max(1, longest - prompt)}
    tree["generation"] = opening | tree.get("generation", {}) | _validation(keys)
    if path := keys.take("reward.remote_url"):
        tree["reward"] = {"functions": ["REWARDS.py:score"]}
        made.notes.append(
            f"reward.functions: {path} has reward_func(queries, prompts, labels) or is a server; write a function of "
            "`completions` and the columns it needs (docs/rewards.md)"
        )
    if keys.take("train.async_enable"):
        made.notes.append(
            "train.async_enable: trainer.max_staleness: 1 is written; more is how far generation runs ahead"
        )
    if keys.values.get("train.async_enable"):
        tree["trainer"]["max_staleness"] = 1
    nodes, each = int_or_zero(keys.take("actor.num_nodes", 1)), int_or_zero(keys.take("actor.num_gpus_per_node", 8))
    if nodes > 1:
        tree |= {"cluster": {"type": "ray"}, "placement": {"pools": {"main": [each] * nodes}}}
    else:
        tree["cluster"] = {"ranks": each}


def _of_the_critic(keys: Keys, lora: Mapping[str, Any]) -> dict[str, Any]:
    """OpenRLHF's critic has adapters where its policy does."""
    for name in lora:
        keys.take(f"ds.lora.{name}", ours=f"model.lora.{name} and model.critic_lora.{name}")
    return {**lora}


def _algorithm(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    if keys.take("algo.advantage.no_std_norm") and algorithm["type"] == "grpo":
        algorithm["normalize_by_std"] = False
    if algorithm["type"] not in ("ppo", "reinforce_plus_plus"):
        keys.take("algo.advantage.gamma", ours="algorithm.type")
    if algorithm["type"] == "ppo":
        optimizer = algorithm["critic_optimizer"]
        _schedule(keys, "critic.", "algorithm.critic_optimizer", optimizer, made)
    both = keys.take("actor.eps_clip", 0.2)
    low, high = keys.take("actor.eps_clip_low_high", [both, both])
    algorithm["loss"] |= {"clip_ratio_low": low, "clip_ratio_high": high}
    if kl := _kl(keys):
        algorithm["kl"] = kl
    if keys.take("algo.advantage.is_correction_enable"):
        algorithm["rollout_correction"] = _correction(keys, made)
    _rewards(keys, algorithm, made)


def _kl(keys: Keys) -> dict[str, Any]:
    coefficient, in_loss = keys.take("algo.kl.init_coef", 0.01), keys.take("algo.kl.use_loss", False)
    estimator = keys.take("algo.kl.estimator", "k1")
    target, horizon = keys.take("algo.kl.target"), keys.take("algo.kl.horizon", 10_000)
    if not coefficient:
        return {}
    kl = {"place": "loss" if in_loss else "reward", "coefficient": coefficient, "estimator": estimator}
    if target and not in_loss:
        kl |= {"control": "adaptive", "target": target, "horizon_trajectories": horizon}
    return kl


def _correction(keys: Keys, made: Imported) -> dict[str, Any]:
    kinds = {name: name for name in _CORRECTIONS}
    given = keys.take("algo.advantage.is_correction_type", "tis")
    kind = known(kinds, given, "algo.advantage.is_correction_type", made)
    bounds = keys.take("algo.advantage.is_correction_threshold", [0.5, 5.0])
    correction: dict[str, Any] = {**_CORRECTIONS[kind], "upper": bounds[1]}
    if correction["type"] == "mask":
        correction["lower"] = bounds[0]
    else:
        made.notes.append(f"rollout_correction: weights below {bounds[0]} are not raised to it here, as OpenRLHF's are")
    return correction


def _rewards(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    if bounds := keys.take("reward.clip_range"):
        algorithm["clip_rewards"] = bounds[1]
    elif "reward_model_path" in made.tree["model"]:
        algorithm["clip_rewards"] = 10
    most = int_or_zero(keys.values.get("rollout.max_new_tokens"))
    buffer, factor = keys.take("reward.overlong_buffer_len"), keys.take("reward.overlong_penalty_factor", 1)
    if buffer and most:
        algorithm["overlong_buffer"] = round(buffer / most, 6)
        if factor != 1:
            made.notes.append(f"the overlong punishment is 1.0 at most here; OpenRLHF's factor was {factor}")


def _validation(keys: Keys) -> dict[str, Any]:
    samples, temperature = keys.take("eval.n_samples_per_prompt"), keys.take("eval.temperature")
    if not samples and not temperature:
        return {}
    return {"eval": {"temperature": 0.6 if temperature is None else temperature, "samples": samples or 4}}


def _schedule(keys: Keys, theirs: str, ours: str, optimizer: dict[str, Any], made: Imported) -> None:
    least = keys.take(f"{theirs}min_lr_ratio", 0.1)
    if keys.take(f"{theirs}lr_scheduler", "cosine_with_min_lr") == "cosine_with_min_lr":
        optimizer["min_lr_ratio"] = least
    share = keys.take(f"{theirs}lr_warmup_ratio", 0.03)
    made.notes.append(f"{ours}.warmup_steps: OpenRLHF warms up over {share:g} of the run; give a number of steps")


def _best(keys: Keys, made: Imported) -> dict[str, str]:
    """`trainer.best_metric`, where answers are validated; else why the key does nothing. OpenRLHF's
    `eval_<source>_pass1` is the mean reward; where the key is empty it takes the first of these."""
    key, tree = keys.values.get(_BEST), made.tree
    if not (tree["trainer"].get("eval_every") and tree["data"].get("val_files")):
        return {_BEST: "OpenRLHF does not evaluate without eval.steps and eval.dataset"}
    named = re.fullmatch("eval_(.+)_pass1", str(key))
    if key is None or not (named or key == ""):
        return {}
    keys.take(_BEST)
    source = named[1] if named else source_of([], made)
    samples = tree.get("generation", {}).get("eval", {}).get("samples", 1)
    tree["trainer"]["best_metric"] = reward_metric(source, samples)
    if source != DEFAULT:
        made.notes.append(f"trainer.best_metric: {source} is what the column data_source is to hold, theirs datasource")
    return {}


def _tracking(keys: Keys) -> dict[str, Any]:
    tracking: dict[str, Any] = {}
    project = keys.take("logger.wandb.project")
    if "logger.wandb.key" in keys.values:
        tracking["wandb"] = {"project": project} if project else True
    if keys.take("logger.tensorboard_dir"):
        tracking["tensorboard"] = True
    return {"tracking": tracking} if tracking else {}
