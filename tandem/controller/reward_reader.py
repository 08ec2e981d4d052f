"""Trajectory -> the token ids that a reward model reads, where its tokenizer or chat template is not the policy's.

    messages --its chat template--> text --its tokenizer--> ids; the score is read after the last of them

docs/rewards.md says what is shown of a conversation. All of it happens in the controller, and the template is rendered
as every other is, within limits (`models/rendering.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tandem.config.model import ModelConfig
from tandem.data.chat import TooLong, encode, refuse_long, render, require_one_bos, require_shown
from tandem.data.messages import messages_of
from tandem.data.rows import BadRow
from tandem.errors import UserError
from tandem.models.rendering import TemplateExceedsLimits
from tandem.rollout.environments.tools import opening_messages
from tandem.rollout.formats.chat_template import with_text
from tandem.rollout.formats.control_tokens import ControlTokens, unused_word
from tandem.types import Demonstration, IntArray, Message, Prompt, Status, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "Ada's “2 + 2 = 4”,\n\n\tand   1234567890 naïve, 漢字 🙂:  def f(x):\n    return x**2"
"""What tokenizers of one vocabulary may still cut otherwise."""
_NO_ANSWER = (Status.ABORTED, Status.ENVIRONMENT_ERROR)
_END = "end"
"""Behind a word that occurs nowhere else: no placeholder of a control token, which has a number there."""


class NotRead(Exception):
    """The reward model has not read an answer; the message says why."""


def make_reward_reader(config: ModelConfig, policy: PreTrainedTokenizerBase) -> RewardReader | None:
    """What reads for `model.reward_model_path`; None where there is none, and where the policy's token ids are what its
    own tokenizer and chat template would make of every conversation. `policy`: the tokenizer of `model.path`, as the
    section `model.chat_template` has changed it.

    Raises UserError where it has no usable tokenizer.
    """
    if config.reward_model_path is None:
        return None
    from tandem.models.loading import load_tokenizer

    own = config.model_copy(update={"path": config.reward_model_path, "chat_template": None})
    tokenizer = load_tokenizer(own)
    same = policy.get_vocab() == tokenizer.get_vocab() and _ids(policy, False) == _ids(tokenizer, False)
    by_ids = same and (_template(tokenizer) is None or _same_template(policy, tokenizer))
    text_by_ids = same and _ids(policy, True) == _ids(tokenizer, True) and policy.eos_token_id == tokenizer.eos_token_id
    if by_ids and text_by_ids:
        return None
    return RewardReader(own, tokenizer, messages_by_ids=by_ids, text_by_ids=text_by_ids)


def _around_text(tokenizer: PreTrainedTokenizerBase, path: Path) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind plain text, as `[CLS]` and `[SEP]`; an end of sequence apart."""
    whole, bare = _ids(tokenizer, True), _ids(tokenizer, False)
    for begin in range(len(whole) - len(bare) + 1):
        if whole[begin : begin + len(bare)] == bare:
            return whole[:begin], whole[begin + len(bare) :]
    raise UserError(
        f"model.reward_model_path: {path} has a tokenizer that cuts a text otherwise where it adds special tokens, so "
        "that nobody can tell what is before it; give a reward model with a chat template, and prompts of messages"
    )


