"""What becomes of another framework's configuration: ours, and a line about each of its keys."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from tandem import stored
from tandem.config import yaml12
from tandem.errors import UserError

UNKNOWN = re.compile(r"⟨[^⟩]*⟩")
"""What stands in a value that only a run of the source would tell (`unknown`)."""


@dataclass
class Source:
    """Whose trainer, and the arguments it was given."""

    method: str
    values: dict[str, Any]
    notes: list[str] = field(default_factory=list[str])
    """What is to be looked at, as the source is written."""


@dataclass
class Imported:
    """What became of a configuration."""

    tree: dict[str, Any]
    mapped: list[str] = field(default_factory=list[str])
    without_effect: list[str] = field(default_factory=list[str])
    unsupported: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


class Keys:
    """Keys of theirs with their values; those that are taken are remembered."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.taken: dict[str, str] = {}

    def take(self, key: str, ours: str, default: Any = None) -> Any:
        """The value, where it is given; it becomes `ours`."""
        value = self.values.get(key)
        if value is None or is_unknown(value):
            return default
        self.taken[key] = ours
        return value


def written(made: Imported, framework: str, source: str) -> str:
    """The configuration as a file, with what it lacks on top."""
    lacks = ["#   " + line.replace("\n", "\n#   ") for line in (*made.unsupported, *made.notes)]
    head = [f"# Made by `tandem import {framework}` from {source}.", *(["# To be looked at:", *lacks] if lacks else [])]
    return "\n".join([*head, yaml12.write(made.tree)])


def report(made: Imported) -> Iterator[str]:
    """What became of each key."""
    for title, lines in (
        ("taken over", made.mapped),
        ("without effect here", made.without_effect),
        ("not supported", made.unsupported),
        ("to be looked at", made.notes),
    ):
        if lines:
            yield f"{title}: {len(lines)}"
            yield from (f"  {line}" for line in lines)


def sort_the_rest(
    keys: Keys,
    made: Imported,
    without_effect: Mapping[str, str],
    harmless: Mapping[str, tuple[Any, ...]],
    counterparts: Mapping[str, str],
    mends: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Every key is in one of the lists, with its value.

    `mends` say what to do where the counterpart is no key of ours, also of a value that is not known.
    """
    for key, value in keys.values.items():
        shown = f"{key}={value}"
        reason = next((why for pattern, why in without_effect.items() if fnmatch(key, pattern)), None)
        if key in keys.taken:
            made.mapped.append(f"{shown}: {keys.taken[key]}")
        elif reason is not None:
            made.without_effect.append(f"{shown}: {reason}")
        elif value is None:
            made.without_effect.append(f"{shown}: not set")
        elif any(fnmatch(key, pattern) and value in values for pattern, values in harmless.items()):
            made.without_effect.append(f"{shown}: as here")
        elif key in mends:
            made.unsupported.append(f"{shown}: not taken over; {mends[key]}")
        elif is_unknown(value):
            made.unsupported.append(f"{shown}: only a run of the script would tell; write its value in yourself")
        elif key in counterparts:
            made.unsupported.append(f"{shown}: not taken over; write {counterparts[key]}")
        else:
            made.unsupported.append(f"{shown}: there is no counterpart here")


def known(names: Mapping[str, str], given: Any, key: str, made: Imported) -> str:
    """The counterpart of a name; where there is none, the first of all, and a line that says so."""
    if given in names:
        return names[given]
    fallback = next(iter(names.values()))
    made.notes.append(f"{key}={given}: there is none of that name here; {fallback} stands in its place: choose")
    return fallback


def unknown(what: str) -> str:
    """A value, or a part of one, that only a run of the source would tell."""
    return f"⟨{what}⟩"


def is_unknown(value: Any) -> bool:
    """Only a run of the source would tell it."""
    return isinstance(value, str) and UNKNOWN.search(value) is not None


def put(section: dict[str, Any], key: str, value: Any, default: Any) -> None:
    """A configuration states only what differs from the defaults."""
    if value != default:
        section[key] = value


def whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def listed(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else [value]


def parsed(text: str) -> Any:
    """A value of a command line: a number, a truth value, a list or mapping in brackets, or text, in quotes or not."""
    try:
        value = yaml12.read(text)
    except yaml12.YAMLError:
        return text
    if text.lstrip().startswith(("{", "[", "'", '"')):
        return value
    return text if "#" in text or isinstance(value, str | list | dict) else value  # YAML alone has `a: b` and `- a`


def flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(cast(dict[str, Any], value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a YAML file, flat. Raises UserError."""
    return _keys(stored.read_yaml(path, object), path)


def yaml_keys(text: str, path: Path) -> dict[str, Any]:
    """The keys of the text of a YAML file, flat. Raises UserError."""
    try:
        return _keys(yaml12.read(text), path)
    except yaml12.YAMLError as error:
        raise UserError(f"{path}: it is not valid YAML: {error}") from None


def _keys(tree: object, path: Path) -> dict[str, Any]:
    values = dict(flat(cast(dict[str, Any], tree), "")) if isinstance(tree, dict) else {}
    if not values:
        raise UserError(f"{path}: there are no keys in it")
    return values
