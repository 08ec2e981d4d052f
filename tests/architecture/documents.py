"""Markdown pages, recipes and example scripts -> what they name: words, commands, configuration, links."""

from __future__ import annotations

import ast
import io
import re
import tokenize
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
    under: tuple[Path, ...] = ()
    """The folders that the list item or the row of a table begins with: "- `planning/`: …"."""


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
    spoken_of: list[tuple[Path, ...] | None] = []  # of each open item or row: its folders, once its beginning is read
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "heading_open":
            heading = True
        elif token.type in ("list_item_open", "tr_open"):
            spoken_of.append(None)
        elif token.type in ("list_item_close", "tr_close"):
            spoken_of.pop()
        elif token.type in ("fence", "code_block"):
            _read_block(document, token, line + (token.type == "fence"))
        elif token.type == "inline":
            if heading:
                document.anchors.add(anchor(token))
            heading = False
            if spoken_of and spoken_of[-1] is None:
                spoken_of[-1] = _folders_at_the_start(token)
            _read_inline(document, token, line, next(filter(None, reversed(spoken_of)), ()))
    return document


def read_source(path: Path, text: str) -> Document:
    """A file of the package: what its comments and docstrings write as code. It is about the folder it is in."""
    said: list[tuple[int, str]] = []
    if re.search(r"#.*`", text):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        said += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said += [(line, part) for line, part in enumerate(node.value.value.splitlines(), node.lineno)]
    under = (path.parent.relative_to(ROOT),)
    pieces = [(line, piece) for line, part in sorted(said) for piece in re.findall(r"`([^`]+)`", part)]
    return Document(path, words=[Mention(_place(path, line), piece, under) for line, piece in pieces])


def read_plain(path: Path, text: str) -> Document:
    """A recipe, a script, the docstring of an example: any line may hold a command."""
    document = Document(path)
    document.lines += _commands(path, "\n".join(line.lstrip("# ") for line in text.splitlines()), 1)
    return document


def anchor(heading: Token) -> str:
    """The heading's words in lower case with dashes between them, punctuation left out."""
    plain = "".join(child.content for child in heading.children or [] if child.type in ("text", "code_inline"))
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def _folders_at_the_start(inline: Token) -> tuple[Path, ...]:
    """The folders of the repository in "`a/`: …", "`a/` and `b/`: …"."""
    found: list[Path] = []
    for child in inline.children or []:
        if child.type == "code_inline" and child.content.endswith("/"):
            places = (Path(child.content), Path("tandem", child.content))
            found += [place for place in places if (ROOT / place).is_dir()][:1]
        elif child.type != "text" or child.content.strip() not in ("", ",", "and", "or"):
            break
    return tuple(found)


def _read_inline(document: Document, inline: Token, line: int, under: tuple[Path, ...]) -> None:
    for child in inline.children or []:
        if child.type == "softbreak":
            line += 1
        place = _place(document.path, line)
        if child.type == "code_inline":
            document.words.append(Mention(place, child.content, under))
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
