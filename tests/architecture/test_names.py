"""One word a thing: a public class has a name of its own in the whole package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

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


CONVENTIONS = {"__init__", "base"}
ONE_SUBJECT = {
    "code", "conversation", "conversations", "data", "engines", "episodes", "judge", "judging", "math", "messages",
    "metrics", "mixture", "models", "optimizer", "pictures", "placed", "placement", "preference", "reward", "roles",
    "sampler", "search", "sft", "teacher", "tools", "trainer", "training", "validation",
}  # fmt: skip
"""Seen from several folders: its section, its rows, its job, the side of the controller and that of the workers."""
ONE_A_BACKEND = {"fake", "local", "remote", "verl"}
OF_THEIR_FOLDER = {
    "chat", "chat_template", "choice", "classes", "command", "errors", "http", "progress", "shared_memory",
    "store", "videos", "vocabulary",
}  # fmt: skip
"""What is said of it is what the folder is about."""


def test_a_file_name_stands_once_but_where_it_is_one_subject() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tandem").rglob("*.py")):
        places[path.stem].append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert set(twice) == CONVENTIONS | ONE_SUBJECT | ONE_A_BACKEND | OF_THEIR_FOLDER, twice


OF_PEFT = {"lora_A", "lora_B"}


def names_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def test_the_axes_in_names_are_those_of_the_table() -> None:
    """In CONTRIBUTING.md, which has the meaning of each."""
    table = re.findall(r"^\| `_([A-Z])` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "tandem").rglob("*.py"))]
    names = {name for tree in trees for name in names_in(tree)} - OF_PEFT
    found = {name: axes[1] for name in names if (axes := re.fullmatch(r"_?[a-z]\w*_([A-Z1]{1,3})", name))}
    assert {name for name, axes in found.items() if not set(axes) <= {*table, "1"}} == set()
    assert set(table) <= set("".join(found.values())), "in the table, and in no name"


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts", "tests"])
def test_what_is_imported_of_the_package_is_there(folder: str) -> None:
    """Also by programs that nothing runs in the short tier, and whose types nobody checks."""
    missing: list[str] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tandem."):
                missing += [f"{path.relative_to(ROOT)}: {node.module}.{alias.name}" for alias in node.names
                            if not is_there(node.module or "", alias.name)]  # fmt: skip
    assert missing == []


def is_there(module: str, name: str) -> bool:
    """As a file of its folder, or as a word of its file."""
    folder = ROOT.joinpath(*module.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    beside = (folder / name).is_dir() or (folder / f"{name}.py").exists()
    return beside or (file.exists() and re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) is not None)
