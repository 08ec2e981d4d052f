"""Users written for verl: a YAML file that names classes of interactions.

    interaction:
      - name: gsm8k
        class_name: my_package.interactions.Gsm8k
        config: {}

Each class has start_interaction, generate_response, calculate_score and finalize_interaction. A row chooses its own by
`extra_info.interaction_kwargs.name`; the other entries there are what its conversation starts with.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import uuid4

from tandem.config.conversation import VerlUserConfig
from tandem.errors import UserError
from tandem.files import load_named
from tandem.rollout.environment import EnvironmentFailed
from tandem.rollout.users.base import User, UserTurn
from tandem.rollout.users_code import call, exceptions_only
from tandem.stored import DamagedFile, read_yaml
from tandem.types import Message, Prompt

_KEY = "conversation.environment.user"


class VerlUsers:
    """The interactions of one file, each an object that serves all conversations."""

    def __init__(self, config: VerlUserConfig) -> None:
        """Raises UserError where the file is none of this kind, or names what is not there."""
        self._path = config.path
        self._timeout_s = config.timeout_s
        self._interactions: dict[str, Any] = {}
        for entry in self._entries():
            place, _, kind_name = str(entry.get("class_name")).rpartition(".")
            kind = load_named(f"{place}:{kind_name}", f"{_KEY}: {self._path}:") if place else None
            if not callable(kind):
                raise UserError(f"{_KEY}: {self._path}: there is no class {entry.get('class_name')!r}")
            name = str(entry.get("name") or kind_name)
            try:
                with exceptions_only():
                    self._interactions[name] = kind({"name": name, **(entry.get("config") or {})})
            except Exception as error:  # the user's code may raise anything
                raise UserError(f"{_KEY}: {self._path}: {kind_name}: {type(error).__name__}: {error}") from error

    async def open(self) -> None: ...

    def make(self, prompt: Prompt) -> User:
        return _VerlUser(self._interactions, self._timeout_s)

    async def close(self) -> None: ...

    def _entries(self) -> list[Mapping[str, Any]]:
        try:
            read = read_yaml(self._path, object)
        except DamagedFile as error:
            raise UserError(f"{_KEY}: {error}") from None
        entries = read.get("interaction") if isinstance(read, Mapping) else None
        if not entries or not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            raise UserError(f"{_KEY}: {self._path} has no list `interaction` of {{name, class_name, config}}")
        return cast("list[Mapping[str, Any]]", entries)


class _VerlUser:
    def __init__(self, interactions: Mapping[str, Any], timeout_s: float) -> None:
        self._interactions = interactions
        self._timeout_s = timeout_s
        self._interaction: Any = None
        self._arguments: dict[str, Any] = {}
        self._instance = ""

    async def start(self, prompt: Prompt) -> None:
        extra: Mapping[str, Any] = prompt.row.get("extra_info") or {}
        given: Mapping[str, Any] = extra.get("interaction_kwargs") or {}
        name = given.get("name") or next(iter(self._interactions))
        if name not in self._interactions:
            known = ", ".join(self._interactions)
            raise EnvironmentFailed(f"data row {prompt.index}: there is no interaction {name!r}, only {known}")
        self._interaction = self._interactions[name]
        self._arguments = {key: value for key, value in given.items() if key != "name"}
        self._instance = str(await self._run("start_interaction", uuid4().hex))

    async def reply(self, messages: Sequence[Message]) -> UserTurn:
        result = await self._run("generate_response", self._instance, list(messages))
        if not isinstance(result, tuple) or len(result) != 4:
            raise EnvironmentFailed(f"generate_response returned {result!r:.200}, not (terminate, text, score, extra)")
        terminates, text, score, _ = result
        return UserTurn(None if terminates else str(text), None if score is None else float(score))

    async def close(self) -> float | None:
        if self._interaction is not None:
            await self._run("finalize_interaction", self._instance)
        return None

    async def _run(self, name: str, *arguments: Any) -> Any:
        method = getattr(self._interaction, name)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call(method, *arguments, **self._arguments)
        except TimeoutError as error:
            raise EnvironmentFailed(f"{name}: {str(error) or f'no answer within {self._timeout_s:g} s'}") from error
