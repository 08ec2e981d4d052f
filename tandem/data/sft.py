"""Rows to imitate: `messages`, or `prompt` + `completion` -> Demonstration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.config.tree import SftDataConfig
from tandem.data.chat import ChatMessages, check_messages, check_supported, check_text, encode, render
from tandem.data.loading import load_rows
from tandem.data.rows import BadRow, Row, RowFormat
from tandem.errors import UserError
from tandem.types import BoolArray, Demonstration, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCEPTED = (RowFormat.MESSAGES, RowFormat.PROMPT_COMPLETION)


@dataclass(frozen=True, slots=True)
class _Plain:
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class _Chat:
    text: str
    answers: list[tuple[int, int]]
    """Character ranges to learn: assistant turns, their end-of-turn tokens included."""


_Tokens = tuple[IntArray, IntArray, BoolArray]
"""Prompt, response, loss mask of the response."""


class SftDataset:
    """The demonstrations of some data files, every row checked and tokenised at construction.

    Messages: the loss is on the assistant turns, each with its end-of-turn tokens; the prompt is everything before the
    first of them (before the completion, for a `prompt` of messages), generation prompt included. Strings: prompt and
    completion are tokenised apart, and the completion ends with the EOS token. Raises UserError as RLHFDataset does.
    """

    skipped: int
    """Bad rows left out."""
    description: str
    """One line: files, rows by detected format, rows skipped by reason."""

    def __init__(self, data_files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, config: SftDataConfig):
        self._tokenizer = tokenizer
        self._max_tokens = config.max_tokens
        files = [Path(file) for file in data_files]
        rows, report = load_rows(files, ACCEPTED, self._parse, self._encode, config.on_bad_row)
        self._demonstrations = [Demonstration(index, *tokens) for index, tokens in enumerate(rows)]
        self.skipped = len(report.bad)
        self.description = report.describe()

    def __len__(self) -> int:
        return len(self._demonstrations)

    def __getitem__(self, index: int) -> Demonstration:
        return self._demonstrations[index]

    def _parse(self, row: Row, row_format: RowFormat) -> _Plain | _Chat:
        check_supported(row)
        if row_format is RowFormat.MESSAGES:
            messages = check_messages(row["messages"], "messages")
            first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
            if first == 0:
                raise BadRow("messages", "has no assistant turn after a prompt")
            return self._find_answers(messages, first, "messages")
        if isinstance(row["prompt"], str):
            return _Plain(check_text(row["prompt"], "prompt"), check_text(row["completion"], "completion"))
        prompt = check_messages(row["prompt"], "prompt")
        completion = check_messages(row["completion"], "completion")
        if completion[0]["role"] != "assistant":
            raise BadRow("completion", "does not begin with an assistant message", f"but {completion[0]['role']}")
        return self._find_answers(prompt + completion, len(prompt), "completion")

    def _find_answers(self, messages: ChatMessages, first: int, column: str) -> _Chat:
        """Locate the assistant turns from message `first` on, by templating the conversation up to each of them."""
        text = render(self._tokenizer, messages, column)
        answers = []
        for turn in range(first, len(messages)):
            if messages[turn]["role"] == "assistant":
                before = render(self._tokenizer, messages[:turn], column, generation_prompt=True)
                through = render(self._tokenizer, messages[: turn + 1], column)
                if not (text.startswith(through) and through.startswith(before)):
                    detail = f"the text up to message {turn + 1} is not how the whole conversation begins"
                    raise BadRow(column, "cannot be split into turns by this chat template", detail)
                answers.append((len(before), len(through)))
        return _Chat(text, answers)

    def _encode(self, rows: list[_Plain | _Chat]) -> list[_Tokens | BadRow]:
        plain = iter(self._encode_plain([row for row in rows if isinstance(row, _Plain)]))
        chats = iter(self._encode_chats([row for row in rows if isinstance(row, _Chat)]))
        return [self._check(next(plain if isinstance(row, _Plain) else chats)) for row in rows]

    def _encode_plain(self, rows: list[_Plain]) -> list[_Tokens]:
        prompts = encode(self._tokenizer, [row.prompt for row in rows], special_tokens=True)
        completions = encode(self._tokenizer, [row.completion for row in rows], special_tokens=False)
        eos = self._tokenizer.eos_token_id
        for ids in completions:
            if isinstance(eos, int) and ids[-1:] != [eos]:
                ids.append(eos)
        return [
            (np.array(prompt, np.int32), np.array(completion, np.int32), np.ones(len(completion), np.bool_))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def _encode_chats(self, rows: list[_Chat]) -> list[_Tokens]:
        if not rows:
            return []
        if not self._tokenizer.is_fast:
            raise UserError("messages need a fast tokenizer (tokenizer.json), which tells the characters of each token")
        texts = [row.text for row in rows]
        encoded = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        columns: Any = zip(rows, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [_split(row, np.array(ids, np.int32), [start for start, _ in spans]) for row, ids, spans in columns]

    def _check(self, tokens: _Tokens) -> _Tokens | BadRow:
        prompt, response, mask = tokens
        if (length := len(prompt) + len(response)) > self._max_tokens:
            detail = f"{length:,} tokens, the limit is {self._max_tokens:,}"
            return BadRow(None, "prompt and answer together are longer than data.max_tokens", detail)
        if len(prompt) == 0 or not mask.any():
            return BadRow(None, "the tokenizer makes no token of the prompt, or none of the answer")
        return tokens


def _split(row: _Chat, token_ids: IntArray, starts: list[int]) -> _Tokens:
    """`starts`: the character where each token begins; it belongs to the part that holds this character."""
    start = np.array(starts, np.int64)
    learned = np.zeros(len(start), np.bool_)
    for begin, end in row.answers:
        learned |= (begin <= start) & (start < end)
    cut = int(np.searchsorted(start, row.answers[0][0]))
    return token_ids[:cut], token_ids[cut:], learned[cut:]
