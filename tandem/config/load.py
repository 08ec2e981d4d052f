"""YAML 1.2 + dotted overrides -> the typed tree, or every error at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError

from tandem.config import rules, verl_keys, yaml12
from tandem.config.mending import hides_others, mend
from tandem.config.messages import describe_all
from tandem.config.objects import with_objects_written
from tandem.config.paths import CHECKPOINTS_IN_USE, HUB_PINS
from tandem.config.tree import Tree
from tandem.config.valid_part import broken_rules, valid_part
from tandem.errors import UserError
from tandem.hub import pins_in
from tandem.stored import DamagedFile, read_text, read_yaml

Config = TypeVar("Config", bound=Tree)
_DATA_FILES = (".jsonl", ".parquet", ".csv", ".arrow", ".jsonl.gz")
_LIKE = 0.75
"""How much a misspelt section is like its name, at least."""


@dataclass(frozen=True, slots=True)
class ParsedConfig(Generic[Config]):
    """A configuration that was read, and what is wrong with it."""

    config: Config
    """Whole where there are no problems, else what is sound of it (`valid_part`)."""
    problems: list[str]


def read_config(kind: type[Config], path: Path, overrides: Sequence[str] = ()) -> ParsedConfig[Config]:
    """Read `path`, apply `a.b=value` overrides (values are YAML), validate. Raises UserError for what is no YAML."""
    tree = {name: section for name, section in _read_yaml(path).items() if name not in kind.NOT_READ}
    known = [*kind.model_fields, *verl_keys.SECTIONS]
    if tree and not any(get_close_matches(str(name), known, cutoff=_LIKE) for name in tree):
        raise UserError(
            f"{path}: is no configuration of this command, which has sections ({', '.join(kind.model_fields)}); it "
            f"holds {', '.join(map(str, list(tree)[:5]))}"
        )
    return _validate(kind, tree, overrides)


def written_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys as the file and the overrides write them, unchecked; of what is no YAML, or no override, nothing."""
    try:
        tree = read_yaml(path, dict[str, Any])
    except DamagedFile:
        tree = dict[str, Any]()
    for _ in _apply_overrides(tree, overrides):
        pass
    return tree


def _validate(kind: type[Config], tree: dict[str, Any], overrides: Sequence[str]) -> ParsedConfig[Config]:
    problems = list(_apply_overrides(tree, overrides))
    problems += [f"{key}: this command has no use for it; leave it out" for key in kind.WITHOUT_USE if _has(tree, key)]
    stored = _config_of_the_resumed(tree)
    context = {CHECKPOINTS_IN_USE: _checkpoints_in_use(stored), HUB_PINS: pins_in(stored)}
    while True:
        try:
            config = kind.model_validate(tree, context=context)
            return ParsedConfig(config, problems + rules.broken_rules(config))
        except ValidationError as error:
            errors = error.errors()
            mended = mend(kind, tree, errors)
        if mended is None:
            break
        problems += describe_all([one for one in errors if hides_others(one)], kind)
        tree = mended
    sound = valid_part(kind, tree, context)
    problems += [*describe_all(errors, kind), *broken_rules(sound), *rules.broken_rules(sound, whole=False)]
    problems = list(dict.fromkeys(problems))
    assert problems, errors
    return ParsedConfig(sound, problems)


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
    if path.name.endswith(_DATA_FILES):
        raise UserError(f"{path}: is a file of rows; give a configuration in YAML, which names it, as data.train_files")
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
