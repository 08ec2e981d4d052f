"""YAML + dotted overrides -> the typed tree, or every error at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from tandem.config.tree import Section, SftConfig, TrainConfig
from tandem.errors import UserError

Config = TypeVar("Config", TrainConfig, SftConfig)


def load_config(kind: type[Config], path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `a.b=value` overrides (values are YAML), validate.

    Raises UserError that lists every error of the file and the overrides.
    """
    tree = _read_yaml(path)
    problems = list(_apply_overrides(tree, overrides))
    config, more = validate(kind, tree)
    problems += more
    if problems or config is None:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UserError(f"{path}: {len(problems)} error{'s' * (len(problems) > 1)} in the configuration\n{listed}")
    return config


def validate(kind: type[Config], tree: Mapping[str, Any]) -> tuple[Config | None, list[str]]:
    """The configuration and no errors, or None and all errors, those between the sound sections among them.

    Sections are validated one by one, so that an error in one does not hide those of the others.
    """
    problems = [_unknown(key, kind, "") for key in tree if key not in kind.model_fields]
    sections: dict[str, Any] = {}
    for name, info in kind.model_fields.items():
        if name not in tree and not info.is_required():
            sections[name] = info.get_default(call_default_factory=True)
            continue
        section_type: Any = Annotated[cast(Any, info.annotation), info]
        given = _with_default_type(name, tree.get(name, {}))
        try:
            sections[name] = TypeAdapter[Any](section_type).validate_python(given)
        except ValidationError as error:
            problems += [_describe(item, name, kind) for item in error.errors()]
    problems += [message for message in _between_sections(kind, sections)]
    return (None, problems) if problems else (kind(**sections), [])


def dump_config(config: TrainConfig | SftConfig) -> str:
    """The resolved configuration as YAML: enough to repeat the run."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _with_default_type(name: str, section: Any) -> Any:
    if name == "algorithm" and isinstance(section, dict) and "type" not in section:
        return {"type": "grpo", **cast(dict[str, Any], section)}
    return cast(Any, section)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a configuration file: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold sections (model:, data:, …), found {type(tree).__name__}")
    return cast(dict[str, Any], tree)


def _apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Set each `a.b=value` in `tree`; yields what is wrong with them."""
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not all(dotted.split(".")):
            yield f"override {override!r}: write it as section.key=value"
            continue
        *parents, last = dotted.split(".")
        node = _section_at(tree, parents)
        if node is None:
            yield f"override {override!r}: {'.'.join(parents)} is a value, not a section"
            continue
        try:
            node[last] = _scalar(yaml.safe_load(text))
        except yaml.YAMLError:
            yield f"override {override!r}: {text!r} is not valid YAML; put it in quotes"


def _section_at(tree: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """The section at `path`, made where it is missing; None when a plain value is in the way."""
    node: Any = tree
    for name in path:
        if not isinstance(node, dict):
            return None
        node = cast(dict[str, Any], node).setdefault(name, {})
    return cast(dict[str, Any], node) if isinstance(node, dict) else None


def _scalar(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as a string; a person who writes it means the number."""
    if isinstance(value, str):
        try:
            return float(value) if "e" in value.lower() else value
        except ValueError:
            return value
    return value


def _describe(error: Any, section: str, kind: type[Section]) -> str:
    location = [section, *(str(part) for part in error["loc"])]
    location = [part for part in location if part not in _UNION_TAGS]
    dotted = ".".join(location)
    if error["type"] == "extra_forbidden":
        return _unknown(dotted, kind, dotted)
    if error["type"] == "missing":
        return f"{dotted}: required, but not given"
    if error["type"] == "value_error":
        return f"{dotted}: {error['ctx']['error']}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{dotted}: {message}, not {error['input']!r}"


_UNION_TAGS = {"grpo", "ppo", "RewardFunctionConfig", "str"}


def _unknown(key: str, kind: type[Section], dotted: str) -> str:
    known = sorted(set(_dotted_keys(kind)))
    close = difflib.get_close_matches(dotted or key, known, n=1, cutoff=0.8)
    if not close:
        last = key.rpartition(".")[2]
        close = [name for name in known if name.rpartition(".")[2] == last][:1]
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{dotted or key}: unknown key{hint}"


def _dotted_keys(kind: Any, prefix: str = "") -> Iterator[str]:
    for name, info in kind.model_fields.items():
        yield prefix + name
        for inner in _sections_in(info.annotation):
            yield from _dotted_keys(inner, f"{prefix}{name}.")


def _sections_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]


def _between_sections(kind: type[Section], sections: Mapping[str, Any]) -> Iterator[str]:
    """Combinations that no section can see alone; each check runs when the sections it names are sound."""
    for names, check in _CHECKS:
        if all(name in sections for name in names) and all(name in kind.model_fields for name in names):
            message = check(*(sections[name] for name in names))
            if message:
                yield message


def _critic_path_needs_critic(model: Any, algorithm: Any) -> str | None:
    if model.critic_path is not None and algorithm.type != "ppo":
        return f"model.critic_path: algorithm.type {algorithm.type} has no critic; remove it or use algorithm.type: ppo"
    return None


def _group_of_one(algorithm: Any) -> str | None:
    if algorithm.type == "grpo" and algorithm.group_size == 1:
        return "algorithm.group_size: grpo compares siblings; 1 gives every advantage 0, use at least 2"
    return None


def _more_minibatches_than_prompts(data: Any, algorithm: Any) -> str | None:
    if algorithm.minibatches > data.prompts_per_step:
        return (
            f"algorithm.minibatches: {algorithm.minibatches} optimizer steps cannot share "
            f"data.prompts_per_step: {data.prompts_per_step} prompts; lower it"
        )
    return None


_CHECKS: list[tuple[tuple[str, ...], Callable[..., str | None]]] = [
    (("model", "algorithm"), _critic_path_needs_critic),
    (("algorithm",), _group_of_one),
    (("data", "algorithm"), _more_minibatches_than_prompts),
]
