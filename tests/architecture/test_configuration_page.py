"""docs/configuration.md says what the typed tree says. Run this file to write the page anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic.fields import FieldInfo

from tandem.config.algorithms import PUBLISHED, PolicyGradientConfig
from tandem.config.base import MAY_CHANGE, Section
from tandem.config.tree import DpoConfig, EvalConfig, ModelsConfig, SftConfig, TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

Every key, from the typed tree in `tandem/config/tree.py`. A configuration file states what differs from the defaults;
`section.key=value` on the command line overrides it. Relative paths start at the directory the command runs in, `~` is
the home directory; `config.yaml` in a run directory holds whole paths, so that a run resumes from anywhere. What is
passed on as it is (`engine_args`, `arguments`, `options`) stays as it is.

Files and overrides are YAML 1.2: `1e-3` and `1e3` are numbers, `0o17` is 15 and `017` is 17, booleans are `true` and
`false`. `yes`, `no`, `on` and `off` are text, which keys of kind `bool` understand all the same. The same key twice in
one section is an error.

A run that is continued with `--resume` may change the keys marked *may change* (`tandem/config/resume.py`): resources,
time-outs, what is recorded, and how long the run goes. The others decide what the run learns, and stay as they were.
"""


def sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


def kind(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    values = [repr(part) if isinstance(part, str) else kind(part) for part in get_args(annotation)]
    name = str(annotation).removeprefix("typing.").split("[")[0]
    if name == "Literal":
        return ", ".join(value.strip("'") for value in values)
    if name == "Annotated":
        return values[0]
    if len(values) > 3 and all(issubclass(part, Section) for part in get_args(annotation)):
        return "by its type"
    return (
        f"{name} of {', '.join(values)}"
        if name in ("list", "tuple")
        else " or ".join(values).replace("NoneType", "null")
    )


def on_resume(field: FieldInfo, outer: str = "") -> str:
    """What may be done to a key of a resumed run; `outer`: to the section that it is in."""
    return "may change" if MAY_CHANGE in field.metadata else outer


def rows(section: type[Section], prefix: str, outer: str = "", values: Section | None = None) -> Iterator[str]:
    """`outer`: the rule on resume of the section, `values`: what an outer section has as its default for this one."""
    for name, field in section.model_fields.items():
        inner, rule = sections_in(field.annotation), on_resume(field, outer)
        if len(inner) == 1 and "list" not in str(field.annotation):
            value = field.default if values is None else getattr(values, name)
            yield from rows(inner[0], f"{prefix}{name}.", rule, value if isinstance(value, Section) else None)
            continue
        default = "required" if field.is_required() else shown(field.get_default(call_default_factory=True))
        default = default if values is None else shown(getattr(values, name))
        about = " ".join((field.description or "").split())
        yield f"| `{prefix}{name}` | {kind(field.annotation)} | {default} | {rule} | {about} |"


def shown(default: Any) -> str:
    """A default; of a section that has types, the type and what differs from it."""
    if not isinstance(default, Section):
        return str(default).replace("None", "null")
    own = {name: value for name, value in default if value != type(default).model_fields[name].default}
    return ", ".join([str(getattr(default, "type", "")), *(f"{name}: {value}" for name, value in own.items())])


def table(title: str, section: type[Section], lines: list[str]) -> list[str]:
    about = "" if section is Section else " ".join((section.__doc__ or "").split())
    head = ["| key | kind | default | on resume | |", "| --- | --- | --- | --- | --- |"]
    return [f"### {title}", "", *([about, ""] if about else []), *([*head, *lines, ""] if lines else [])]


def tables(name: str, sections: list[type[Section]], outer: str = "") -> list[str]:
    """A table a section; what many sections have in common comes once, before them. `outer`: as in `rows`."""
    shared = next(base for base in sections[0].__mro__ if all(issubclass(section, base) for section in sections))
    if len(sections) < 4:
        return [line for section in sections for line in table(name, section, [*rows(section, f"{name}.", outer)])]
    common = [*rows(shared, f"{name}.", outer)]
    lines = table(f"{name}, of every type", shared, common)
    if issubclass(shared, PolicyGradientConfig):
        lines += ["What names bring along:", ""]
        lines += [
            f"- {type_}: `{yaml.safe_dump(own, default_flow_style=True).strip()}`" for type_, own in PUBLISHED.items()
        ]
        lines += [""]
    for section in sections:
        own = [row for row in rows(section, f"{name}.", outer) if row not in common and f"| `{name}.type`" not in row]
        lines += table(f"{name}.type: {', '.join(get_args(section.model_fields['type'].annotation))}", section, own)
    for key, field in shared.model_fields.items():
        if len(sections_in(field.annotation)) > 3:
            lines += tables(f"{name}.{key}", sections_in(field.annotation), on_resume(field, outer))
    return lines


COMMANDS: dict[str, type[ModelsConfig]] = {
    "`tandem train`, `tandem check`": TrainConfig,
    "`tandem eval`": EvalConfig,
    "`tandem sft`, `tandem reward-model`": SftConfig,
    "`tandem dpo`": DpoConfig,
}


def render() -> str:
    lines = [HEAD]
    seen: dict[str, list[str]] = {}
    for command, config in COMMANDS.items():
        own: list[str] = []
        as_above: list[str] = []
        for name, field in config.model_fields.items():
            sections = sections_in(field.annotation)
            if not sections:
                own += table(name, Section, [key for key in rows(config, "") if key.startswith(f"| `{name}`")])
                continue
            section = tables(name, sections, on_resume(field))
            as_above += [f"`{name}`"] if seen.get(name) == section else []
            own += [] if seen.get(name) == section else section
            seen[name] = section
        lines += [f"## {command}", ""]
        if config.NOT_READ:
            names = ", ".join(f"`{name}`" for name in config.NOT_READ)
            lines += [f"A file for `tandem train` will do: its sections {names} are not read.", ""]
        if as_above:
            lines += [f"As above: {', '.join(as_above)}.", ""]
        lines += own
    return "\n".join(lines)


def test_the_page_is_what_the_tree_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), f"run: python {__file__}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
