"""A name, a command or a piece of configuration -> what is wrong with it. What does not look like ours is left out."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import existing
import yaml

from tests.conftest import ROOT

OF_OTHERS = {
    *("model.generate", "core_algos.py", "handle_zero_tail", "no_new_privs", "ServerArgs"),
    *("--node-ip-address", "--requeue"),
    *("hardware/gpu.py", "hardware_spec.md", "openenv/core/env_server/http_server.py", "utils/flops_counter.py"),
}
"""Names of other projects that look like ours."""
OF_READERS = {"median.py", "path/to/file.py"}
"""Files that a document has its reader write."""
FILE_TYPES = {"py", "md", "yaml", "json", "jsonl", "parquet", "html", "safetensors", "sh", "gz", "svg"}
Folders = tuple[Path, ...]
CONFIGURED = ("train", "sft", "dpo", "reward-model", "eval", "check")
"""The commands that take a configuration and overrides."""


def check_inline(text: str, under: Folders = ()) -> Iterator[str]:
    """A piece of inline code. `under`: the folders that its list item or row of a table begins with."""
    if isinstance(settings := _settings(text), dict):
        yield from check_settings(settings)
    elif " " in text:
        yield from check_command(text)
    else:
        yield from check_name(text.removesuffix("()"), under)


def check_file(text: str, under: Folders) -> Iterator[str]:
    """A piece of code in a comment or a docstring of the package: only files and folders are looked for."""
    if " " not in text and (text.endswith("/") or _has_file_type(text.partition(":")[0])):
        yield from check_name(text, under)


def check_name(text: str, under: Folders = ()) -> Iterator[str]:
    """A word without spaces: the first kind that it has the form of decides."""
    kinds = (
        (_is_of_others, lambda _: iter(())),
        (re.compile(r"--[a-z][a-z-]+(=.*)?").fullmatch, _check_option),
        (re.compile(r"[\w./-]+:[A-Za-z_][\w.]*").fullmatch, _check_reference),
        (_is_path, partial(_check_path, under=under)),
        (_is_metric_like, _check_metric),
        (_is_file_name, partial(_check_file_name, under=under)),
        (_is_key_like, _check_key),
        (re.compile(r"[A-Za-z_]\w*(\.\w+)+").fullmatch, _check_dotted),
        (re.compile(r"[A-Za-z0-9]+(_[A-Za-z0-9]+)+|[A-Z][a-z0-9]+([A-Z]\w*)+").fullmatch, _check_word),
    )
    yield from next((check(text) for belongs, check in kinds if belongs(text)), ())


def _is_of_others(text: str) -> bool:
    return text.partition("=")[0] in OF_OTHERS or text.partition(":")[0] in OF_READERS or "://" in text


def _check_option(text: str) -> Iterator[str]:
    option = text.partition("=")[0]
    if not any(option in options for options in existing.commands().values()) and f'"{option}"' not in existing.code():
        yield f"no command has the option {option}"


def _check_reference(text: str) -> Iterator[str]:
    """`file.py:name` or `module:name`, of this repository; a user's is left alone."""
    place, _, name = text.rpartition(":")
    homes = [path for path in existing.files() if path.suffix == ".py" and _is_called(path, place)]
    if homes and not any(name in existing.definitions(path) for path in homes):
        yield f"{place} defines no {name}"
    elif not homes and (place.startswith("tandem.") or place.split("/")[0] in _own_folders()):
        yield f"no file {place}"


def _is_called(path: Path, place: str) -> bool:
    if place.endswith(".py"):
        return path in (Path(place), Path("tandem", place))
    return ".".join(path.with_suffix("").parts) == place or ("." not in place and path.stem == place)


def _is_path(text: str) -> bool:
    """It begins with a folder of the repository, ends as a folder does, or is a program in some folder."""
    first, slash, rest = text.partition("/")
    if not slash or not first:
        return False
    return first in existing.FOLDERS or text.endswith(".py") or (rest == "" and bool(re.fullmatch(r"[\w.]+", first)))


def _own_folders() -> set[str]:
    """Those that a path may begin with, at the root or inside the package."""
    return {*existing.FOLDERS, *(path.name for path in existing.folders() if path.parent == Path("tandem"))}


