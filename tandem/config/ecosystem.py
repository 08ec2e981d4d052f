"""The sections of environments that other libraries define: `conversation.environment.type: gymnasium` and others."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from tandem.config.base import MayChange, PositiveFloat, PositiveInt, Section
from tandem.config.paths import absolute_reference


class _Hosted(Section):
    """Environments of a synchronous library, in processes of their own."""

    arguments: dict[str, Any] = {}
    """What each is made with, by name. A row's column `options` is laid over it (Gymnasium: goes to `reset`)."""
    processes: MayChange[PositiveInt] = 2
    """How many processes of each rank host the environments, each of them many, one call at a time."""
    timeout_s: MayChange[PositiveFloat] = 30.0
    """For one call, from when its process begins with it. A longer one ends the process: conversations with the
    environments in it are begun anew, as with every failure of an environment."""


class GymnasiumConfig(_Hosted):
    """A Gymnasium environment whose observations and actions are texts."""

    type: Literal["gymnasium"]
    environment: Annotated[str, AfterValidator(absolute_reference)]
    """The id of a registered one, `Name-v0` or `module:Name-v0`; or `path/to/file.py:Class`, which has Gymnasium's
    `reset` and `step`, or a function that returns such an object. The row's `seed` and `options` reach `reset`."""


class TextArenaConfig(_Hosted):
    """A game of TextArena for one player."""

    type: Literal["textarena"]
    environment: str
    """Its id, as `Mastermind-v0`."""


class ReasoningGymConfig(_Hosted):
    """A task of reasoning-gym: a question, and a score for the answer, in one turn."""

    type: Literal["reasoning_gym"]
    dataset: str
    """Its name, as `chain_sum`. The question of a row is the first of the data set with the row's `seed`."""
    answer_tag: str | None = None
    """The answer is what stands in the last `<tag>…</tag>`; null: all that the policy says."""


HostedConfig = GymnasiumConfig | TextArenaConfig | ReasoningGymConfig


class OpenEnvConfig(Section):
    """An environment behind an OpenEnv server, which runs elsewhere: one of its sessions for each conversation."""

    type: Literal["openenv"]
    base_url: str
    """As `http://127.0.0.1:8000`."""
    action_field: str | None = None
    """The field of the action that holds what the policy says; null: its only required one."""
    arguments: dict[str, Any] = {}
    """Further fields of each action."""
    observation_field: str | None = None
    """The field of the observation that the policy is told; null: the only one; of several, all of them as
    JSON."""
    sessions_at_once: MayChange[PositiveInt] = 16
    """Of each rank; further conversations wait. The server must allow as many (`max_concurrent_envs`) of all ranks."""
    timeout_s: MayChange[PositiveFloat] = 60.0
    """For one answer of the server."""
