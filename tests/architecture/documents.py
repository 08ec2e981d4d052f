"""Markdown pages, recipes and example scripts -> what they name: words, commands, configuration, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.conftest import ROOT

SHELL = ("", "sh", "bash", "shell", "console")
"""What a block of shell commands may call itself; an indented block says nothing."""


@dataclass(frozen=True)
class Mention:
    """A piece of a document's code, and where it stands."""

    place: str
    """`docs/engines.md:12`."""
    text: str


@dataclass
class Document:
    """What one file names."""

    path: Path
    words: list[Mention] = field(default_factory=list[Mention])
    """Inline code."""
    lines: list[Mention] = field(default_factory=list[Mention])
    """Lines of shell blocks and comments, in which commands may stand; continued lines are joined."""
    yaml: list[Mention] = field(default_factory=list[Mention])
    """Blocks of YAML."""
    python: list[Mention] = field(default_factory=list[Mention])
    """Blocks of Python."""
    links: list[Mention] = field(default_factory=list[Mention])
    """Targets of links that are no addresses."""
    anchors: set[str] = field(default_factory=set[str])
    """Of the headings, as GitHub makes them."""


def read_markdown(path: Path, text: str) -> Document:
    document = Document(path)
    heading = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "heading_open":
            heading = True
        elif token.type in ("fence", "code_block"):
            _read_block(document, token, line + (token.type == "fence"))
        elif token.type == "inline":
            if heading:
                document.anchors.add(anchor(token))
            heading = False
            _read_inline(document, token, line)
    return document


def read_plain(path: Path, text: str) -> Document:
    """A recipe, a script, the docstring of an example: any line may hold a command."""
    document = Document(path)
    document.lines += _commands(path, "\n".join(line.lstrip("# ") for line in text.splitlines()), 1)
    return document


def anchor(heading: Token) -> str:
    """The heading's words in lower case with dashes between them, punctuation left out."""
    plain = "".join(child.content for child in heading.children or [] if child.type in ("text", "code_inline"))
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def _read_inline(document: Document, inline: Token, line: int) -> None:
    for child in inline.children or []:
        if child.type == "softbreak":
            line += 1
        place = _place(document.path, line)
        if child.type == "code_inline":
            document.words.append(Mention(place, child.content))
        target = str(child.attrs.get("href", child.attrs.get("src", "")))
        if target and "://" not in target:
            document.links.append(Mention(place, target))


def _read_block(document: Document, token: Token, line: int) -> None:
    language = token.info.split()[0] if token.info.split() else ""
    mention = Mention(_place(document.path, line), token.content)
    if language == "yaml":
        document.yaml.append(mention)
    elif language == "python":
        document.python.append(mention)
    elif language in SHELL:
        document.lines += _commands(document.path, token.content, line)


def _commands(path: Path, text: str, line: int) -> Iterator[Mention]:
    joined = ""
    for number, part in enumerate(text.splitlines(), line):
        joined += part
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        yield Mention(_place(path, number), joined)
        joined = ""


def _place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{line}"