def _ids(tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> list[int]:
    return encode(tokenizer, _PROBE, special_tokens=special_tokens)


def _template(tokenizer: Any) -> str | None:
    """Its source, or of several their mapping as text."""
    return None if tokenizer.chat_template is None else str(tokenizer.chat_template)


def _same_template(policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> bool:
    """The same text, and the same special tokens where it names them."""
    template = _template(own) or ""
    named: list[dict[str, str]] = [
        {name: str(token) for name, token in one.special_tokens_map.items() if name in template}
        for one in (policy, own)
    ]
    return _template(policy) == template and named[0] == named[1]


def row_of_ids(trajectory: Trajectory) -> Demonstration:
    """The policy's own tokens; of several branches those of the one that the trajectory ended in."""
    last = trajectory.every_branch[trajectory.ends_in]
    return Demonstration(0, last.prompt_ids, last.response_ids, last.loss_mask, last.pictures)


class RewardReader:
    """What a reward model reads of trajectories by its own tokenizer and chat template."""

    def __init__(
        self, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, messages_by_ids: bool, text_by_ids: bool
    ) -> None:
        """`model`: the section, with the reward model's path. `messages_by_ids`: of conversations of messages, and
        `text_by_ids`: of prompts that are plain text, the policy's tokens are what its own would be."""
        from tandem.models.loading import most_positions, rows_of_vocabulary

        self.path: Path = model.path
        self.messages_by_ids = messages_by_ids
        self.text_by_ids = text_by_ids
        self._tokenizer = tokenizer
        self._controls = ControlTokens(tokenizer, _template(tokenizer) or "")
        self._before_text, self._after_text = _around_text(tokenizer, model.path)
        self._positions, self._rows = most_positions(model), rows_of_vocabulary(model)

    @property
    def description(self) -> str:
        """What it reads by itself, for a person."""
        if self.messages_by_ids:
            return "prompts of plain text, with their answers, by its own tokenizer"
        if self.text_by_ids:
            return "conversations by its own chat template"
        return "conversations by its own tokenizer and chat template"

    def require_readable(self, prompts: Iterable[Prompt], *, opened: bool) -> None:
        """Raises UserError where it cannot read a short answer to one of them. `opened`: all become conversations of
        messages, as the section `conversation` has them."""
        for prompt in prompts:
            asked = opening_messages(prompt) if opened else _asked(prompt)
            if self._takes_ids(asked):
                continue
            if asked is not None and _template(self._tokenizer) is None:
                raise UserError(
                    f"model.reward_model_path: {self.path} has another tokenizer than the policy and no chat template, "
                    "so that it cannot be shown messages; add chat_template.jinja to its directory"
                )
            try:
                self._read(prompt, asked and [*asked, _says("4")], "4", cut=False)
            except NotRead as error:
                raise UserError(
                    f"model.reward_model_path: data row {prompt.index} cannot be shown to {self.path}: {error}; leave "
                    "such rows out, or put a template that takes them into its chat_template.jinja"
                ) from error

    def rows(self, siblings: Sequence[Trajectory]) -> list[Demonstration | NotRead]:
        """What is read of each. The tokens that all siblings begin with are their prompt, which is computed once."""
        read = [self._row(trajectory) for trajectory in siblings]
        shared = _shared_length([row for row in read if isinstance(row, np.ndarray)])
        return [_split(row, shared) if isinstance(row, np.ndarray) else row for row in read]

    def _row(self, trajectory: Trajectory) -> Demonstration | IntArray | NotRead:
        if trajectory.status in _NO_ANSWER:
            return NotRead("there is no answer")
        conversation = conversation_of(trajectory)
        if self._takes_ids(conversation):
            return row_of_ids(trajectory)
        if trajectory.every_branch[trajectory.ends_in].pictures:
            return NotRead("it shows pictures, which are not shown to a reward model with a tokenizer of its own")
        cut = (trajectory.last_turn or trajectory.status) is Status.TRUNCATED
        try:
            return np.array(self._read(trajectory.prompt, conversation, trajectory.text, cut), np.int32)
        except NotRead as error:
            return error

    def _takes_ids(self, messages: Sequence[Message] | None) -> bool:
        """The policy's; None stands for plain text."""
        return self.text_by_ids if messages is None else self.messages_by_ids

    def _read(self, prompt: Prompt, messages: Sequence[Message] | None, answer: str, cut: bool) -> list[int]:
        """Token ids of the messages, or of plain text. Raises NotRead."""
        try:
            if messages is None:
                ids = self._of_text(prompt.text, answer, cut)
            else:
                ids = self._of_messages([with_text(message) for message in messages], cut)
            require_one_bos(self._tokenizer, ids, templated=messages is not None)
        except TooLong as error:
            raise NotRead(f"it has {error}, and {self._limit}") from error
        except TemplateExceedsLimits as error:
            raise NotRead(error.problem) from error
        except (BadRow, UserError) as error:
            raise NotRead(str(error)) from error
        if len(ids) > self._positions:
            raise NotRead(f"it has {len(ids):,} tokens, and {self._limit}")
        if not ids or max(ids) >= self._rows:
            what = f"token id {max(ids):,}, and the model rows for {self._rows:,}" if ids else "no token"
            raise NotRead(f"its tokenizer makes {what}")
        return ids

    @property
    def _limit(self) -> str:
        return f"the reward model reads {self._positions:,} (max_position_embeddings of {self.path})"

    def _of_text(self, prompt: str, answer: str, cut: bool) -> list[int]:
        """The prompt with the answer behind it, and where the answer was not cut what the tokenizer puts behind a text,
        or else the end of sequence."""
        word = unused_word(prompt, answer)
        ((said,), _) = self._controls.hide([_says(answer)], (), word)
        ids = self._before_text + self._encoded(prompt + str(said["content"]), word)
        end: Any = self._tokenizer.eos_token_id
        after = self._after_text or ([] if end is None or ids[-1:] == [end] else [end])
        return ids if cut else [*ids, *after]

    def _of_messages(self, messages: Sequence[Message], cut: bool) -> list[int]:
        """What the chat template makes of them; of an answer that was cut nothing comes behind its text."""
        word = unused_word(messages)
        hidden, _ = self._controls.hide(messages, (), word)
        open_ended = cut and not messages[-1].get("tool_calls")
        if open_ended:
            hidden[-1] = hidden[-1] | {"content": f"{hidden[-1]['content']}{word}{_END}"}
        text = render(self._tokenizer, hidden)
        require_shown(self._tokenizer, list(messages))
        if open_ended:
            text, found, _ = text.rpartition(mark := f"{word}{_END}")
            text = text.replace(mark, "")  # of a template that shows an answer twice
            if not found:
                raise NotRead("the chat template leaves out the answer")
        return self._encoded(text, word)

    def _encoded(self, text: str, word: str) -> list[int]:
        """Raises TooLong where they are sure to be more than the model has positions."""
        refuse_long(text, self._positions, lambda part: len(encode(self._tokenizer, part, special_tokens=False)))
        return self._controls.encode(text, word)


def conversation_of(trajectory: Trajectory) -> list[Message] | None:
    """The messages of the branch that it ended in, through the policy's last turn; None where the prompt is plain text
    and the answer one turn."""
    if trajectory.opened_with:
        said = list(trajectory.messages)
        while said and said[-1]["role"] != "assistant":  # told when no turn was left
            said.pop()
        return [*trajectory.opened_with, *(said or [_says("")])]
    asked = _asked(trajectory.prompt)
    return None if asked is None else [*asked, _says(trajectory.text)]


def _asked(prompt: Prompt) -> list[Message] | None:
    """The messages of the row; None where it has plain text."""
    plain = isinstance(prompt.row.get("prompt", ""), str)
    return None if plain else messages_of(cast(dict[str, Any], prompt.row), "prompt")


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _shared_length(rows: Sequence[IntArray]) -> int:
    """How many tokens all of them begin with."""
    if not rows:
        return 0
    first, least = rows[0], min(map(len, rows))
    differs = [np.flatnonzero(row[:least] != first[:least]) for row in rows]
    return min([least, *(int(places[0]) for places in differs if len(places))])


def _split(ids: IntArray, prompt: int) -> Demonstration:
    """A row whose first tokens, at least one, are its prompt."""
    prompt = max(prompt, 1)
    return Demonstration(0, ids[:prompt], ids[prompt:], np.zeros(len(ids) - prompt, np.bool_))
