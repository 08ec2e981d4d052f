"""One conversation as it grows: its messages, its exact tokens, and the trajectory that they make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tandem.pictures.shown import ModelPictures
from tandem.rollout.conversation_images import Line, Lines, stored
from tandem.rollout.environment import Answer, ToolSchema
from tandem.rollout.formats.base import Format
from tandem.rollout.record import Node, Spell, TokenTree
from tandem.rollout.single_turn import DecodeAll
from tandem.types import Branch, Completion, IntArray, Message, Picture, Prompt, Status, Trajectory


@dataclass(slots=True)
class Transcript:
    """What was said in a conversation. The policy is asked with `ids`; what it answers goes to `take`, and what is said
    to it then to `tell`."""

    chat_format: Format
    messages: list[Message]
    """All of them, those that open the conversation first."""
    tools: Sequence[ToolSchema] = ()
    pictures: ModelPictures | None = None
    """Of a model that sees pictures: messages may hold them."""
    ids: IntArray = field(init=False)
    """All tokens of the line that the conversation is on now."""
    shown: tuple[Picture, ...] = field(init=False)
    """The pictures among them, with which the policy is asked, too."""
    opening: int = field(init=False)
    """How many messages open it."""
    spent: int = 0
    """Tokens of all turns, and of what was said between them; where a branch begins, the larger of these and of those
    that it has behind what opened the conversation."""
    status: Status = Status.COMPLETED
    rewards: list[float] = field(default_factory=list[float])
    _lines: Lines = field(init=False)
    _opened_with: Line = field(init=False)
    _tree: TokenTree = field(default_factory=TokenTree)
    _last: Node | None = None
    """The turn that `ids` begin with; None where they begin a new line."""
    _author: str = "user"
    """Of the tokens behind it."""

    def __post_init__(self) -> None:
        """Raises UserError where the chat template refuses the messages, and BadPicture."""
        self._lines = Lines(self.chat_format, self.pictures)
        self.messages = stored(self.messages, self.pictures)
        self._opened_with = self._lines.open(self.messages, self.tools)
        self.ids, self.shown = self._opened_with
        self.opening = len(self.messages)

    @property
    def turns(self) -> int:
        """Of the policy."""
        return len(self._tree.nodes)

    def take(self, completion: Completion) -> Answer:
        """A turn of the policy, which was asked with `ids`. Its status is the conversation's until the next turn."""
        answer = self.chat_format.parse(self.ids.tolist(), completion.token_ids.tolist(), self.tools)
        self._last = Node(self._last, self.ids, completion, self._author, pictures=self.shown)
        self._tree.nodes.append(self._last)
        self.ids = self._last.ids
        self.spent += len(completion.token_ids)
        self.status = completion.status
        self.messages.append(answer.message())
        return answer

    def reward(self, reward: float) -> None:
        """For the last turn of the policy."""
        assert self._last is not None, "the policy has not spoken"
        self._last.reward = (self._last.reward or 0.0) + reward
        self.rewards.append(reward)

    def tell(self, messages: Sequence[Message]) -> None:
        """What is said to the policy, after a turn of it. Where tokens cannot simply be appended, a branch begins."""
        messages = stored(messages, self.pictures)
        self.messages += messages
        line = self._lines.extend(Line(self.ids, self.shown), messages, self.tools)
        self._author = str(messages[0]["role"])
        if line is None:
            self._last = None
            self.ids, self.shown = self._lines.open(self.messages, self.tools)
            self.spent = max(self.spent, len(self.ids) - len(self._opened_with.ids))
        else:
            self.spent += len(line.ids) - len(self.ids)
            self.ids, self.shown = line

    def turn_seed(self, seed: int) -> int:
        """Of the policy's next turn, from the trajectory's, which is that of its first turn."""
        if self.turns == 0:
            return seed
        return int(np.random.SeedSequence([seed, self.turns]).generate_state(1, "u8")[0])

    def trajectory(
        self,
        prompt: Prompt,
        sample: int,
        decode: DecodeAll,
        reward: float | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """All of it; `reward` is for the whole, beside those of its turns."""
        spell = self.chat_format.text
        branches = self._tree.branches(spell) or [_without_turns(*self._opened_with, spell)]
        rewards = [*self.rewards, *([] if reward is None else [reward])]
        made = trajectory_of(branches, prompt, sample, self.status, decode)
        if len(branches) > 1:
            made.text = "\n".join(decode([branch.response_ids for branch in branches]))
        made.opened_with, made.messages = tuple(self.messages[: self.opening]), tuple(self.messages[self.opening :])
        made.last_turn = self._tree.nodes[-1].completion.status if self._tree.nodes else None
        made.reward = sum(rewards) if rewards else None
        made.numbers = dict(numbers or {})
        return made


def trajectory_of(
    branches: Sequence[Branch], prompt: Prompt, sample: int, status: Status, decode: DecodeAll
) -> Trajectory:
    """The trajectory whose lines of tokens these are, without what else is known of it."""
    first = branches[0]
    (text,) = decode([first.response_ids])
    return Trajectory(
        prompt=replace(prompt, token_ids=first.prompt_ids, text=first.opening, pictures=first.prompt_pictures),
        sample=sample,
        response_ids=first.response_ids,
        loss_mask=first.loss_mask,
        rollout_logprobs=first.rollout_logprobs,
        versions=first.versions,
        text=text,
        status=status,
        turns=first.turns,
        experts=first.experts,
        branches=tuple(branches[1:]),
        pictures=first.response_pictures,
    )


def _without_turns(prompt_ids: IntArray, pictures: tuple[Picture, ...], spell: Spell) -> Branch:
    """The line of a conversation in which the policy has not spoken."""
    return Branch(
        prompt_ids,
        response_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.bool_),
        rollout_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        opening=spell(prompt_ids.tolist()),
        pictures=pictures,
    )


def trajectory_without_turns(prompt: Prompt, sample: int, status: Status, error: str) -> Trajectory:
    """One that no loss sees."""
    nothing = _without_turns(prompt.token_ids, prompt.pictures, lambda _: prompt.text)
    return Trajectory(
        prompt=prompt,
        sample=sample,
        response_ids=nothing.response_ids,
        loss_mask=nothing.loss_mask,
        rollout_logprobs=nothing.rollout_logprobs,
        versions=nothing.versions,
        text="",
        status=status,
        error=error,
    )
