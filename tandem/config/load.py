"""YAML 1.2 + dotted overrides -> the typed tree, or every error at once."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tandem.config import verl_keys, yaml12
from tandem.config.base import Section
from tandem.config.objects import with_objects_written
from tandem.config.paths import CHECKPOINTS_IN_USE, HUB_PINS
from tandem.config.sections import sections_at
from tandem.config.tree import Tree
from tandem.config.valid_part import valid_part
from tandem.errors import UserError
from tandem.hub import pins_in
from tandem.stored import DamagedFile, read_text, read_yaml

Config = TypeVar("Config", bound=Tree)


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


def _union_tags(kind: type[Section]) -> Iterator[str]:
    if "type" in kind.model_fields:
        yield from get_args(kind.model_fields["type"].annotation)
    for subclass in kind.__subclasses__():
        yield from _union_tags(subclass)


def _tags() -> set[str]:
    """What pydantic puts into the place of an error besides keys: after a validation, for which every kind of section
    is there."""
    return {"built_in", "own", "reference", "switch", "with_options", *_union_tags(Section)}


@dataclass(frozen=True, slots=True)
class ParsedConfig(Generic[Config]):
    """A configuration that was read, and what is wrong with it."""

    config: Config
    """Whole where there are no problems, else what is sound of it (`valid_part`)."""
    problems: list[str]


def read_config(kind: type[Config], path: Path, overrides: Sequence[str] = ()) -> ParsedConfig[Config]:
    """Read `path`, apply `a.b=value` overrides (values are YAML), validate. Raises UserError for what is no YAML."""
    tree = {name: section for name, section in _read_yaml(path).items() if name not in kind.NOT_READ}
    return _validate(kind, tree, overrides)


def _validate(kind: type[Config], tree: dict[str, Any], overrides: Sequence[str]) -> ParsedConfig[Config]:
    problems = list(_apply_overrides(tree, overrides))
    problems += [f"{key}: this command has no use for it; leave it out" for key in kind.WITHOUT_USE if _has(tree, key)]
    stored = _config_of_the_resumed(tree)
    context = {CHECKPOINTS_IN_USE: _checkpoints_in_use(stored), HUB_PINS: pins_in(stored)}
    try:
        return ParsedConfig(kind.model_validate(tree, context=context), problems)
    except ValidationError as error:
        problems += _describe_all(error, kind)
        with_meant_types = _with_meant_types(kind, tree, error)
    try:  # again, for mistakes in the sections whose `type` is misspelt
        kind.model_validate(with_meant_types, context=context)
    except ValidationError as remaining:
        problems += [problem for problem in _describe_all(remaining, kind) if problem not in problems]
    return ParsedConfig(valid_part(kind, tree), problems)


def _with_meant_types(kind: type[Tree], tree: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    """The tree with the type that was probably meant wherever one is misspelt."""
    mended = deepcopy(tree)
    for item in error.errors():
        meant = _meant_type(item) if item["type"] == "union_tag_invalid" and isinstance(item["input"], dict) else None
        if meant is not None:
            whole: Any = mended
            section = reduce(lambda inner, name: inner[name], _keys_of(item, kind), whole)
            section["type"] = meant
    return mended


def load_config(kind: type[Config], source: Path | str | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The configuration in a file, or in a mapping of sections, of dotted keys, or of both.

    In a mapping functions and classes may stand where names of them do, and rows where names of data files do: these
    are written to `objects` in `trainer.run_dir` (`objects.py`). Raises UserError that lists every error of the source
    and the overrides.
    """
    if isinstance(source, Mapping):
        tree = _nested(source)
        problems = list(_apply_overrides(tree, overrides))
        read = _validate(kind, with_objects_written(tree), ())
        refuse("the configuration", problems + read.problems)
    else:
        read = read_config(kind, Path(source), overrides)
        refuse(source, read.problems)
    return read.config