def _check_path(text: str, under: Folders = ()) -> Iterator[str]:
    """A file, a folder or a pattern, from the root or inside the package; `{a,b}` stands for both.

    A folder may also be one in the folders spoken of, or one that runs make: then the code writes its name.
    """
    bases = [ROOT, ROOT / "tandem", *(ROOT / folder for folder in under)]
    choices = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.split(r"(\{[^}]*\})", text)]
    for path in map("".join, product(*choices)):
        pattern = re.sub(r"<\w+>", "*", path.rstrip("/"))
        made_by_runs = path.endswith("/") and pattern in existing.written()
        if not made_by_runs and not any(next(iter(base.glob(pattern)), None) for base in bases):
            yield f"no file {path}"


def _is_metric_like(text: str) -> bool:
    stages = {name.split("/")[0] for name in existing.metrics()}
    return "/" in text and text.split("/")[0] in stages and not _has_file_type(text)


def _check_metric(text: str) -> Iterator[str]:
    if not existing.is_metric(text):
        yield f"no metric {text} in docs/metrics.md"


def _is_file_name(text: str) -> bool:
    return "/" not in text and _has_file_type(text)


def _check_file_name(text: str, under: Folders = ()) -> Iterator[str]:
    """Of a file of the repository, in the folders spoken of or below them; or of one, no program, that the code writes.

    A name that stands somewhere in the code is not enough: it may be part of a longer one, or of a stale comment.
    """
    places = [path.parent for path in existing.files() if path.name == text]
    inside = [place for place in places for folder in under if place.is_relative_to(folder)]
    if not (inside if under else places) and (text.endswith(".py") or text not in existing.written()):
        yield f"no file {text}" + (f" in {' or '.join(map(str, under))}" if under else "")


def _has_file_type(text: str) -> bool:
    """Its ending is that of a file; a name in capitals stands for one of the reader's (`CONFIG.yaml`)."""
    name, _, ending = text.rpartition(".")
    return name != "" and ending in FILE_TYPES and not (Path(name).name.isupper() and ending != "md")


def _is_key_like(text: str) -> bool:
    key = text.partition("=")[0]
    return key.split(".")[0] in existing.sections() and re.fullmatch(r"[a-z_]+(\.[\w*]+)+", key) is not None


def _check_key(text: str) -> Iterator[str]:
    key = text.partition("=")[0]
    if not existing.is_key(key):
        yield f"no configuration key {key}"


def _check_dotted(text: str) -> Iterator[str]:
    """`tandem.module.name`, or `Class.member` of a class of ours."""
    owner, _, member = text.rpartition(".")
    if text.startswith("tandem."):
        modules = existing.modules()
        ends = [len(text), *(dot.start() for dot in reversed([*re.finditer(r"\.", text)]))]
        home = next((text[:end] for end in ends if text[:end] in modules), "")
        rest = text[len(home) + 1 :]
        if not home or (rest and rest not in modules[home]):
            yield f"nothing is called {text}"
    elif owner in existing.classes() and not existing.is_member(owner, member):
        yield f"{owner} has no {member}"


def _check_word(text: str) -> Iterator[str]:
    if not text.isupper() and text not in existing.words():
        yield f"nothing is called {text}"


def check_command(line: str) -> Iterator[str]:
    """Files, `tandem` commands with their options and overrides, and options of scripts, in a line of shell."""
    for part in re.split(r"&&|\|\||[;|]", line):
        arguments = _split(part)
        for place, argument in enumerate(arguments):
            after = arguments[place + 1 :]
            if re.fullmatch(r"(\.venv[\w-]*/bin/)?tandem", argument):
                yield from _check_tandem(after)
                break
            if argument == "-m" and after and after[0].split(".")[0] == "tandem":
                yield from _check_runs(after[0])
                yield from _check_tandem(after[1:]) if after[0] == "tandem" else ()
                break
            if "=" not in argument and _is_path(argument):
                path, colon, _ = argument.partition(":")
                yield from _check_path(path) if not colon or "::" in argument else _check_reference(argument)
                yield from _check_script_options(Path(path), after)


