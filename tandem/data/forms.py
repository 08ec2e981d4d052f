"""Which framework's rows a data set's are, and what is read of them, in a line."""

from collections.abc import Iterable, Mapping
from typing import Any

_TRL = {
    "`messages`": "TRL's conversations: messages, whose assistant turns are learned",
    "`prompt` + `completion`": "TRL's prompts with completions: prompt, completion",
    "`prompt` + `chosen` + `rejected`": "TRL's preferences: prompt, chosen, rejected",
    "`chosen` + `rejected`": "TRL's preferences with implicit prompts: chosen, rejected",
    "`prompt` + `completion` + `label`": "TRL's unpaired preferences: prompt, completion, label",
    "`messages` + `label`": "conversations with a label: messages, label",
}
_READ_BY_ITSELF = ("prompt", "data_source", "reward_model", "ground_truth", "answer", "images", "image", "videos")


def forms(formats: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A phrase for each of the formats; `rows` are examples of them, where rows are kept."""
    kept = list(rows)
    return [*dict.fromkeys(_TRL[one] if one in _TRL else _asked(one, kept) for one in formats)]


def _asked(row_format: str, rows: list[Mapping[str, Any]]) -> str:
    """Of rows to ask."""
    verl = row_format == "verl"
    of_it = [row for row in rows if bool(row.get("reward_model")) == verl]
    has = dict.fromkeys(name for row in of_it for name, value in row.items() if value is not None)
    read = [name for name in ("prompt", "data_source") if name in has]
    inside = any((row.get("reward_model") or {}).get("ground_truth") is not None for row in of_it)
    truth = (
        ["reward_model.ground_truth"] if inside else [name for name in ("ground_truth", "answer") if name in has][:1]
    )
    read += [*truth, *(name for name in ("images", "image", "videos") if name in has)]
    others = [name for name in has if name not in _READ_BY_ITSELF]
    by_name = f"; by their names, if a reward function asks for them: {', '.join(others)}" if others else ""
    return f"{'verl' if verl else 'TRL'}'s: {', '.join(read)}{by_name}"
