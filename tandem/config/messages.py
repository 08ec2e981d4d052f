"""What is said of a validation's errors: a line for each mistake, with its key, the value and the mend."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from tandem.config import verl_keys
from tandem.config.base import BROKEN_RULES, Refused, Section
from tandem.config.keys import keys_of, known_keys, meant_key, meant_type, types_with
from tandem.config.tree import Tree

_SHOWN = 200
"""Letters of a value that a message repeats."""


def describe_all(errors: Sequence[ErrorDetails], kind: type[Tree]) -> list[str]:
    """In the order of the tree. Of a value that may be of several kinds, and is of none, the reasons are one message;
    broken rules are told by `valid_part.broken_rules`."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        if error["type"] != BROKEN_RULES:
            by_key.setdefault(dotted(error, kind), []).append(error)
    return [problem for key, some in by_key.items() for problem in dict.fromkeys(_describe(key, some, kind))]


def dotted(error: ErrorDetails, kind: type[Tree]) -> str:
    """The key of the value at fault."""
    return ".".join(map(str, keys_of(error, kind)))


def _describe(key: str, errors: Sequence[ErrorDetails], kind: type[Tree]) -> list[str]:
    error = errors[0]
    value: object = error["input"]
    if isinstance(value, Refused):
        return [f"{key}: {value.problem}"] if value.problem else []
    if error["type"] == "extra_forbidden":
        return _describe_unknown(key, value, kind)
    if error["type"] == "union_tag_not_found":
        return [f"{key}.type: field required"]
    if error["type"] == "union_tag_invalid" and isinstance(value, dict):
        context, meant = error.get("ctx", {}), meant_type(error)
        mend = f"; did you mean {meant!r}?" if meant else ""
        return [f"{key}.type: {context['tag']!r} is unknown; known are {context['expected_tags']}{mend}"]
    if error["type"] in ("model_type", "model_attributes_type", "union_tag_invalid"):
        return [f"{key}: is a section of keys and values, not {_shown(value)}"]
    first, *others = dict.fromkeys(map(_reason, errors))
    reasons = [first, *(other.removeprefix("input should be ") for other in others)]
    given = "" if isinstance(value, dict | Section) else f", not {_shown(value)}"
    return [f"{key}: {' or '.join(reasons)}{given}"]


def _reason(error: ErrorDetails) -> str:
    if error["type"] in ("list_type", "tuple_type") and isinstance(error["input"], str | int | float):
        return f"input should be a list, as [{error['input']}]"
    if error["type"] == "path_type":
        return "input should be a path"
    message = error["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _describe_unknown(key: str, value: Any, kind: type[Tree]) -> list[str]:
    """With the mend: what verl's key is here, a type that has the key, the key that was meant, those that there are."""
    if key in kind.NOT_READ:
        return [f"{key}: only training reads this section; leave it out"]
    if of_verl := verl_keys.describe(key, value):
        return of_verl
    parent = key.rpartition(".")[0]
    if types := types_with(kind, key):
        return [f"{key}: unknown key; it is one of {parent}.type: {' or '.join(types)}"]
    if meant := meant_key(kind, key):
        return [f"{key}: unknown key; did you mean {meant}?"]
    siblings = [other.rpartition(".")[2] for other in known_keys(kind, key) if other.rpartition(".")[0] == parent]
    if parent and 0 < len(siblings) < 9:
        return [f"{key}: unknown key; {parent} has {', '.join(siblings)}"]
    return [f"{key}: unknown key"]
