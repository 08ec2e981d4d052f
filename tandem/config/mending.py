"""What a configuration was probably meant to be, so that the mistakes behind a misspelt name are found with it.

generation: {type: vlm, …}      ->  generation: {type: vllm, …}
trianer: {steps: many}          ->  trainer: {steps: many}
data: {val_flies: [a.jsonl]}    ->  data: {val_files: [a.jsonl]}
training:                       ->  training: {}                    all of its keys are commented out, say
(no trainer)                    ->  trainer: {}                     whose own required keys are then told
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import reduce
from typing import Any, cast

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tandem.config import verl_keys
from tandem.config.base import Refused, Section
from tandem.config.keys import keys_of, keys_of_like_meaning, meant_key, meant_type
from tandem.config.sections import sections_at
from tandem.config.tree import Tree

_NO_SECTION = ("model_type", "model_attributes_type", "union_tag_invalid", "union_tag_not_found")


def hides_others(error: ErrorDetails) -> bool:
    """A name is at fault, so that what stands behind it was not validated."""
    return error["type"] == "extra_forbidden" or (
        error["type"] == "union_tag_invalid" and isinstance(error["input"], dict)
    )


def mend(kind: type[Tree], tree: dict[str, Any], errors: Sequence[ErrorDetails]) -> dict[str, Any] | None:
    """The tree with what was probably meant; None where nothing can be mended, and for errors of other kinds.

    An unknown key goes to the place of the one that it was meant to be, where that is not given. Where it may be meant
    for others, the defaults of those are not to be trusted: they are refused.
    """
    mended = deepcopy(tree)
    misspelt_first = sorted(errors, key=lambda error: not hides_others(error))  # their sections are not missing
    changed = [_mend(kind, mended, error) for error in misspelt_first]
    return mended if any(changed) else None


def _mend(kind: type[Tree], tree: dict[str, Any], error: ErrorDetails) -> bool:
    *parents, name = keys_of(error, kind) or [""]
    whole: Any = tree
    try:
        section = reduce(lambda inner, key: inner[key], parents, whole)
    except (KeyError, IndexError, TypeError):
        return False
    if error["type"] == "extra_forbidden":
        return name in section and _rename(kind, tree, section, _without_places(parents), name)
    if error["type"] == "union_tag_invalid" and isinstance(error["input"], dict):
        meant = meant_type(error)
        if meant is not None:
            section[name]["type"] = meant
        return meant is not None
    empty = error["type"] == "missing" or (error["type"] in _NO_SECTION and error["input"] is None)
    if empty and isinstance(name, str) and section.get(name) is None and _is_section(kind, [*parents, name]):
        section[name] = {}
        return True
    return False


def _rename(kind: type[Tree], tree: dict[str, Any], section: dict[Any, Any], parent: str, name: Any) -> bool:
    """Moves the value of an unknown key to the key that was meant. True."""
    key = f"{parent}.{name}" if parent else str(name)
    value = section.pop(name)
    meant = None if verl_keys.describe(key, value) else meant_key(kind, key)
    if isinstance(value, Refused) or meant == key:  # of another type of the section
        return True
    if meant is not None and meant.rpartition(".")[0] == parent:
        section.setdefault(meant.rpartition(".")[2], value)
    others = [other for leaf in verl_keys.leaves(key, value) for other in keys_of_like_meaning(kind, leaf)]
    for other in {*keys_of_like_meaning(kind, key), *others, *([meant] if meant else [])} - {key}:
        _distrust(tree, other)
    return True


def _without_places(keys: Sequence[str | int]) -> str:
    """Of a section in a list the key that all of the list have."""
    return ".".join(key for key in keys if isinstance(key, str))


def _distrust(tree: dict[str, Any], key: str) -> None:
    """Nothing is known of a key that is not given, in a section that is."""
    *parents, name = key.split(".")
    section: Any = tree
    for parent in parents:
        section = cast(dict[str, Any], section).get(parent) if isinstance(section, dict) else None
    if isinstance(section, dict):
        cast(dict[str, Any], section).setdefault(name, Refused())


def _is_section(kind: type[Tree], keys: Sequence[str | int]) -> bool:
    """Whether a section alone may stand at the keys."""
    sections: list[type[Section]] = [kind]
    fields: list[FieldInfo] = []
    for key in keys:
        if isinstance(key, str) and any(key in section.model_fields for section in sections):
            fields = [section.model_fields[key] for section in sections if key in section.model_fields]
            sections = [inner for field in fields for inner in sections_at(field)]
    return bool(sections)
