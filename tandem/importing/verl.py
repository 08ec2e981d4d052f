"""What a program of verl was told -> a configuration of ours, and what became of each of its keys.

What one key alone says is a row of `tandem/config/verl_keys.py`; here is what takes several. Only what verl was told is
read, and those of its defaults that differ from ours; facts about them are from verl's published configuration files.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from tandem.config.counterparts import int_or_zero, list_of, listed, parsed
from tandem.config.verl_keys import KEYS, OVERLONG
from tandem.importing.outcome import ForeignConfig, Imported, Keys, at, known, put, sort_the_rest
from tandem.importing.verl_ahead import apart, prompts_of_a_fully_asynchronous_step, runs_ahead
from tandem.importing.verl_distillation import distilled
from tandem.importing.verl_sft import supervised
from tandem.importing.verl_tables import HARMLESS, WITHOUT_EFFECT
from tandem.importing.verl_trainer import tracked, trainer_of

COMMANDS: Mapping[str, str] = {"ppo": "train", "one_step_off": "train", "fully_async": "train", "sft": "sft"}
"""What a program of verl does -> the command of ours that takes the configuration."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_ESTIMATORS |= {"kl+": "k1+", "k1+": "k1+", "low_var_kl+": "k3+", "k3+": "k3+"}
_ALGORITHMS = {
    "gae": "ppo", "grpo": "grpo", "reinforce_plus_plus": "reinforce_plus_plus", "remax": "remax", "rloo": "rloo",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "opo": "opo", "gpg": "gpg",
    "optimal_token_baseline": "otb", "gdpo": "gdpo",
}  # fmt: skip
_COMPARES_SIBLINGS = ("grpo", "rloo", "opo", "gpg", "otb", "gdpo", "reinforce_plus_plus_baseline")
_CORRECTION = "algorithm.rollout_correction."
_LEAST_TOKENS = 4096
"""Of a micro-batch, where verl counts rows."""


def convert(source: ForeignConfig) -> Imported:
    """The configuration of ours, with what became of every key of verl's."""
    if source.method == "sft":
        return supervised(source)
    keys, made = Keys(source.values, KEYS), Imported({}, notes=list(source.notes))
    tree = made.tree
    prompts = keys.take("data.train_batch_size", 1024)
    if source.method == "fully_async":
        prompts = prompts_of_a_fully_asynchronous_step(keys)
    tree["algorithm"] = _groups(keys, prompts, made)
    tree["training"] = {"type": "megatron" if _on_megatron(keys) else "fsdp"}
    keys.take_rows(made)
    tree["data"]["prompts_per_step"] = prompts
    _models(keys, tree["model"])
    _algorithm(keys, tree["algorithm"], made)
    _validation(keys, tree)
    _training(keys, tree, made)
    tree |= _conversation(keys, made)
    tree |= _reward(keys)
    tree |= _processes(keys) if source.method == "ppo" else apart(keys)
    tree["trainer"] = trainer_of(keys, epochs=30) | tree.get("trainer", {})
    if source.method != "ppo":
        runs_ahead(source.method, keys, tree, made)
    tree |= tracked(keys)
    sort_the_rest(keys, made, WITHOUT_EFFECT, HARMLESS)
    return made


def _models(keys: Keys, model: dict[str, Any]) -> None:
    if model.get("critic_path") == model["path"]:
        del model["critic_path"]
    for section, path_key in (("reward_model", "model.path"), ("reward.reward_model", "model_path")):
        if keys.values.get(f"{section}.enable") and (path := keys.take(f"{section}.{path_key}")):
            keys.take(f"{section}.enable")
            model["reward_model_path"] = path


def _groups(keys: Keys, prompts: Any, made: Imported) -> dict[str, Any]:
    """The algorithm, how many siblings it compares, and in how many optimizer steps."""
    estimator = keys.take("algorithm.adv_estimator", "gae")
    taught = keys.values.get("distillation.enabled") is True
    kind = "on_policy_distillation" if taught else known(_ALGORITHMS, estimator, "algorithm.adv_estimator", made)
    group = keys.take(f"{_ROLLOUT}n", 1)
    if group == 1 and kind in _COMPARES_SIBLINGS:
        group = 8
        made.notes.append(f"{estimator} compares siblings, and one sample a prompt has none; 8 stand there: choose")
    return {"type": kind, "group_size": group, **_minibatches(keys, prompts, made)}


