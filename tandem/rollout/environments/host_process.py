"""What a process that hosts environments runs: one call at a time, each with its instance's random generators.

Messages are JSON, each after its length in four bytes: the configuration, then `{call, id, …}` in; `{result}`,
`{error}` or `{refused}` out.
"""

import ctypes
import json
import random
import signal
import socket
import struct
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from tandem.config.ecosystem import HostedConfig
from tandem.rollout.environments.adapters.base import EnvironmentRefused, Episode, Library
from tandem.signals import leave_stopping_to_the_controller

LENGTH = struct.Struct("!I")


class _Generators:
    """The states of the generators that libraries share, kept for one instance between its calls."""

    def __init__(self, seed: int) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Meanwhile `random` and numpy draw from here; then they go on where they were."""
        others = random.getstate(), np.random.get_state()
        self._put(self._states)
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            self._put(others)

    @staticmethod
    def _put(states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Host:
    """The instances in this process."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._instances: dict[int, tuple[_Generators, Episode]] = {}

    def call(self, message: Mapping[str, Any]) -> Any:
        """Raises what the library raises."""
        number = message["id"]
        if message["call"] == "begin":
            generators = _Generators(message["seed"])
            with generators.in_place():
                episode = self._library.begin(message["seed"], message["options"])
            self._instances[number] = generators, episode
            return episode.observation
        generators, episode = self._instances[number]
        with generators.in_place():
            if message["call"] == "step":
                return asdict(episode.step(message["action"]))
            del self._instances[number]
            return episode.close()


def open_library(config: HostedConfig) -> Library:
    """Raises EnvironmentRefused, and what importing the library raises."""
    return import_module(f"tandem.rollout.environments.adapters.{config.type}").open_library(config)


def main() -> None:
    """Open the library that the configuration names, then answer calls until end of file."""
    leave_stopping_to_the_controller()
    if sys.platform == "linux":  # prctl(PR_SET_PDEATHSIG): a call that never ends must not outlive the trainer
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    stream = connection.makefile("rwb")
    with suppress(BrokenPipeError, ConnectionResetError):
        first = _read(stream)
        if first is None:
            return
        try:
            host = Host(open_library(TypeAdapter[HostedConfig](HostedConfig).validate_python(first)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - importing runs any code
            _write(stream, {"refused": _told(error)})
            return
        _write(stream, {"result": None})
        while (message := _read(stream)) is not None:
            _write(stream, _answer(host, message))


def _answer(host: Host, message: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"result": host.call(message)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a library may raise anything
        return {"error": _told(error)}


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, EnvironmentRefused) else f"{type(error).__name__}: {error}"


def _read(stream: Any) -> Any:
    """None at end of file."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return json.loads(stream.read(LENGTH.unpack(header)[0]))


def _write(stream: Any, message: Mapping[str, Any]) -> None:
    body = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()
