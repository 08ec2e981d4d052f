"""Messages -> the text that a tokenizer's chat template makes of them, within limits of time, memory and size.

A template came with a model and may do anything that Jinja can, such as never end. So it is rendered in a process of
its own (`template_process.py`), which is ended at a limit and started anew with the next rendering.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError
from tandem.models.template_process import CPU_S, MEMORY_BYTES, Reply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_START = "import sys; sys.path[:] = sys.argv[2:]; from tandem.models.template_process import main; main()"
"""The process finds modules where its parent does, and does not run the parent's `__main__` again."""
_CHARACTERS, _CHARACTERS_OF_EACH = 1_000_000, 10
"""A text is at most so long, and so many times longer than what messages and tools hold."""
_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Of a model directory, in which transformers looks for its template."""


class TemplateFailed(Exception):
    """The template raised on these messages; the message says what, and of which type."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.reason = reason
        self.refused = kind == "TemplateError"
        """By the template's own words: `raise_exception`."""


class TemplateExceedsLimits(UserError):
    """The template takes too long, or too much memory, or makes too long a text of these messages."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; put one that ends into model.chat_template.file")
        self.problem = problem
        """Without the mend, which is for the policy's template."""


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    generation_prompt: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """The text of `messages`, of which there is at least one; with `generation_prompt` up to the next turn. The
    template reads `arguments` besides.

    Raises TemplateFailed where the template raises on them, UserError where it is none, TemplateExceedsLimits.
    """
    given: dict[str, Any] = {**(arguments or {}), "messages": list(messages), "tools": list(tools) if tools else None}
    if not _is_rendered_by_jinja(tokenizer):
        return _by_own_code(tokenizer, given, generation_prompt)
    template = _template_of(tokenizer, given["tools"])
    values = given | {"documents": None, "add_generation_prompt": generation_prompt}
    most = _CHARACTERS + _CHARACTERS_OF_EACH * _size(given)
    how, text = _process_of(os.getpid()).ask((template, {**_special_tokens(tokenizer), **values}, most))
    if how == "text":
        return text
    if how == "syntax":
        raise UserError(f"{template_place(tokenizer)}: the chat template is no Jinja template: {text}")
    if (limit := _limits(most).get(how)) is not None:
        roles = ", ".join(str(message.get("role")) for message in messages[:8])
        raise TemplateExceedsLimits(f"{template_place(tokenizer)}: the chat template {limit} on messages of {roles}")
    raise TemplateFailed(how, text)


def template_place(tokenizer: PreTrainedTokenizerBase) -> str:
    """The file that a tokenizer's chat template is from, for messages."""
    directory, template = Path(str(tokenizer.name_or_path)), tokenizer.chat_template
    for name in _FILES:
        with suppress(OSError, ValueError, AttributeError):
            text = (directory / name).read_text(encoding="utf-8")
            own: Any = text if name.endswith(".jinja") else json.loads(text).get("chat_template")
            if own and (own == template or (isinstance(template, str) and template.endswith(str(own)))):
                return str(directory / name)
    return f"model.chat_template.file of {directory}"


def _limits(most_characters: int) -> Mapping[str, str]:
    """What is said of each way to exceed one."""
    return {
        "cpu": f"has not ended after {CPU_S:g} s of computing",
        "died": "has ended the process that renders it",
        "MemoryError": f"takes more than {MEMORY_BYTES >> 30} GiB of memory",
        "RecursionError": "calls itself without an end",
        "long": f"makes more than {most_characters:,} characters",
    }


def _template_of(tokenizer: PreTrainedTokenizerBase, tools: Any) -> str:
    """Of several by name, the one that transformers takes."""
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError as error:
        raise UserError(f"{template_place(tokenizer)}: {error}") from error


def _is_rendered_by_jinja(tokenizer: PreTrainedTokenizerBase) -> bool:
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def _by_own_code(tokenizer: PreTrainedTokenizerBase, given: dict[str, Any], generation_prompt: bool) -> str:
    """Of tokenizers that come with code for it, which `model.trust_remote_code` has allowed, or transformers has."""
    try:
        return str(
            tokenizer.apply_chat_template(
                given["messages"],
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **{name: value for name, value in given.items() if name != "messages"},
            )
        )
    except Exception as error:  # it may raise anything
        raise TemplateFailed(type(error).__name__, str(error)) from error


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """By their names, as templates read them."""
    return {
        name: [str(one) for one in token] if isinstance(token, list | tuple) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
    }


def _size(value: Any) -> int:
    """Characters of all texts in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(inner) for key, inner in value.items())
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


class _Process:
    """The process that renders for this one; started by the first request, and anew after one that has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection[Any, Any] | None = None
        self._pid = 0

    def ask(self, request: tuple[str, dict[str, Any], int]) -> Reply:
        """`how` is also "cpu" or "died" where the request has ended the process."""
        message = pickle.dumps(request)
        with self._lock:
            connection = self._connection or self._start()
            try:
                connection.send_bytes(message)
                how, text = json.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError, BrokenPipeError):
                return ("cpu" if self._end() == signal.SIGPROF else "died"), ""
            except BaseException:  # also Ctrl-C: the reply would be taken for the next one
                self._end()
                raise
            return how, text

    def _start(self) -> Connection[Any, Any]:
        ours, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        command = [sys.executable, "-uP", "-c", _START, str(theirs.fileno()), *sys.path]
        null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
        # Of a group of its own: Ctrl-C is for us.
        self._pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=null, setpgroup=0)
        theirs.close()
        self._connection = Connection(ours.detach())
        return self._connection

    def _end(self) -> int:
        """The signal that has ended it, 0 where none did."""
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@cache
def _process_of(pid: int) -> _Process:
    """One for each process: a fork has its own."""
    return _Process()
