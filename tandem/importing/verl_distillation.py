"""The section `distillation` of verl: a teacher tells the log-probs of the student's answers."""

from collections.abc import Mapping
from typing import Any

from tandem.config.counterparts import int_or_zero
from tandem.importing.outcome import Imported, Keys

_LOSS = "distillation.distillation_loss."


def distilled(keys: Keys, tree: Mapping[str, Any], made: Imported) -> dict[str, Any]:
    """Keys of `algorithm`; the teacher becomes `model.teacher_path`."""
    keys.take("distillation.enabled")
    _teacher(keys, made)
    algorithm: dict[str, Any] = {}
    rewarded = keys.take(f"{_LOSS}use_task_rewards", keys.take(f"{_LOSS}use_policy_loss", True))
    if rewarded and int_or_zero(tree["algorithm"]["group_size"]) > 1:
        algorithm["reward_weight"] = 1.0
    elif rewarded:
        made.notes.append(
            "rewards are compared between siblings here, and one sample a prompt has none: they only count"
        )
    mode = str(keys.take(f"{_LOSS}loss_mode", "k3"))
    sampled = keys.take(f"{_LOSS}use_policy_gradient", False)
    likeliest = int_or_zero(keys.take(f"{_LOSS}topk", 32))
    if "topk" in mode and tree["training"]["type"] == "megatron":
        made.notes.append(f"{_LOSS}loss_mode={mode}: training.type: megatron compares sampled tokens alone here")
    elif "topk" in mode:
        algorithm["top_k"] = likeliest
        made.notes.append(
            f"{_LOSS}loss_mode={mode}: the KL here is that of the student against the teacher, over the teacher's "
            f"{likeliest} likeliest tokens and the rest taken as one (docs/algorithms/on_policy_distillation.md)"
        )
    elif not sampled or mode not in ("k1", "kl"):
        made.notes.append(
            f"{_LOSS}loss_mode={mode}: the log-ratio of the sampled token is the advantage here; algorithm.top_k "
            "compares distributions instead: choose"
        )
    return algorithm


def _teacher(keys: Keys, made: Imported) -> None:
    paths = [key for key in keys.values if key.startswith("distillation.teacher_model") and key.endswith("model_path")]
    found = [keys.take(key, ours="model.teacher_path") for key in paths]
    if len(paths) > 1:
        made.notes.append(
            f"there is one teacher here, and {len(paths)} are named: {', '.join(map(str, found))}: choose"
        )
    made.tree["model"]["teacher_path"] = next(iter(found), None) or "TEACHER_DIRECTORY"
