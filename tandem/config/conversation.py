"""The section `conversation`: who answers the policy, in how many turns, and how its calls are written."""

import shlex
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Tag, field_validator

from tandem.config.base import (
    MayChange,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    by_type,
    rule,
)
from tandem.config.ecosystem import GymnasiumConfig, OpenEnvConfig, ReasoningGymConfig, TextArenaConfig
from tandem.config.paths import LocalPath, Reference
from tandem.config.tools import ToolConfig


class ToolLimitsConfig(Section):
    """What a call may take."""

    timeout_s: MayChange[PositiveFloat] = 30.0
    """From when a call is sent; a call that waits for its turn is not slow. The policy is told that there was no answer
    in time. The time that an engine stands still for training does not count. As long may a class take for `reset`, for
    `get_reward` and `close` (verl: `calc_reward` and `release`); then the environment has failed."""
    result_characters: PositiveInt = 8192
    """Of a result; the rest is cut, and the policy told how much."""
    calls_at_once: MayChange[PositiveInt] = 256
    """Calls of all tools together that run at once on one rank."""
    calls_a_turn: PositiveInt = 16
    """Calls in one turn of the policy; for further ones it is told that they did not run."""


class ScriptedUserConfig(Section):
    """A user whose words are in the data."""

    type: Literal["scripted"]
    column: str = "user_turns"
    """A list of strings: what the user says after the policy's first answer, its second, and so on."""


class VerlUserConfig(Section):
    """The users of a verl file: `interaction: [{name, class_name, config}]`."""

    type: Literal["verl"]
    path: LocalPath
    timeout_s: MayChange[PositiveFloat] = 120.0
    """For one call of a method; then the environment has failed."""


class ModelUserConfig(Section):
    """A user that a model plays, behind an OpenAI-compatible interface such as `tandem serve`."""

    FREE_TEXT: ClassVar[tuple[str, ...]] = ("instructions", "ends_with")

    type: Literal["model"]
    base_url: str
    """As `http://127.0.0.1:8000/v1`."""
    model: str
    """The model's name there."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key."""
    instructions: str
    """What the model is told of its part. `{column}` stands for a column of the row."""
    ends_with: str = "[DONE]"
    """The conversation is over when the user's words hold this."""
    temperature: NonNegativeFloat = 1.0
    max_tokens: PositiveInt = 512
    timeout_s: MayChange[PositiveFloat] = 120.0
    """For one answer of the model; a second attempt is made, and then the environment has failed."""


UserConfig = Annotated[
    Annotated[ScriptedUserConfig, Tag("scripted")]
    | Annotated[VerlUserConfig, Tag("verl")]
    | Annotated[ModelUserConfig, Tag("model")],
    by_type("scripted"),
]


class ToolsEnvironmentConfig(Section):
    """The policy may call tools. The conversation is over when it speaks without a call, unless there is a user."""

    type: Literal["tools"] = "tools"
    tools: list[ToolConfig] = []
    user: UserConfig | None = None
    """Who answers when the policy speaks without a call."""
    limits: ToolLimitsConfig = ToolLimitsConfig()

    @rule()
    def _someone_answers(self) -> Iterator[str]:
        if not self.tools and self.user is None:
            yield "give tools or a user: nobody would answer the policy"


class EndpointEnvironmentConfig(Section):
    """An agent program, which asks the policy over an OpenAI-compatible endpoint of ours and knows nothing of training:
    one run of it is one trajectory. Each of its calls is a turn, of which `conversation.max_turns` counts. It needs the
    extra `serve`."""

    FREE_TEXT: ClassVar[tuple[str, ...]] = ("command",)

    type: Literal["endpoint"]
    function: Reference | None = None
    """`path/to/file.py:name` or `package.module:name`, called as `function(row, base_url, api_key)`; plain or async. It
    may return a reward, or an object with `reward` and further numbers."""
    command: str | None = None
    """A command in its place: the row is on its standard input as JSON, OPENAI_BASE_URL and OPENAI_API_KEY say whom to
    ask. The last line that it writes may be a reward, or an object with `reward` and further numbers."""
    timeout_s: MayChange[PositiveFloat] = 600.0
    """From an agent's start to its end. The time that an engine stands still for training does not count."""
    agents_at_once: MayChange[PositiveInt] = 64
    """On one rank; others wait for their turn."""

    @field_validator("command")
    @classmethod
    def _can_be_split(cls, command: str | None) -> str | None:
        if command is None:
            return None
        try:
            program = shlex.split(command)[:1]
        except ValueError as error:
            raise ValueError(f"{command!r} is no command: {str(error).lower()}") from None
        if not program or not program[0]:
            raise ValueError(f"{command!r} is no command: it names no program")
        return command

    @rule()
    def _one_program(self) -> Iterator[str]:
        if (self.function is None) == (self.command is None):
            yield "give exactly one of function and command"


class OwnEnvironmentConfig(Section):
    """A class of your own: `tandem.Environment`."""

    type: Literal["own"]
    environment: Reference
    """`path/to/file.py:Class` or `package.module:Class`, made once a trajectory."""
    arguments: dict[str, Any] = {}
    """What it is made with, by name."""
    timeout_s: MayChange[PositiveFloat] = 600.0
    """For each `start`, `step` and `close`; then the environment has failed. The time that an engine stands still for
    training does not count."""


SteppedEnvironmentConfig = (
    ToolsEnvironmentConfig
    | GymnasiumConfig
    | TextArenaConfig
    | ReasoningGymConfig
    | OpenEnvConfig
    | OwnEnvironmentConfig
)
"""Those that answer the policy turn by turn."""
EnvironmentConfig = Annotated[
    Annotated[ToolsEnvironmentConfig, Tag("tools")]
    | Annotated[GymnasiumConfig, Tag("gymnasium")]
    | Annotated[TextArenaConfig, Tag("textarena")]
    | Annotated[ReasoningGymConfig, Tag("reasoning_gym")]
    | Annotated[OpenEnvConfig, Tag("openenv")]
    | Annotated[EndpointEnvironmentConfig, Tag("endpoint")]
    | Annotated[OwnEnvironmentConfig, Tag("own")],
    by_type("tools"),
]


class ConversationConfig(Section):
    """Several turns: the policy speaks, an environment answers, until one of them is done."""

    environment: EnvironmentConfig
    calls: Reference = "auto"
    """How the policy writes calls of tools: `auto` finds it in the chat template, docs/agents.md lists the names; or a
    function of your own, `path/to/file.py:name`, from the text of a turn to `tandem.Answer`."""
    thinking: Literal["all", "template"] = "all"
    """What becomes of the policy's thinking in earlier turns. `all`: it stays, and tokens are only ever appended.
    `template`: the chat template decides; where it drops thinking, a branch begins, which is a row of its own."""
    max_turns: PositiveInt = 8
    """Turns of the policy; one that wants another is truncated."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn of the policy. `generation.max_response_tokens` bounds all turns together, with what is said
    to the policy between them."""
    environment_retries: MayChange[NonNegativeInt] = 2
    """How often a conversation is begun anew, with a fresh environment and the same seed, when its environment failed;
    after that it is masked out and counted."""

    @rule("max_turn_tokens")
    def _agents_say_themselves(self) -> Iterator[str]:
        if self.max_turn_tokens is not None and isinstance(self.environment, EndpointEnvironmentConfig):
            yield f"an agent says with each call how many tokens it wants; leave it out, not {self.max_turn_tokens}"
