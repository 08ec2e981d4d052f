"""Dotted keys of a configuration: all there are, those of a validation's error, and which one was probably meant."""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tandem.config import verl_keys
from tandem.config.base import Section
from tandem.config.sections import sections_at

_ANY_NAME = "<name>"
"""In the place of what users call sections."""
_OF_OTHER_TRAINERS = {
    "n": "algorithm.group_size",
    "num_generations": "algorithm.group_size",
    "learning_rate": "training.optimizer.lr",
    "max_completion_length": "generation.max_response_tokens",
    "max_new_tokens": "generation.max_response_tokens",
}
"""What verl, TRL and transformers call a key, wherever it is written."""
_PLAIN = ("bool", "constrained-int", "constrained-float", "constrained-str", "float", "int", "str")
"""What pydantic calls kinds of plain values. No key of ours, nor of a dict of plain values, is named so."""


def keys_of(error: ErrorDetails, kind: type[Section]) -> list[str | int]:
    """The keys that lead to the value at fault. Behind a key at which several kinds of sections may stand comes the one
    that was chosen, which may be named as a key is."""
    keys: list[str | int] = []
    sections: list[type[Section]] = [kind]
    chosen, tags = True, _tags()
    for part in error["loc"]:
        if not chosen and part in tags:
            chosen = part != "built_in"  # by its name, which comes next
        elif not sections and part in _PLAIN and keys:
            continue  # of several plain kinds the one that was tried
        elif "[" not in str(part):
            keys.append(part)
            if isinstance(part, int):
                continue
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
            sections = [inner for field in fields for inner in sections_at(field)]
            chosen = all(isinstance(one.annotation, type) and len(sections_at(one)) < 2 for one in fields)
    return keys


def _tags() -> set[str]:
    """What pydantic puts into the place of an error besides keys: after a validation, for which every kind of section
    is there."""
    return {"built_in", "own", "reference", "switch", "with_options", *_union_tags(Section)}


def _union_tags(kind: type[Section]) -> Iterator[str]:
    if "type" in kind.model_fields:
        yield from get_args(kind.model_fields["type"].annotation)
    for subclass in kind.__subclasses__():
        yield from _union_tags(subclass)


def section_of(field: FieldInfo, given: Any) -> type[Section] | None:
    """The section that a value was meant to be: of several, the one with its type, a class of the user's included."""
    if not isinstance(given, Mapping):
        return None
    wanted = cast(Mapping[str, Any], given).get("type", _default_type(field))
    for section in sections_at(field):
        types = section.model_fields.get("type")
        if types is None or wanted in get_args(types.annotation) or (wanted is None and not types.is_required()):
            return section
        if get_origin(types.annotation) is not Literal and ":" in str(wanted):
            return section
    return None


def _default_type(field: FieldInfo) -> Any:
    """The type of the section that stands at a key by default."""
    default: Any = field.default
    return cast(dict[str, Any], default).get("type") if isinstance(default, dict) else getattr(default, "type", None)


def holds_sections_by_name(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def meant_type(error: ErrorDetails) -> str | None:
    """The known type whose name is close to an unknown one, best the same letters in another order."""
    context = error.get("ctx", {})
    known = re.findall(r"'([^']+)'", context["expected_tags"])
    swapped = [name for name in known if sorted(name) == sorted(context["tag"])]
    return next(iter(swapped or difflib.get_close_matches(context["tag"], known, 1)), None)


def meant_key(kind: type[Section], key: str) -> str | None:
    """The key that an unknown one was probably meant to be: one of like name in its section, one of the same name in
    another, or what verl and TRL call so."""
    parent, _, name = key.rpartition(".")
    known = known_keys(kind, key)
    siblings = [other for other in known if other.rpartition(".")[0] == parent]
    if (meant := _OF_OTHER_TRAINERS.get(name)) in known:
        return meant
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    close = (
        difflib.get_close_matches(key, siblings, 1, 0.9)
        or difflib.get_close_matches(key, namesakes, 1, 0)
        or difflib.get_close_matches(key, known, 1, 0.8)
    )
    return close[0] if close else None


def keys_of_like_meaning(kind: type[Section], key: str) -> list[str]:
    """Keys whose value may be what an unknown one gives: those of like name in its section, and verl's counterpart."""
    parent, _, name = key.rpartition(".")
    names = [other.rpartition(".")[2] for other in known_keys(kind, key) if other.rpartition(".")[0] == parent]
    like = [f"{parent}.{close}" if parent else close for close in difflib.get_close_matches(name, names)]
    counterpart = re.match(r"[a-z_]+(\.[a-z_]+)+", verl_keys.COUNTERPARTS.get(key, ""))
    return [*like, counterpart[0]] if counterpart else like


def known_keys(kind: type[Section], beside: str) -> list[str]:
    """Every key, with the names that sections have in the key `beside`, where theirs begins as that does."""
    return sorted({_with_names(other, beside) for other in every_key(kind)})


def _with_names(key: str, given: str) -> str:
    own, theirs = key.split("."), given.split(".")
    for place, (part, other) in enumerate(zip(own, theirs, strict=False)):
        if part == _ANY_NAME:
            own[place] = other
        elif part != other:
            break
    return ".".join(own)


def types_with(kind: type[Section], key: str) -> list[str]:
    """The types of a section that have the key, which the chosen type has not."""
    *parents, name = key.split(".")
    sections: list[type[Section]] = [kind]
    for parent in parents:
        fields = [section.model_fields[parent] for section in sections if parent in section.model_fields]
        sections = [inner for field in fields for inner in sections_at(field)]
    having = [section for section in sections if name in section.model_fields and "type" in section.model_fields]
    return sorted({tag for section in having for tag in get_args(section.model_fields["type"].annotation)})


def every_key(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a section and of every section in it, whichever alternative is chosen. Sections that users name
    are called `_ANY_NAME`."""
    for name, field in section.model_fields.items():
        yield prefix + name
        below = f"{prefix}{name}.{_ANY_NAME}." if holds_sections_by_name(field) else f"{prefix}{name}."
        for inner in sections_at(field):
            yield from every_key(inner, below)
