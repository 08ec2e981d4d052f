"""Who answers a prompt in several turns, by `conversation.environment.type`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from tandem.config.conversation import ConversationConfig, EndpointEnvironmentConfig
from tandem.pictures.shown import ModelPictures
from tandem.rollout.conversation import Conversations
from tandem.rollout.formats.for_tokenizer import make_format
from tandem.rollout.make import make_agent, make_environments
from tandem.rollout.single_turn import DecodeAll, Generate
from tandem.types import Prompt, SamplingParams, Trajectory


class HoldsConversations(Protocol):
    """All conversations of a process, in one event loop."""

    async def open(self) -> None:
        """Before the first one. Raises UserError where what they share is not there, such as a server."""

    async def answer(self, prompt: Prompt, seeds: Sequence[int], sampling: SamplingParams) -> list[Trajectory]:
        """A trajectory for each seed, in their order."""
        ...

    async def close(self) -> None:
        """After the last one."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """The policy, as conversations need it."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    decode: DecodeAll
    """Texts without that of special tokens."""
    generate: Generate
    positions: Callable[[], float]
    """The most tokens of a row that the engine takes, known once it has weights."""
    pictures: ModelPictures | None = None
    """Of a model that sees them."""

    def spell(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens spelled out."""
        tokenizer: Any = self.tokenizer
        return tokenizer.decode(list(token_ids), skip_special_tokens=False)


def make_conversations(config: ConversationConfig, speaker: Speaker) -> HoldsConversations:
    """Nothing is opened yet. Raises UserError where something that is named is not there."""
    tokens = make_format(speaker.tokenizer, speaker.stop_token_ids, config.calls, config.thinking)
    environment = config.environment
    if not isinstance(environment, EndpointEnvironmentConfig):
        environments = make_environments(environment, speaker.pictures)
        return Conversations(
            config, environments, tokens, speaker.generate, speaker.decode, speaker.positions, speaker.pictures
        )
    from tandem.rollout.session import PolicyEndpoint
    from tandem.serving.agent_training import AgentConversations, AgentLimits  # needs the extra `serve`

    limits = AgentLimits(
        environment.timeout_s, config.max_turns, environment.agents_at_once, config.environment_retries
    )
    policy = PolicyEndpoint(tokens, speaker.generate, speaker.positions, speaker.spell, speaker.pictures)
    return AgentConversations(make_agent(environment), limits, policy, speaker.decode)
