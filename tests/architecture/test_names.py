"""One word a thing: a public class has a name of its own in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.conftest import ROOT

SAME_THING = {"ToolCall", "Episode"}
"""Defined twice: as it is spoken of over the wire, and as it is in here."""


def test_a_public_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tandem").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert set(twice) <= SAME_THING, twice