def _check_runs(module: str) -> Iterator[str]:
    """`python -m module` does something."""
    path = Path(*module.split("."))
    starts = [file for file in (path.with_suffix(".py"), path / "__main__.py") if file in existing.files()]
    if not any('__name__ == "__main__"' in (ROOT / file).read_text(encoding="utf-8") for file in starts):
        yield f"python -m {module} runs nothing"


def _check_tandem(arguments: list[str]) -> Iterator[str]:
    """What follows `tandem`."""
    if not arguments or not re.fullmatch(r"[a-z][a-z-]*", arguments[0]):
        return  # an option, or a placeholder
    inner = [name for name in existing.commands() if name.startswith(f"{arguments[0]} ")]
    name = " ".join(arguments[: 2 if inner else 1])
    if arguments[0] == "data" and name not in inner:
        name = "data convert"  # whose name may be left out
    if name not in existing.commands():
        yield f"no command tandem {name}"
        return
    for argument in arguments[1:]:
        yield from _check_argument(name, argument)


def _check_argument(command: str, argument: str) -> Iterator[str]:
    name, equals, _ = argument.partition("=")
    if name.startswith("--"):
        if name not in existing.commands()[command]:
            yield f"tandem {command} has no option {name}"
    elif command in CONFIGURED and equals and "." in name:
        yield from _check_key(name)
    elif command in CONFIGURED and not equals and _is_path(argument):
        yield from _check_path(argument)


def _check_script_options(script: Path, arguments: list[str]) -> Iterator[str]:
    """An option stands in the script's own text, or in that of a file that it starts."""
    if script not in existing.files() or script.parts[0] not in ("scripts", "examples", "benchmarks"):
        return
    text = (ROOT / script).read_text(encoding="utf-8")
    started = [path for path in existing.files() if path.suffix == ".py" and str(path) in text]
    texts = [text, *((ROOT / path).read_text(encoding="utf-8") for path in started)]
    for argument in arguments:
        option = argument.partition("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]+", option) and not any(f'"{option}"' in text for text in texts):
            yield f"{script} has no option {option}"


def _split(line: str) -> list[str]:
    try:
        arguments = shlex.split(line, comments=True)
    except ValueError:  # prose with an apostrophe
        arguments = line.split()
    return [argument if "=" in argument else argument.strip("[](),.:;`'\"") for argument in arguments]


def check_yaml(text: str) -> Iterator[str]:
    """A block of YAML: a configuration, or a piece of one."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        yield f"a block that is no YAML: {error}"
        return
    if isinstance(tree, dict):
        yield from check_settings(tree)


def check_settings(tree: dict[Any, Any], section: str | None = None) -> Iterator[str]:
    """A piece of a configuration: the content of `section`, or of the one that fits best. `""` is the whole tree."""
    names = [name for name in tree if isinstance(name, str) and re.fullmatch(r"[a-z]\w*(\.\w+)*", name)]
    homes = [section] if section is not None else [*dict.fromkeys(home for name in names for home in _homes(name))]
    if not homes:
        yield from (f"nothing is called {name}" for name in names if name not in existing.words())
        return
    yield from min(([*_check_content(tree, names, home)] for home in homes), key=len)


def _check_content(tree: dict[Any, Any], names: list[str], home: str) -> Iterator[str]:
    for name in names:
        key = f"{home}.{name}" if home else name
        if not existing.is_key(key):
            yield f"no configuration key {key}"
        elif isinstance(tree[name], dict):
            yield from check_settings(tree[name], key)


def _homes(name: str) -> list[str]:
    """The sections that have a key of this name."""
    whole = [""] if existing.is_key(name) else []
    return whole + [key.removesuffix(f".{name}") for key in existing.keys_that_end_in(name)]


def _settings(text: str) -> Any:
    """What `{type: fsdp}` and `max_restarts: 3` say; None for what is neither."""
    if not re.match(r"\{?[\w.]+: ", text):
        return None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def check_python(text: str) -> Iterator[str]:
    """What a block of Python imports from the package is there, and so is every `tandem.NAME`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tandem":
            yield from _check_dotted(f"tandem.{node.attr}")
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tandem":
            module = importlib.import_module(node.module or "")
            yield from (f"{node.module} has no {one.name}" for one in node.names if not hasattr(module, one.name))
