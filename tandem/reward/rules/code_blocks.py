"""The program in an answer: which of its fenced blocks it is."""

import ast
import re
from collections.abc import Iterator

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")
_PYTHON = re.compile(r"py(thon)?[\d.]*", re.IGNORECASE)
_MOST_PARSED = 1 << 17
"""Characters; what a policy writes may take minutes to parse."""
_MOST_INDENT = 3
"""Spaces that a fence within a block may have more than the one that opens it: else it is a docstring's, say."""


def extract_code(text: str) -> str:
    """The last fenced block of Python behind the reasoning, also one that was cut off; without any, the whole text.

    A block is Python that says so, or that says nothing and holds statements: the output of a program does not.
    """
    answer = text.rpartition("</think>")[2]
    blocks = list(_blocks(answer))
    programs = [code for language, code in blocks if _PYTHON.fullmatch(language) or (not language and _does(code))]
    unmarked = [code for language, code in blocks if not language]
    return next((found[-1] for found in (programs, unmarked) if found), answer)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each. A fence that says Python opens one also where another was not closed."""
    fence, indent, language, lines = "", "", "", list[str]()
    for line in text.splitlines(keepends=True):
        bare, found = line.rstrip(), _FENCE.fullmatch(line.rstrip())
        if found and len(found[1]) > len(indent) + _MOST_INDENT and fence:
            found = None
        if fence and found and not found[3] and found[2].startswith(fence):
            yield language, "".join(lines)
            fence = ""
        elif fence and not found and bare.endswith(fence) and not bare.lstrip().startswith(fence):
            yield language, "".join([*lines, bare.removesuffix(fence)])
            fence = ""
        elif found and (not fence or _PYTHON.fullmatch(found[3])):
            if fence:
                yield language, "".join(lines)
            indent, fence, language, lines = found[1], found[2], found[3], []
        elif fence:
            lines.append(line.removeprefix(indent))
    if fence:
        yield language, "".join(lines)


def _does(code: str) -> bool:
    """Whether it is Python, and more than values and names; a long one is taken for that."""
    if len(code) > _MOST_PARSED:
        return True
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not _is_value(statement) for statement in body)


def _is_value(statement: ast.stmt) -> bool:
    """As what a program prints may look: `5`, `[1, 2]`, `YES`, `Answer: 3`."""
    if isinstance(statement, ast.Expr):
        return not any(isinstance(node, ast.Call | ast.Await | ast.Yield) for node in ast.walk(statement))
    return isinstance(statement, ast.AnnAssign) and statement.value is None