def _algorithm(keys: Keys, algorithm: dict[str, Any], made: Imported) -> None:
    _warm_up(keys, f"{_ACTOR}optim.", "training.optimizer", made)
    if algorithm["type"] == "ppo":
        _warm_up(keys, "critic.optim.", "algorithm.critic_optimizer", made)
    _clip_range(keys, algorithm["loss"])
    if level := keys.take(f"{_CORRECTION}rollout_is"):
        algorithm["rollout_correction"] = _correction(level, keys.take(f"{_CORRECTION}rollout_is_threshold", 2.0))
    if kl := _kl(keys, made):
        algorithm["kl"] = kl
    if algorithm["type"] == "on_policy_distillation":
        algorithm |= distilled(keys, made.tree, made)
    if algorithm["type"] == "gdpo":
        algorithm["rewards"] = _rewards_of_gdpo(keys, made)
    if keys.take("algorithm.filter_groups.enable"):
        algorithm["resample_rounds"] = keys.take("algorithm.filter_groups.max_num_gen_batches", 10) or 100
    _overlong(keys, algorithm, made)


def _minibatches(keys: Keys, prompts: Any, made: Imported) -> dict[str, int]:
    minibatch = keys.take(f"{_ACTOR}ppo_mini_batch_size", 256)
    if not isinstance(prompts, int) or not isinstance(minibatch, int) or not 0 < minibatch < prompts:
        return {}
    count = ceil(prompts / minibatch)
    if prompts % minibatch:
        made.notes.append(f"{prompts} prompts in optimizer steps of {minibatch} become {count} equal ones")
    return {"minibatches": count}


def _warm_up(keys: Keys, theirs: str, ours: str, made: Imported) -> None:
    """A share of the run's steps is no number of them."""
    ratio = keys.take(f"{theirs}lr_warmup_steps_ratio")
    if ratio and at(made.tree, f"{ours}.warmup_steps") is None:
        made.notes.append(
            f"{theirs}lr_warmup_steps_ratio {ratio}: give {ours}.warmup_steps, a number of optimizer steps"
        )


def _clip_range(keys: Keys, loss: dict[str, Any]) -> None:
    both = keys.take(f"{_ACTOR}clip_ratio", 0.2)
    for end in ("clip_ratio_low", "clip_ratio_high"):
        ratio = keys.take(f"{_ACTOR}{end}", both)
        if loss["type"] not in ("reinforce", "sapo", "gmpo"):
            put(loss, end, ratio, unless=0.2 if loss["type"] == "clip" else None)


def _correction(level: Any, bounds: Any) -> dict[str, Any]:
    """Weights truncated at a number, or, between `lower_upper`, masked."""
    lower, apart, upper = str(bounds).partition("_")
    if apart:
        return {"type": "mask", "level": level, "lower": parsed(lower), "upper": parsed(upper)}
    return {"type": "truncate", "level": level, "upper": parsed(str(bounds))}


def _rewards_of_gdpo(keys: Keys, made: Imported) -> dict[str, float]:
    names = [str(name) for name in listed(list_of(keys.take("algorithm.gdpo_reward_keys", [])))]
    if not names:
        made.notes.append("algorithm.rewards: name the metrics of the reward function that are normalised apart")
    weights = listed(list_of(keys.take("algorithm.gdpo_reward_weights", [])))
    return dict(zip(names or ["reward"], [*weights, *[1.0] * max(len(names), 1)], strict=False))


def _kl(keys: Keys, made: Imported) -> dict[str, Any]:
    in_loss, in_reward = keys.take(f"{_ACTOR}use_kl_loss", False), keys.take("algorithm.use_kl_in_reward", False)
    of_loss, of_reward = keys.take(f"{_ACTOR}kl_loss_coef", 0.001), keys.take("algorithm.kl_ctrl.kl_coef", 0.001)
    kind, penalty = keys.take(f"{_ACTOR}kl_loss_type", "low_var_kl"), keys.take("algorithm.kl_penalty", "kl")
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
    most = keys.values.get("data.max_response_length", 512)
    for section in OVERLONG:
        tokens, factor = keys.take(f"{section}.len"), keys.take(f"{section}.penalty_factor", 1.0)
        keys.take(f"{section}.log")
        if keys.take(f"{section}.enable") and tokens and isinstance(most, int):
            algorithm["overlong_buffer"] = round(tokens / most, 6)
            if factor != 1.0:
                made.notes.append(f"the overlong punishment is 1.0 at most here; verl's penalty_factor was {factor}")


