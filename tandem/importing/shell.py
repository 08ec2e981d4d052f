"""Flags of a launch script, without running it: assignments, `${NAME:-default}`, `$((1024 * 2))`, `key=value` words.

What only a run of the script would tell stays as it is written: the output of commands, arguments of the script, and
variables that are set inside `if`, `case` and loops, of which nobody knows here which branch is taken.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.importing.outcome import parsed

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|declare\s+-\w+\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"\+{0,2}[A-Za-z_][\w-]*(?:\.[\w-]+)+=")
_OPEN, _CLOSE = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


_KEPT = 0xE000
"""Private code points that stand for what the shell would read once more in a variable's value."""

Variables = dict[str, str | list[str]]


def read_flags(path: Path) -> dict[str, str]:
    """`key.of.theirs` -> its text, of the last command that sets it. Raises UserError where there are none."""
    flags: dict[str, str] = {}
    for words in commands(read_text(path)):
        for word in words:
            if _FLAG.match(word):
                key, _, value = word.partition("=")
                flags[key.lstrip("+")] = value
    if not flags:
        raise UserError(f"{path}: no key=value of another framework is set in it; give its launch script or YAML file")
    return flags


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name value value`, `--name`, `--no_name`."""
    found: dict[str, Any] = {}
    name, values = "", list[str]()
    for word in (*words, "--"):
        if not re.match(r"--(?:[A-Za-z]|$)", word):
            values.append(word)
            continue
        if name:
            key, value = _flag(name, values)
            found[key] = value
        name, _, value = word[2:].partition("=")
        values = [value] if value else []
    return found


def _flag(name: str, values: Sequence[str]) -> tuple[str, Any]:
    name = name.replace("-", "_")
    given = [parsed(value.rstrip(",")) for value in values]
    if not given:
        return (name.removeprefix("no_"), False) if name.startswith("no_") else (name, True)
    return name, given[0] if len(given) == 1 else given


def read_text(path: Path) -> str:
    """The whole file. Raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: it cannot be read: {error}") from None


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a script, with what its variables stand for."""
    variables: Variables = {"HOME": "~"}
    depth = 0
    for line in _lines(text):
        first = line.split(maxsplit=1)[0] if line.split() else ""
        depth += (first in _OPEN) - (first in _CLOSE)
        assigned = _ASSIGNMENT.fullmatch(line)
        if not assigned or _FLAG.match(line):
            yield _words(_expanded(line, variables))
        elif depth == 0:
            variables[assigned[1]] = _value(assigned[2], variables)


def _lines(text: str) -> list[str]:
    """Commands, with continued lines and the lines of a bracket joined; comments are left out."""
    found: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        open_bracket = found and found[-1].count("(") > found[-1].count(")") and "=(" in found[-1]
        if open_bracket:
            found[-1] += f" {line}"
        else:
            found += [part.strip() for part in re.split(r";\s*(?=then|do|fi|done|else)", line)]
    return found


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is closed in a way that is not understood here
        words = [word.strip("\"'") for word in line.split()]
    return [re.sub(r"[\ue000-\ue07f]", lambda found: chr(ord(found[0]) - _KEPT), word) for word in words]


def _value(written: str, variables: Variables) -> str | list[str]:
    written = written.strip()
    if written.startswith("("):
        return _words(_expanded(written[1:].removesuffix(")"), variables))
    words = _words(_expanded(written, variables))
    return words[0] if words else ""


def _expanded(text: str, variables: Variables) -> str:
    text = re.sub(r"\$\(\((.*?)\)\)", lambda found: _computed(found[1], variables), text)
    while (start := text.rfind("${")) >= 0:  # the innermost first
        end = text.find("}", start)
        if end < 0:
            break
        inside, quote = text[start + 2 : end], '"' if text[:start].endswith('"') else ""
        if inside.endswith(("[@]", "[*]")):  # an array: each of its words is one, also between quotes
            value = quote + _spelled(variables.get(inside[:-3], [])) + quote
        else:
            value = _parameter(inside, variables)
        text = text[:start] + value + text[end + 1 :]
    text = re.sub(r"\$([A-Za-z_]\w*)", lambda found: _spelled(variables.get(found[1], f"<{found[1]}>")), text)
    return re.sub(r"\$(?:[@*#?]|\d)", "", text)


def _parameter(inside: str, variables: Variables) -> str:
    name, _, default = inside.partition(":-")
    if not default:
        name, _, default = name.partition("-")
    return _spelled(variables.get(name) or default.strip("\"'") or f"<{name}>")


def _spelled(value: str | list[str]) -> str:
    """As it stands in a line that is still to be split into words."""
    if isinstance(value, list):
        return shlex.join(value)
    return re.sub(r"[\s'\"\\]", lambda found: chr(ord(found[0]) + _KEPT), value)


def _computed(expression: str, variables: Variables) -> str:
    def number(found: re.Match[str]) -> str:
        value = variables.get(found[1], found[0])
        return value if isinstance(value, str) else found[0]

    names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", number, expression)
    try:
        return str(_arithmetic(ast.parse(names.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return f"<{expression.strip()}>"


def _arithmetic(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_arithmetic(left), _arithmetic(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_arithmetic(operand)
        case _:
            raise ValueError(ast.dump(node))
