"""docs/configuration.md says what the typed tree says. Run this file to write the page anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from tandem.config.tree import Section, SftConfig, TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

Every key, from the typed tree in `tandem/config/tree.py`. A configuration file states what differs from the defaults;
`section.key=value` on the command line overrides it. Paths are relative to the directory the command runs in.
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
    return (
        f"{name} of {', '.join(values)}"
        if name in ("list", "tuple")
        else " or ".join(values).replace("NoneType", "null")
    )


def rows(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = sections_in(field.annotation)
        if len(inner) == 1 and "list" not in str(field.annotation):
            yield from rows(inner[0], f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
        about = " ".join((field.description or "").split())
        yield f"| `{prefix}{name}` | {kind(field.annotation)} | {default.replace('None', 'null')} | {about} |"


def render() -> str:
    lines = [HEAD]
    for command, config in (("`tandem train`, `tandem eval`", TrainConfig), ("`tandem sft`", SftConfig)):
        lines += [f"## {command}", ""]
        for name, field in config.model_fields.items():
            for section in sections_in(field.annotation):
                about = " ".join((section.__doc__ or "").split())
                lines += [
                    f"### {name}",
                    "",
                    *([about, ""] if about else []),
                    "| key | kind | default | |",
                    "| --- | --- | --- | --- |",
                ]
                lines += [*rows(section, f"{name}."), ""]
    return "\n".join(lines)


def test_the_page_is_what_the_tree_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), f"run: python {__file__}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