def _validation(keys: Keys, tree: dict[str, Any]) -> None:
    """verl's answers of validation are greedy, unless it is told to sample."""
    sampled = keys.take(f"{_ROLLOUT}val_kwargs.do_sample", False)
    temperature = keys.take(f"{_ROLLOUT}val_kwargs.temperature", 1.0)
    put(tree, "generation.eval.temperature", temperature if sampled else 0, unless=0)


def _training(keys: Keys, tree: Mapping[str, Any], made: Imported) -> None:
    for key in (f"{_ACTOR}strategy", "model_engine"):
        keys.take(key)
    training = tree["training"]
    if training["type"] == "fsdp":
        offloads = [keys.take(f"{_ACTOR}fsdp_config.{what}_offload") for what in ("param", "optimizer")]
        if all(offload is True for offload in offloads):
            training["cpu_offload"] = True
        elif offloads[1] is True:
            training["optimizer_offload"] = True
    elif training.get("tensor_parallel", 1) != 1 and training.get("expert_parallel", 1) != 1:
        training["sequence_parallel"] = True
    context = keys.take(f"{_ACTOR}fsdp_config.ulysses_sequence_parallel_size", 1)
    context = keys.take(f"{_ACTOR}ulysses_sequence_parallel_size", context)
    tokens, rows = keys.take(f"{_ACTOR}ppo_max_token_len_per_gpu"), keys.take(f"{_ACTOR}ppo_micro_batch_size_per_gpu")
    keys.take(f"{_ACTOR}ppo_micro_batch_size")
    longest = int_or_zero(tree["data"]["max_prompt_tokens"]) + int_or_zero(tree["generation"]["max_response_tokens"])
    if keys.values.get(f"{_ACTOR}use_dynamic_bsz", False) and int_or_zero(tokens):
        training["tokens_per_micro_batch"] = tokens * int_or_zero(context or 1)
    elif int_or_zero(rows) and longest:
        training["tokens_per_micro_batch"] = max(rows * longest, _LEAST_TOKENS)
        made.notes.append(f"{rows} rows a micro-batch of {longest} tokens at most are {rows * longest} tokens")


def _on_megatron(keys: Keys) -> bool:
    told = (keys.values.get(key) for key in (f"{_ACTOR}strategy", "model_engine"))
    return "megatron" in told or any(key.startswith(f"{_ACTOR}megatron.") for key in keys.values)


def _conversation(keys: Keys, made: Imported) -> dict[str, Any]:
    multi_turn = f"{_ROLLOUT}multi_turn."
    tools, user = keys.take(f"{multi_turn}tool_config_path"), keys.take(f"{multi_turn}interaction_config_path")
    turns = keys.take(f"{multi_turn}max_turns", keys.take(f"{multi_turn}max_assistant_turns"))
    keys.take(f"{multi_turn}enable")
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
    path, name = keys.take(f"{section}.path"), keys.take(f"{section}.name", "compute_score")
    if not path:
        return {}
    arguments = {
        key.rpartition(".")[2]: keys.take(key, ours="reward.functions")
        for key in keys.values
        if key.startswith(f"{section}.reward_kwargs.")
    }
    function = f"{path}:{name}"
    return {"reward": {"functions": [{"function": function, "arguments": arguments} if arguments else function]}}


def _processes(keys: Keys) -> dict[str, Any]:
    nodes, each = keys.take("trainer.nnodes", 1), keys.take("trainer.n_gpus_per_node", 8)
    if not isinstance(nodes, int) or not isinstance(each, int) or nodes == 1:
        return {"cluster": {"type": "local", "ranks": each if isinstance(each, int) else 8}}
    return {"cluster": {"type": "ray"}, "placement": {"pools": {"main": [each] * nodes}}}
