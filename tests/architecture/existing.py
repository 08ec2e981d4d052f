"""What exists in this repository and may be named: files, definitions, words, configuration keys, metrics, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import click
import typer

import tandem
from tandem.cli import app
from tandem.config import tree as configuration
from tandem.config.base import Section
from tandem.config.sections import sections_at
from tests.conftest import ROOT

FOLDERS = ("tandem", "docs", "tests", "scripts", "examples", "recipes", "launch", "benchmarks", ".ci")
FREE = "*"
"""Below a key whose value is a mapping of the user's."""


@cache
def files() -> frozenset[Path]:
    """Every file of the repository's own, relative to its root; what runs and builds leave is none."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return frozenset(path.relative_to(ROOT) for path in [*found, *ROOT.glob("*.*")] if path.is_file())


@cache
def folders() -> frozenset[Path]:
    return frozenset(parent for path in files() for parent in path.parents)


@cache
def code() -> str:
    """Everything that is run: programs, scripts and recipes, not documents, and not what checks these."""
    own = [path for path in files() if path.suffix not in (".md", ".svg") and path.parent != Path("tests/architecture")]
    return "\n".join((ROOT / path).read_text(encoding="utf-8", errors="ignore") for path in own)


@cache
def words() -> frozenset[str]:
    """Every identifier-like word of the code."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", code()))


@cache
def written() -> frozenset[str]:
    """Every name in the strings of programs, and in scripts and recipes; comments and docstrings are left out."""
    texts = [text for path in files() if path.parent != Path("tests/architecture") for text in _texts(path)]
    return frozenset(re.findall(r"[\w.-]+", "\n".join(texts)))


def _texts(path: Path) -> Iterator[str]:
    if path.suffix == ".py":
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                yield node.value
    elif path.suffix not in (".md", ".svg"):
        yield re.sub(r"(?m)^\s*#.*", "", (ROOT / path).read_text(encoding="utf-8", errors="ignore"))


@cache
def definitions(path: Path) -> frozenset[str]:
    """`function`, `Class`, `Class.method`, `Class.attribute`, `NAME` of a Python file; inherited ones are not there."""
    return frozenset(_defined(ast.parse((ROOT / path).read_text(encoding="utf-8")).body))


def _defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
            if prefix:
                yield from (f"{prefix}{name}" for name in _set_on_self(node))
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from _defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def _set_on_self(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield node.attr


@cache
def modules() -> dict[str, frozenset[str]]:
    """The definitions of every module of the package, by dotted name; of the package itself its public names, too."""
    paths = [path for path in files() if path.parts[0] == "tandem" and path.suffix == ".py"]
    found = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): definitions(path) for path in paths}
    return found | {"tandem": found["tandem"] | frozenset(tandem.__all__)}


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of the package, by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in files():
        if path.parts[0] == "tandem" and path.suffix == ".py":
            for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
    return found


def is_member(owner: str, member: str) -> bool:
    """Some class of this name, or a base of it, defines the member. Bases from elsewhere are believed."""
    for node in classes()[owner]:
        bases = [re.split(r"[.\[]", ast.unparse(base))[0] for base in node.bases]
        if member in {name for name in _defined(node.body)} | _assigned(node):
            return True
        if any(is_member(base, member) if base in classes() else base not in _EMPTY_BASES for base in bases):
            return True
    return False


_EMPTY_BASES = {"Protocol", "Generic", "NamedTuple", "Enum", "StrEnum", "Exception", "ValueError"}


def _assigned(node: ast.ClassDef) -> set[str]:
    methods = [method for method in node.body if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {name for method in methods for name in _set_on_self(method)}


@cache
def keys() -> frozenset[str]:
    """Every dotted configuration key of any command, sections included; `section.key.*` where any name may follow."""
    trees = [kind for kind in vars(configuration).values() if isinstance(kind, type) and issubclass(kind, Section)]
    return frozenset(key for kind in trees if "model" in kind.model_fields for key in _keys(kind, ""))


def _keys(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if _is_mapping(field.annotation):
            yield f"{prefix}{name}.{FREE}"
        for inner in sections_at(field):
            yield from _keys(inner, f"{prefix}{name}.")


def _is_mapping(annotation: Any) -> bool:
    return annotation is dict or get_origin(annotation) is dict or any(map(_is_mapping, get_args(annotation)))


@cache
def sections() -> frozenset[str]:
    return frozenset(key for key in keys() if "." not in key)


def is_key(dotted: str) -> bool:
    """`placement.pools.main` and `trainer.*` are keys, too."""
    parts = dotted.split(".")
    below = {".".join([*parts[:end], FREE]) for end in range(1, len(parts))}
    return dotted in keys() or bool(below & keys()) or any(fnmatch(key, dotted) for key in keys())


def keys_that_end_in(name: str) -> list[str]:
    return [key for key in keys() if key.endswith(f".{name}")]


@cache
def metrics() -> tuple[str, ...]:
    """The names in docs/metrics.md, which tests compare with what runs write."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    return tuple(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))


def is_metric(name: str) -> bool:
    """`actor/*` and `val/<source>/acc/mean@4` are metrics, too."""
    patterns = [re.compile(re.sub(r"<\w+>", ".+", re.escape(listed))) for listed in metrics()]
    return any(pattern.fullmatch(name) for pattern in patterns) or any(fnmatch(listed, name) for listed in metrics())


@cache
def commands() -> dict[str, frozenset[str]]:
    """The options of each command: `{"train": {"--resume", …}, "reward test": …}`."""
    return dict(_commands(typer.main.get_command(app), ""))


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, frozenset[str]]]:
    yield name, frozenset(["--help", *(option for parameter in command.params for option in parameter.opts)])
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {inner_name}".strip())
