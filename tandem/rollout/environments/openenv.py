"""Environments behind an OpenEnv server, each a session of its WebSocket.

    {type: reset, data: {seed, …}}    -->   {type: observation, data: {observation: {…}, reward, done}}
    {type: step, data: the action}    -->   the same, or {type: error, data: {message, code}}

The protocol is that of openenv-core 0.3 (`openenv/core/env_server/http_server.py`), spoken here without the package.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from tandem.config.ecosystem import OpenEnvConfig
from tandem.errors import UserError
from tandem.rollout.environment import Answer, EnvironmentFailed, Reply, ToolSchema
from tandem.rollout.environments.episodes import Episode, need_package, options_of, seed_of
from tandem.rollout.threads import in_thread
from tandem.types import Message, Prompt

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_KEY = "conversation.environment"
_NOT_SHOWN = ("done", "reward", "metadata")
"""Fields of every observation that the server sends beside it, or not at all."""
_MAX_MESSAGE_BYTES = 16 << 20
_DIRECT = build_opener(ProxyHandler({}))
"""Without the proxy that environment variables may name, as the WebSocket below."""


class OpenEnvEnvironments:
    """Sessions of one server."""

    def __init__(self, config: OpenEnvConfig) -> None:
        """Raises UserError where the client is not installed, or the address is none of a server."""
        need_package("websockets", "openenv")
        if urlsplit(config.base_url).scheme not in ("http", "https"):
            raise UserError(f"{_KEY}.base_url: {config.base_url!r} begins with neither http:// nor https://")
        self.config = config
        self.base_url = config.base_url.rstrip("/")
        self.action_field = ""
        self.slots = asyncio.Semaphore(config.sessions_at_once)

    async def open(self) -> None:
        """Raises UserError where the server is not there, or takes no text."""
        schema = await in_thread(self._read_schema)
        self.action_field = _text_field(schema["action"], self.config)
        wanted = self.config.observation_field
        fields = [name for name in schema["observation"].get("properties", {}) if name not in _NOT_SHOWN]
        if wanted is not None and wanted not in fields:
            raise UserError(
                f"{_KEY}.observation_field: observations have no field {wanted!r}, only {', '.join(fields)}"
            )

    def make(self, prompt: Prompt) -> "OpenEnvEnvironment":
        return OpenEnvEnvironment(self)

    async def close(self) -> None: ...

    def _read_schema(self) -> Mapping[str, Any]:
        try:
            with _DIRECT.open(f"{self.base_url}/schema", timeout=self.config.timeout_s) as answer:
                read = json.load(answer)
        except (URLError, OSError, ValueError) as error:
            raise UserError(
                f"{_KEY}.base_url: {self.base_url}/schema: {error}; is an OpenEnv server running there?"
            ) from None
        if not isinstance(read, dict) or not isinstance(read.get("action"), dict):
            raise UserError(f"{_KEY}.base_url: {self.base_url}/schema describes no action: this is no OpenEnv server")
        return read


class OpenEnvEnvironment:
    """One session."""

    tools: Sequence[ToolSchema] = ()

    def __init__(self, environments: OpenEnvEnvironments) -> None:
        self._environments = environments
        self._config = environments.config
        self._connection: ClientConnection | None = None
        self._has_slot = False
        self._episode = Episode()

    @property
    def numbers(self) -> Mapping[str, float]:
        return {}

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        reset = {**options_of(prompt), "seed": seed_of(prompt)}
        await self._environments.slots.acquire()
        self._has_slot = True
        await self._connect()
        said = await self._ask("reset", reset)
        return self._episode.opening(prompt, self._text_of(said))

    async def step(self, answer: Answer) -> Reply:
        action = {**self._config.arguments, self._environments.action_field: answer.content}
        said = await self._ask("step", action)
        reward = said.get("reward")
        return self._episode.reply(
            self._text_of(said), None if reward is None else float(reward), bool(said.get("done"))
        )

    async def close(self) -> float | None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                with suppress(Exception):  # the server ends the session when the connection does
                    await connection.close()
        finally:
            if self._has_slot:
                self._has_slot = False
                self._environments.slots.release()
        return self._episode.reward_of_rest()

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        url = "ws" + self._environments.base_url.removeprefix("http") + "/ws"
        timeout_s = self._config.timeout_s
        try:
            self._connection = await connect(
                url,
                open_timeout=timeout_s,
                max_size=_MAX_MESSAGE_BYTES,
                ping_interval=None,  # while the process trains nobody would answer in time
                proxy=None,
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise EnvironmentFailed(f"{url}: {error}") from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to one message. Raises EnvironmentFailed where it tells of an error, or there is none in time."""
        from websockets.exceptions import WebSocketException

        assert self._connection is not None
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._connection.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._connection.recv())
        except TimeoutError:
            raise EnvironmentFailed(f"{kind}: the server said nothing for {self._config.timeout_s:g} s") from None
        except WebSocketException as error:
            raise EnvironmentFailed(f"{kind}: the connection ended: {error}") from error
        said = answer.get("data") or {}
        if answer.get("type") == "error":
            raise EnvironmentFailed(f"{kind}: {said.get('code')}: {said.get('message')} {said.get('errors') or ''}")
        return said

    def _text_of(self, said: Mapping[str, Any]) -> str:
        """The observation as text: one field of it, or all as JSON."""
        observation: Mapping[str, Any] = said.get("observation") or {}
        wanted = self._config.observation_field
        if wanted is None and len(observation) == 1:
            (wanted,) = observation
        value = observation if wanted is None else observation.get(wanted)
        return value if isinstance(value, str) else json.dumps(value)


def _text_field(action: Mapping[str, Any], config: OpenEnvConfig) -> str:
    """The field of the action that holds the policy's words. Raises UserError."""
    fields, required = action.get("properties", {}), action.get("required", [])
    open_fields = [name for name in required if name not in config.arguments]
    wanted = config.action_field
    if wanted is None and len(open_fields) == 1:
        (wanted,) = open_fields
    if wanted is None or wanted not in fields:
        raise UserError(
            f"{_KEY}.action_field: name the field of the action that holds the policy's words, one of "
            f"{', '.join(fields)}"
        )
    missing = [name for name in open_fields if name != wanted]
    unknown = [name for name in config.arguments if name not in fields]
    if missing or unknown or wanted in config.arguments:
        raise UserError(
            f"{_KEY}.arguments: an action has the fields {', '.join(fields)}; {wanted} holds the policy's words, the "
            f"other required ones must be here: {', '.join(missing or unknown or [wanted])}"
        )
    if fields[wanted].get("type") not in ("string", None):
        raise UserError(
            f"{_KEY}.action_field: the field {wanted!r} of the action takes {fields[wanted].get('type')}, not text"
        )
    return wanted
