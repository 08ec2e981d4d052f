"""The process in which chat templates are rendered: a template is a program, which came with a model.

consumes:     requests, pickled: template, values that it reads, most characters
produces:     a reply each, JSON: [how, text]; `how` is "text", "long", "syntax", or the type of what was raised
waits for:    the next request
unblocked by: it, or the end of the process that asks

Nothing that a template does gets around its limits, for the kernel holds them: it ends this process at `CPU_S` of a
rendering, and gives it no more than `MEMORY_BYTES`. Imports are few, since it starts in every process that renders.
"""

import json
import resource
import signal
import sys
from contextlib import closing, suppress
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 1.0
"""CPU time of a rendering, compiling included; a long conversation takes a hundredth of it."""
MEMORY_BYTES = 2**30
Reply = tuple[str, str]


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` around what the assistant says: shown as what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers renders templates."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without the escapes of HTML that Jinja's own has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _rendered(template: str, values: dict[str, Any], most_characters: int) -> Reply:
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends the process, whatever it computes
    try:
        text: str = _compiled(template).render(**values)
        return ("text", text) if len(text) <= most_characters else ("long", f"{len(text):,}")
    except TemplateSyntaxError as error:
        return "syntax", f"line {error.lineno}: {error.message}"
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return type(error).__name__, str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answer requests until the other side ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with closing(connection), suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            connection.send_bytes(json.dumps(_rendered(*connection.recv())).encode())
