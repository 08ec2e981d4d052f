"""The seam: who owns the tokens of a conversation."""

from collections.abc import Sequence
from typing import Protocol

from tandem.rollout.environment import Answer, ToolSchema
from tandem.types import Message


class Format(Protocol):
    """Messages to tokens and back, for one tokenizer and chat template.

    What the policy has sampled is never rendered again: a conversation's tokens are those of `open`, then in turn what
    was sampled and what `extend` returns. No text of a message becomes a control token.
    """

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens of a conversation up to the policy's next turn. Raises UserError where the template refuses
        them."""
        ...

    def extend(self, ids: Sequence[int], new: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int] | None:
        """The tokens that follow `ids`, which end in a turn of the policy, up to its next turn: its end, where it was
        cut, and the `new` messages.

        None: tokens cannot simply be appended, as where earlier thinking is to be dropped; the caller opens the whole
        conversation afresh, which begins a branch.
        """
        ...

    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[ToolSchema]) -> Answer:
        """What a turn of the policy says. Raises nothing: a call that cannot be read is in `Answer.broken`."""
        ...

    def text(self, ids: Sequence[int], /) -> str:
        """Of tokens, control tokens spelled out."""
        ...
