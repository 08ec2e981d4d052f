"""Every configuration key is read: some code loads an attribute of its name from an object.

Names are all that is compared, so a dead key that shares its name with a living one is not found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tandem.config.base import Section
from tandem.config.sections import sections_at
from tandem.config.tree import DpoConfig, EvalConfig, RewardModelConfig, TrainConfig
from tests.conftest import ROOT

FILES = "tracking."
"""Keys directly below it are names of files, which `chosen_trackers` goes through."""
COMMANDS = (TrainConfig, EvalConfig, RewardModelConfig, DpoConfig)


def attributes_read() -> frozenset[str]:
    """`name` of every `something.name` that the package loads."""
    found: set[str] = set()
    for path in (ROOT / "tandem").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return frozenset(found)


def keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_at(field):
            yield from keys(inner, f"{prefix}{name}.")


def unread(names: frozenset[str], *kinds: type[Section]) -> set[str]:
    found = {key for kind in kinds for key in keys(kind) if key.rpartition(".")[2] not in names}
    return {key for key in found if key.rpartition(".")[0] + "." != FILES}


def test_every_key_is_read() -> None:
    assert unread(attributes_read(), *COMMANDS) == set()


def test_a_dead_key_is_found() -> None:
    class Dead(Section):
        rate_of_nothing: float = 1.0
        seed: int = 0

    assert unread(attributes_read(), Dead) == {"rate_of_nothing"}
