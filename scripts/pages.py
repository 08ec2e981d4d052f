"""Write the generated pages and tables of docs/ anew, from the code: .venv/bin/python scripts/pages.py

docs/configuration.md is the typed tree; the tables of docs/algorithms/README.md are the files of
tandem/algorithms/builtin. `tests/architecture/test_pages.py` fails where a page is not what this writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc, getsource
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

from pydantic.fields import FieldInfo

from tandem.config.algorithms import BUILTIN, LossConfig, OwnAlgorithmConfig, PolicyGradientConfig
from tandem.config.base import MAY_CHANGE, Section
from tandem.config.sections import sections_at
from tandem.config.tree import DpoConfig, EvalConfig, ModelsConfig, SftConfig, TrainConfig

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Configuration

Every key, from the typed sections in `tandem/config/`; `tree.py` puts them together. A configuration file states what
differs from the defaults; `section.key=value` on the command line overrides it. Sizes carry their unit in the name.
Relative paths start at the directory the command runs in, `~` is the home directory; `config.yaml` in a run directory
holds whole paths, so that a run resumes from anywhere. What is passed on as it is (`engine_args`, `arguments`,
`options`) stays as it is.

Files and overrides are YAML 1.2: `1e-3` and `1e3` are numbers, `0o17` is 15 and `017` is 17, booleans are `true` and
`false`. `yes`, `no`, `on` and `off` are text, which keys of kind `bool` understand all the same. The same key twice in
one section is an error. Nothing is written as `null`; `None` is refused. Variables (`$HOME`, `${…}`) are not filled
in, and refused where a path, a number or a name is wanted: the shell fills them in on the command line. A section whose
keys are all left out is one of defaults, and a section `algorithm` without a type is GRPO. Where a list of files is
wanted, one file may stand.

All mistakes are told in one start, with what stands behind a misspelt name: that is taken for the name that was
probably meant. What a section must keep are the methods marked `@rule` of its class, what several must keep together
the functions in `tandem/config/rules/`.

A run that is continued with `--resume` may change the keys marked *may change* (`tandem/config/resume.py`): resources,
time-outs, what is recorded, and how long the run goes. The others decide what the run learns, and stay as they were.
"""
COMMANDS: dict[str, type[ModelsConfig]] = {
    "`tandem train`, `tandem check`": TrainConfig,
    "`tandem eval`": EvalConfig,
    "`tandem sft`, `tandem reward-model`": SftConfig,
    "`tandem dpo`": DpoConfig,
}
RESULT = re.compile(
    r"^pass@1 before (.*), after (.*) \((\d+) steps\); a mean reward of 0\.8 after (.*) steps\.$", re.MULTILINE
)
"""What examples/sort4/curves.py writes to the page of an algorithm."""
ALTERNATIVES = 4
"""So many sections or more at one key: what they share, if anything, is shown once, before them."""


def configuration() -> str:
    """docs/configuration.md."""
    lines = [HEAD]
    seen: dict[str, list[str]] = {}
    for command, config in COMMANDS.items():
        own: list[str] = []
        as_above: list[str] = []
        for name, field in config.model_fields.items():
            sections = sections_at(field)
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


def tables(name: str, sections: list[type[Section]], outer: str = "") -> list[str]:
    """A table for each section that may stand at a key; `outer`: as in `rows`."""
    shared = next(base for base in sections[0].__mro__ if all(issubclass(section, base) for section in sections))
    if len(sections) < ALTERNATIVES or not shared.model_fields:
        titles = [titled(name, section) if len(sections) > 1 else name for section in sections]
        tables_of = zip(titles, sections, strict=True)
        return [
            line
            for title, section in tables_of
            for line in [
                *table(title, section, [*rows(section, f"{name}.", outer)]),
                *alternatives_in(name, section, outer),
            ]
        ]
    common = [row for row in rows(shared, f"{name}.", outer) if not row.startswith(f"| `{name}.type`")]
    lines = table(f"{name}, of every type", shared, common)
    for section in sections:
        own = [row for row in rows(section, f"{name}.", outer) if row not in common]
        own = [row for row in own if section is OwnAlgorithmConfig or not row.startswith(f"| `{name}.type`")]
        types = ", ".join(get_args(section.model_fields["type"].annotation)) or "your own"
        lines += table(f"{name}.type: {types}", section, own)
    for key, field in shared.model_fields.items():
        if len(sections_at(field)) >= ALTERNATIVES:
            lines += tables(f"{name}.{key}", sections_at(field), on_resume(field, outer))
    return lines


def alternatives_in(name: str, section: type[Section], outer: str) -> Iterator[str]:
    """Tables for the keys of a section at which several kinds of sections may stand, or a list of them."""
    for key, field in section.model_fields.items():
        if len(sections_at(field)) > 1:
            yield from tables(f"{name}.{key}", sections_at(field), on_resume(field, outer))


def titled(name: str, section: type[Section]) -> str:
    """The heading of one of a few alternatives."""
    (type_,) = get_args(section.model_fields["type"].annotation)
    return f"{name} (type: {type_})"


def table(title: str, section: type[Section], lines: list[str]) -> list[str]:
    about = "" if section is Section else " ".join((section.__doc__ or "").split())
    head = ["| key | kind | default | on resume | |", "| --- | --- | --- | --- | --- |"]
    return [f"### {title}", "", *([about, ""] if about else []), *([*head, *lines, ""] if lines else [])]


