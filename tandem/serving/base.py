"""The seam between the HTTP layer and what answers."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from tandem.generation.base import EngineLimits
from tandem.rollout.conversation_images import Line
from tandem.rollout.session import PolicyEndpoint
from tandem.serving.fair_order import FairOrder
from tandem.serving.parameters import AnyParameters
from tandem.types import Completion, Delta, Request, SamplingParams


class Answerer(Protocol):
    """Continues prompts for the endpoint. `generate` and `stream` are called from the event loop that the endpoint runs
    in, the rest also from other threads."""

    @property
    def name(self) -> str:
        """The model's name, which requests must ask for."""
        ...

    @property
    def defaults(self) -> SamplingParams:
        """What holds where a request says nothing. Text completions have a `max_tokens` of their own."""
        ...

    @property
    def limits(self) -> EngineLimits:
        """What requests must keep to."""
        ...

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        ...

    @property
    def turns(self) -> FairOrder:
        """Those of the requests that `generate` and `stream` are called for."""
        ...

    def prompts(self, params: AnyParameters) -> list[Line]:
        """The tokens of each prompt; a chat is one. Raises UserError when they cannot be made."""
        ...

    def policy(self) -> PolicyEndpoint:
        """What answers chats with tools. Raises UserError where the model cannot hold them."""
        ...

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Their text, with or without that of special tokens."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Each sample of `request` as it ends, as GenerationEngine has it."""
        ...

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """The tokens of `request` as they are made, as GenerationEngine has it."""
        ...
