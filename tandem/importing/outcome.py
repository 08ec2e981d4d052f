"""What becomes of another framework's configuration: ours, and a line about each of its keys."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from tandem import stored
from tandem.config import yaml12
from tandem.config.counterparts import Table, key_in, texts
from tandem.errors import UserError

UNKNOWN = re.compile(r"⟨[^⟩]*⟩")
"""What stands in a value that only a run of the source would tell (`unknown`)."""
_SECTIONS = (
    "model", "data", "preference", "algorithm", "generation", "training", "conversation", "reward", "cluster",
    "placement", "trainer", "tracking",
)  # fmt: skip
"""In the order of a file."""


@dataclass
class ForeignConfig:
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
    """Keys of theirs with their values; those that are taken are remembered, with what of ours they become."""

    def __init__(self, values: Mapping[str, Any], table: Table) -> None:
        self.values = values
        self.table = table
        self.texts = texts(table)
        self.taken: dict[str, str] = {}

    def take(self, key: str, default: Any = None, ours: str = "") -> Any:
        """The value, where it is given; it becomes `ours`, by default what the table says."""
        value = self.values.get(key)
        if value is None or is_unknown(value):
            return default
        self.taken[key] = ours or key_in(self.texts[key])
        return value

    def take_rows(self, made: Imported) -> None:
        """Write what the rows of the table say, in their order."""
        for theirs, row in self.table.items():
            if isinstance(row, str) or not _holds(row.when, made.tree):
                continue
            given = row.default
            for name in (*row.older, theirs):
                given = self.take(name, given, row.ours)
            if given is not None:
                convert = row.convert
                value = known(convert, given, theirs, made) if isinstance(convert, Mapping) else convert(given)
                put(made.tree, row.ours, value, unless=row.unless)


def _holds(when: Sequence[str], tree: Mapping[str, Any]) -> bool:
    if not when:
        return True
    value = at(tree, when[0])
    return value in when[1:] if when[1:] else value is not None


def at(tree: Mapping[str, Any], key: str) -> Any:
    """The value of a key of ours; None: it is not written."""
    inner: Any = tree
    for name in key.split("."):
        inner = inner.get(name) if isinstance(inner, dict) else None
    return inner


def put(tree: dict[str, Any], key: str, value: Any, unless: Any = None) -> None:
    """Write a key of ours; a configuration states only what differs from the defaults, and None is no value."""
    if value is None or value == unless:
        return
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def written(made: Imported, framework: str, source: str) -> str:
    """The configuration as a file, with what it lacks on top."""
    lacks = ["#   " + line.replace("\n", "\n#   ") for line in (*made.unsupported, *made.notes)]
    head = [f"# Made by `tandem import {framework}` from {source}.", *(["# To be looked at:", *lacks] if lacks else [])]
    return "\n".join([*head, yaml12.write({name: made.tree[name] for name in _SECTIONS if name in made.tree})])


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


def by_pattern(reasons: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """A reason -> patterns of keys, as pattern -> reason."""
    return {pattern: reason for reason, patterns in reasons.items() for pattern in patterns}


def sort_the_rest(
    keys: Keys,
    made: Imported,
    without_effect: Mapping[str, str],
    harmless: Mapping[str, tuple[Any, ...]],
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
        elif key in keys.texts:
            made.unsupported.append(f"{shown}: not taken over; write {keys.texts[key]}")
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