def rows(section: type[Section], prefix: str, outer: str = "", values: Section | None = None) -> Iterator[str]:
    """`outer`: the rule on resume of the section, `values`: what an outer section has as its default for this one."""
    for name, field in section.model_fields.items():
        inner, rule = sections_at(field), on_resume(field, outer)
        optional = len(get_args(field.annotation)) > 1
        default = field.get_default(call_default_factory=True) if values is None else getattr(values, name)
        if len(inner) != 1 or optional or "list" in str(field.annotation):
            stated = "required" if field.is_required() and values is None else shown(default)
            yield f"| `{prefix}{name}` | {kind(field)} | {stated} | {rule} | {about(section, name)} |"
        if len(inner) == 1 and "list" not in str(field.annotation):
            yield from rows(inner[0], f"{prefix}{name}.", rule, default if isinstance(default, Section) else None)


def kind(field: FieldInfo) -> str:
    inner = sections_at(field)
    if len(inner) > 1:
        return "list, each by its type" if "list" in str(field.annotation) else "by its type"
    if len(inner) == 1 and type(None) in get_args(field.annotation):
        return "section or null"
    if len(inner) == 1 and any(bool in get_args(part) for part in get_args(field.annotation)):
        return "bool or section" if inner[0].model_fields else "bool"
    return kind_of(field.annotation)


def kind_of(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    values = [repr(part) if isinstance(part, str) else kind_of(part) for part in get_args(annotation)]
    name = str(annotation).removeprefix("typing.").split("[")[0]
    if name == "Literal":
        return ", ".join(value.strip("'") for value in values)
    if name == "Annotated":
        return values[0]
    return (
        f"{name} of {', '.join(values)}"
        if name in ("list", "tuple")
        else " or ".join(values).replace("NoneType", "null")
    )


def about(section: type[Section], name: str) -> str:
    """What a key is for: said where it is declared, or where the section it is inherited from declares it."""
    field = section.model_fields[name]
    declared = (base for base in section.__mro__ if issubclass(base, Section) and base is not Section)
    said = next((text for base in declared if (text := docstrings(base).get(name))), None)
    inner = sections_at(field)
    if said is None and len(inner) == 1:
        said = inner[0].__doc__
    return " ".join((said or "").split())


@cache
def docstrings(section: type[Section]) -> dict[str, str]:
    """What stands below each field that the section itself declares."""
    (declared,) = ast.parse(dedent(getsource(section))).body
    assert isinstance(declared, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in pairwise(declared.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = cleandoc(text)
            case _:
                pass
    return found


def on_resume(field: FieldInfo, outer: str = "") -> str:
    """What may be done to a key of a resumed run; `outer`: to the section that it is in."""
    return "may change" if MAY_CHANGE in field.metadata else outer


def shown(default: Any) -> str:
    """A default; of a section that has types, the type and what differs from it."""
    if isinstance(default, dict) and set(default) == {"type"}:
        return str(default["type"])
    if not isinstance(default, Section):
        return str(default).replace("None", "null")
    own = {name: value for name, value in default if value != type(default).model_fields[name].default}
    return ", ".join([str(getattr(default, "type", "")), *(f"{name}: {value}" for name, value in own.items())])


def algorithms() -> str:
    """docs/algorithms/README.md, with its tables anew."""
    page = (DOCS / "algorithms/README.md").read_text(encoding="utf-8")
    page = between(page, "algorithms", table_of(PolicyGradientConfig, "advantages"))
    page = between(page, "losses", table_of(LossConfig, "what is minimised"))
    return between(page, "results", results())


def table_of(base: type[Section], column: str) -> str:
    """A row for each built-in section of a kind: its name with its page, and what its docstring says."""
    found = BUILTIN.sections(base)
    lines = [f"| name | {column} | group size | loss |" if base is PolicyGradientConfig else f"| name | {column} |"]
    lines += ["|---|---|---|---|" if base is PolicyGradientConfig else "|---|---|"]
    for name, section in found.items():
        cells = [f"[{name}]({name}.md)", " ".join((section.__doc__ or "").split())]
        if base is PolicyGradientConfig:
            cells += [str(section.model_fields["group_size"].default), shown(section.model_fields["loss"].default)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def results() -> str:
    """A row for each page with a result of examples/sort4/curves.py."""
    lines = ["| name | pass@1 before | after, by seed | steps | to a mean reward of 0.8 |", "|---|---|---|---|---|"]
    for page in sorted((DOCS / "algorithms").glob("*.md")):
        if found := RESULT.search(page.read_text(encoding="utf-8")):
            lines.append(f"| {page.stem} | {' | '.join(found.groups())} |")
    return "\n".join(lines)


def between(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of the generated table `name`."""
    pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
    assert pattern.search(page), f"there is no table {name!r} to fill"
    return pattern.sub(lambda found: found[1] + text + found[2], page)


PAGES = {DOCS / "configuration.md": configuration, DOCS / "algorithms/README.md": algorithms}


if __name__ == "__main__":
    for page, render in PAGES.items():
        page.write_text(render(), encoding="utf-8")
