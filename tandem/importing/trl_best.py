"""`load_best_model_at_end`, `metric_for_best_model`, `greater_is_better` -> `trainer.best_metric`, `trainer.best_mode`.

As transformers has them: the metric, with or without `eval_`, is of an evaluation, `loss` unless it is named, and the
highest value is best unless its name ends with `loss`. A checkpoint is best by a metric that is named, too, where the
model is not loaded at the end.
"""

import re
from collections.abc import Mapping
from typing import Any

from tandem.importing.import_best import reward_metric, source_of
from tandem.importing.outcome import Imported, Keys, is_unknown

KEYS = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
_LOSS = {"loss": "val/loss"}
_PAIRS = {**_LOSS, "rewards/accuracies": "val/accuracy"}
_METRICS: Mapping[str, Mapping[str, str]] = {
    "sft": _LOSS,
    "dpo": {**_PAIRS, "rewards/margins": "val/margin"},
    "orpo": {**_PAIRS, "log_odds_chosen": "val/margin"},
    "kto": _LOSS,
    "reward": {**_LOSS, "accuracy": "val/accuracy", "margin": "val/margin"},
}
"""TRL's trainer -> metric of its evaluations, without `eval_` -> ours. KTO's `rewards/margins` compares the means of
good and bad answers, which nothing here does. Trainers that generate measure the reward."""


def best_keys(keys: Keys, method: str, tree: Mapping[str, Any], made: Imported) -> dict[str, Any]:
    """What of the section `trainer` says which checkpoint is kept as the best, where TRL evaluates."""
    theirs = _metric(keys)
    ours = None if theirs is None else _counterpart(theirs, method, tree, made)
    if theirs is None or ours is None:
        return {}
    if keys.values.get("load_best_model_at_end"):
        keys.take("load_best_model_at_end", ours="trainer.best_metric: checkpoints/best, beside the last weights")
    keys.take("metric_for_best_model")
    if keys.values.get("save_strategy") == "best":
        keys.take("save_strategy", ours="trainer.best_metric: a checkpoint whenever it improves")
    higher = keys.take("greater_is_better", not theirs.endswith("loss"))
    lowest_by_default = ours == "val/loss"
    mode = {} if higher is not lowest_by_default else {"best_mode": "max" if higher else "min"}
    return {"best_metric": ours, **mode}


def best_counterparts(keys: Keys, method: str, tree: Mapping[str, Any]) -> dict[str, str]:
    """What to write in the place of keys that could not be taken over."""
    if (theirs := _metric(keys)) is None:
        return {}
    of_rows = _METRICS.get(method)
    measured = of_rows.values() if of_rows else [reward_metric("<source>", _samples(tree))]
    none = f"a metric that there is here, as trainer.best_metric ({', '.join(measured)}); {theirs} is none"
    return {"metric_for_best_model": none, "load_best_model_at_end": none, "greater_is_better": "trainer.best_mode"}


def best_without_effect(keys: Keys, evaluates: bool) -> dict[str, str]:
    """Keys of these, and `save_strategy: best`, that do nothing in TRL."""
    if not evaluates:
        saves_best = ["save_strategy"] if keys.values.get("save_strategy") == "best" else []
        return dict.fromkeys([*KEYS, *saves_best], "TRL does not evaluate without eval_strategy: steps or epoch")
    loads, metric = (keys.values.get(key) for key in KEYS[:2])
    return {} if loads or metric else {"greater_is_better": "TRL compares nothing without metric_for_best_model"}


def _metric(keys: Keys) -> str | None:
    """What TRL compares checkpoints by, without `eval_`; None: by nothing, or by what only a run would tell."""
    loads, metric = (keys.values.get(key) for key in KEYS[:2])
    if is_unknown(metric) or (metric is None and loads is not True):
        return None
    return str(metric or "loss").removeprefix("eval_")


def _counterpart(theirs: str, method: str, tree: Mapping[str, Any], made: Imported) -> str | None:
    if method in _METRICS:
        return _METRICS[method].get(theirs)
    functions = tree.get("reward", {}).get("functions", [])
    alone = len(functions) == 1 and isinstance(functions[0], str) and "reward_model_path" not in tree["model"]
    if theirs == "reward" or (alone and re.fullmatch("rewards/.+/mean", theirs)):
        return reward_metric(source_of(tree["data"].get("val_files", []), made), _samples(tree))
    return None


def _samples(tree: Mapping[str, Any]) -> int:
    return tree["generation"].get("eval", {}).get("samples", 1)
