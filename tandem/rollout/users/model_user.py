"""A user that a model plays, behind an OpenAI-compatible interface."""

import os
from collections.abc import Sequence
from typing import Any

from tandem.config.conversation import ModelUserConfig
from tandem.errors import UserError
from tandem.pictures.sources import in_words
from tandem.rollout.environment import EnvironmentFailed
from tandem.rollout.users.base import User, UserTurn
from tandem.types import Message, Prompt

_ATTEMPTS = 2
_OTHER_SIDE = {"user": "assistant", "assistant": "user"}


class ModelUsers:
    """Users that share one connection to a model."""

    def __init__(self, config: ModelUserConfig) -> None:
        """Raises UserError where the client is not installed, or no key is set."""
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise UserError(
                "conversation.environment.user: needs the package openai; install tandem-rl[agents]"
            ) from None
        key = os.environ.get(config.api_key_env)
        if not key:
            raise UserError(
                f"conversation.environment.user.api_key_env: the environment has no variable {config.api_key_env}"
            )
        self.config = config
        self.client = AsyncOpenAI(
            base_url=config.base_url, api_key=key, timeout=config.timeout_s, max_retries=_ATTEMPTS - 1
        )

    async def open(self) -> None: ...

    def make(self, prompt: Prompt) -> User:
        return _ModelUser(self)

    async def close(self) -> None:
        await self.client.close()


class _ModelUser:
    def __init__(self, users: ModelUsers) -> None:
        self._users = users
        self._instructions = ""

    async def start(self, prompt: Prompt) -> None:
        try:
            self._instructions = self._users.config.instructions.format_map(dict(prompt.row))
        except (KeyError, IndexError, ValueError) as error:
            raise EnvironmentFailed(
                f"data row {prompt.index}: conversation.environment.user.instructions cannot be filled in: {error!r}"
            ) from None

    async def reply(self, messages: Sequence[Message]) -> UserTurn:
        config = self._users.config
        asked: Any = [{"role": "system", "content": self._instructions}, *_seen_by_the_user(messages)]
        answer = await self._users.client.chat.completions.create(
            model=config.model, messages=asked, temperature=config.temperature, max_tokens=config.max_tokens
        )
        text = answer.choices[0].message.content or ""
        return UserTurn(None if config.ends_with in text else text)

    async def close(self) -> float | None:
        return None


def _seen_by_the_user(messages: Sequence[Message]) -> list[Message]:
    """What both sides have said in words, with their roles exchanged: the model that plays the user is the assistant of
    its own conversation. It sees no calls of tools, nor the policy's thinking, and need not see pictures."""
    spoken = [message for message in messages if message["role"] in _OTHER_SIDE and message.get("content")]
    return [{"role": _OTHER_SIDE[message["role"]], "content": in_words(message["content"])} for message in spoken]