def _nested(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys become sections in sections. Raises UserError where a key is no name, or a section is a value."""
    tree: dict[str, Any] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a program may give anything
            raise UserError(f"the configuration: {key!r} is no key; keys are strings")
        value = _nested(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value
        section, (*parents, name) = tree, key.split(".")
        for parent in parents:
            inner: object = section.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise UserError(f"the configuration: {key!r}, but {parent} is {inner!r}, which has no keys")
            section = cast(dict[str, Any], inner)
        if isinstance(value, dict) and isinstance(section.get(name), dict):
            section[name] |= value
        else:
            section[name] = value
    return tree


def config_of(kind: type[Config], overrides: Sequence[str]) -> Config:
    """The configuration that the overrides make of nothing. Raises UserError that lists every error."""
    read = _validate(kind, {}, overrides)
    refuse("command line", read.problems)
    return read.config


def split_arguments(arguments: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """Those of a command -> CONFIG, if it is there, and the overrides."""
    given = list(arguments or [])
    path = Path(given.pop(0)) if given and ("=" not in given[0] or Path(given[0]).is_file()) else None
    return path, given


def refuse(source: Path | str, problems: Sequence[str]) -> None:
    """Raises UserError that lists the problems of the configuration in `source`, if there are any."""
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UserError(f"{source}: {len(problems)} error{'s' * (len(problems) > 1)} in the configuration\n{listed}")


def dump_config(config: Tree) -> str:
    """The resolved configuration as YAML: enough to repeat the run."""
    return yaml12.write(config.model_dump(mode="json"))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        path.stat()
    except OSError as error:
        raise UserError(f"{path}: no such configuration file ({error.strerror})") from None
    tree = read_yaml(path, object)
    if not isinstance(tree, dict):
        raise DamagedFile(path, "must hold sections (model:, data:, …)")
    for key in cast(dict[Any, Any], tree):
        if not isinstance(key, str):
            raise DamagedFile(path, f"has the key {key!r:.80}, which is no name of a section")
    return cast(dict[str, Any], tree)


def _apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Set each `a.b=value` in `tree`; yields what is wrong with them."""
    for override in overrides:
        if override.startswith("+"):
            yield f"override {override!r}: keys take no + here"
        try:
            _apply(tree, override.lstrip("+"))
        except ValueError as error:
            yield f"override {override!r}: {error}"


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set `a.b=value`, in sections that are made where they are not there, or empty. Raises ValueError."""
    dotted, equals, text = override.partition("=")
    names = dotted.split(".")
    if not equals or not all(names) or dotted.startswith("~"):
        raise ValueError("write it as section.key=YAML value")
    section = tree
    for depth, name in enumerate(names[:-1], start=1):
        if section.get(name) is None:
            section[name] = {}
        inner: object = section[name]
        if not isinstance(inner, dict):
            key, kind = ".".join(names[:depth]), "a list" if isinstance(inner, list) else str(inner)
            raise ValueError(f"{key} is {kind}, whose parts have no keys; give all of it, as {key}=…")
        section = cast(dict[str, Any], inner)
    try:
        section[names[-1]] = yaml12.read(text)
    except yaml12.YAMLError as error:
        raise ValueError(f"what follows = is not valid YAML: {getattr(error, 'problem', None) or error}") from None


def _config_of_the_resumed(tree: Any) -> str:
    """The text of config.yaml of the run that is to be resumed, or nothing."""
    try:
        trainer = tree["trainer"]
        if trainer.get("resume") is not True:
            return ""
        return read_text(Path(trainer["run_dir"]).expanduser() / "config.yaml")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return ""  # there is no run yet, or it is told elsewhere what is wrong with its configuration


def _checkpoints_in_use(config: str) -> dict[str, Path]:
    """What the keys that name runs stand for in the run that is to be resumed, by their last parts: it stays the same,
    whatever has become of those runs since."""
    try:
        stored: Any = yaml12.read(config)
        named = {**stored["model"], "branch_from": stored["trainer"].get("branch_from")}
    except (ValueError, TypeError, KeyError, AttributeError, yaml12.YAMLError):
        return {}
    return {key: Path(path) for key, path in named.items() if isinstance(path, str) and "/checkpoints/" in path}


def _has(tree: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = cast(dict[str, Any], tree)[name]
    return True


def _describe_all(error: ValidationError, kind: type[Tree]) -> list[str]:
    return [problem for item in error.errors() for problem in _describe(item, kind)]


def _keys_of(error: ErrorDetails, kind: type[Section]) -> list[str | int]:
    """The keys that lead to the value at fault. Behind a key at which several kinds of sections may stand comes the one
    that was chosen, which may be named as a key is."""
    keys: list[str | int] = []
    sections: list[type[Section]] = [kind]
    chosen, tags = True, _tags()
    for part in error["loc"]:
        if not chosen and part in tags:
            chosen = part != "built_in"  # by its name, which comes next
        elif "[" not in str(part):
            keys.append(part)
            if isinstance(part, int):
                continue
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
            sections = [inner for field in fields for inner in sections_at(field)]
            chosen = all(isinstance(field.annotation, type) for field in fields)
    return keys


def _meant_type(error: ErrorDetails) -> str | None:
    """The known type whose name is close to an unknown one, best the same letters in another order."""
    context = error.get("ctx", {})
    known = re.findall(r"'([^']+)'", context["expected_tags"])
    swapped = [name for name in known if sorted(name) == sorted(context["tag"])]
    return next(iter(swapped or difflib.get_close_matches(context["tag"], known, 1)), None)


def _describe(error: ErrorDetails, kind: type[Tree]) -> list[str]:
    key = ".".join(map(str, _keys_of(error, kind)))
    if error["type"] == "extra_forbidden" and key in kind.NOT_READ:
        return [f"{key}: only training reads this section; leave it out"]
    if error["type"] == "extra_forbidden":
        return verl_keys.describe(key, error["input"]) or [_unknown(key, kind)]
    if error["type"] == "union_tag_not_found":
        return [f"{key}.type: field required"]
    if error["type"] == "union_tag_invalid" and isinstance(error["input"], dict):
        context = error.get("ctx", {})
        meant = _meant_type(error)
        mend = f"; did you mean {meant!r}?" if meant else ""
        return [f"{key}.type: {context['tag']!r} is unknown; known are {context['expected_tags']}{mend}"]
    if error["type"] in ("model_type", "model_attributes_type", "union_tag_invalid"):
        return [f"{key}: is a section of keys and values, not {error['input']!r}"]
    message = error["msg"].removeprefix("Value error, ")
    given = "" if isinstance(error["input"], dict | Section) else f", not {error['input']!r}"
    return [f"{key}: {message[0].lower()}{message[1:]}{given}"]


def _unknown(key: str, kind: type[Section]) -> str:
    """With the mend: a type that has the key, a key of like name in the section, of the same name in another."""
    parent, _, name = key.rpartition(".")
    if types := _types_with(kind, key):
        return f"{key}: unknown key; it is one of {parent}.type: {' or '.join(types)}"
    known = sorted({_with_names(other, key) for other in _keys(kind)})
    siblings = [other for other in known if other.rpartition(".")[0] == parent]
    if (meant := _OF_OTHER_TRAINERS.get(name)) in known:
        return f"{key}: unknown key; did you mean {meant}?"
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    close = (
        difflib.get_close_matches(key, siblings, 1, 0.9)
        or difflib.get_close_matches(key, namesakes, 1, 0)
        or difflib.get_close_matches(key, known, 1, 0.8)
    )
    if close:
        return f"{key}: unknown key; did you mean {close[0]}?"
    if parent and 0 < len(siblings) < 9:
        return f"{key}: unknown key; {parent} has {', '.join(other.rpartition('.')[2] for other in siblings)}"
    return f"{key}: unknown key"


def _with_names(key: str, given: str) -> str:
    """A key of `_keys` with the names that sections have in the given key, where it begins as that does."""
    own, theirs = key.split("."), given.split(".")
    for place, (part, other) in enumerate(zip(own, theirs, strict=False)):
        if part == _ANY_NAME:
            own[place] = other
        elif part != other:
            break
    return ".".join(own)


def _types_with(kind: type[Section], key: str) -> list[str]:
    """The types of a section that have the key, which the chosen type has not."""
    *parents, name = key.split(".")
    sections: list[type[Section]] = [kind]
    for parent in parents:
        fields = [section.model_fields[parent] for section in sections if parent in section.model_fields]
        sections = [inner for field in fields for inner in sections_at(field)]
    having = [section for section in sections if name in section.model_fields and "type" in section.model_fields]
    return sorted({tag for section in having for tag in get_args(section.model_fields["type"].annotation)})


def _keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a section and of every section in it, whichever alternative is chosen. Sections that users name
    are called `_ANY_NAME`."""
    for name, field in section.model_fields.items():
        yield prefix + name
        below = f"{prefix}{name}.{_ANY_NAME}." if get_origin(field.annotation) is dict else f"{prefix}{name}."
        for inner in sections_at(field):
            yield from _keys(inner, below)
