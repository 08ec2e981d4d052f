"""Rows to ask: verl and TRL rows -> Prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.config.tree import DataConfig
from tandem.data.chat import check_messages, check_supported, check_text, encode, render
from tandem.data.loading import load_rows
from tandem.data.rows import BadRow, Row, RowFormat
from tandem.types import IntArray, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCEPTED = (RowFormat.VERL, RowFormat.PROMPT_COMPLETION, RowFormat.PROMPT)


@dataclass(frozen=True, slots=True)
class _Question:
    text: str
    templated: bool
    """The chat template has put the special tokens in."""
    data_source: str
    ground_truth: Any
    row: Row


class RLHFDataset:
    """The prompts of some data files, every row checked and tokenised at construction.

    A prompt of messages goes through the chat template, with the generation prompt at its end; a string prompt is
    tokenised as it is. Raises UserError for unreadable files, bad rows (by `config.on_bad_row`), and no rows at all.
    """

    skipped: int
    """Bad rows left out."""
    description: str
    """One line: files, rows by detected format, rows skipped by reason."""
    data_sources: list[str]
    """Every `data_source` among the prompts."""

    def __init__(self, data_files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, config: DataConfig):
        self._tokenizer = tokenizer
        self._max_tokens = config.max_prompt_tokens
        files = [Path(file) for file in data_files]
        encoded, report = load_rows(files, ACCEPTED, self._parse, self._encode, config.on_bad_row)
        self._prompts = [
            Prompt(index, token_ids, asked.text, asked.data_source, asked.ground_truth, asked.row)
            for index, (asked, token_ids) in enumerate(encoded)
        ]
        self.data_sources = sorted({prompt.data_source for prompt in self._prompts})
        self.skipped = len(report.bad)
        self.description = report.describe()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def _parse(self, row: Row, _: RowFormat) -> _Question:
        check_supported(row)
        prompt = row["prompt"]
        if isinstance(prompt, str):
            text = check_text(prompt, "prompt")
        else:
            messages = check_messages(prompt, "prompt")
            if messages[-1]["role"] == "assistant":
                raise BadRow("prompt", "ends with an assistant message", "there is nothing left to answer")
            text = render(self._tokenizer, messages, "prompt", generation_prompt=True)
        return _Question(text, not isinstance(prompt, str), _data_source(row), _ground_truth(row), row)

    def _encode(self, questions: list[_Question]) -> list[tuple[_Question, IntArray] | BadRow]:
        chats = iter(encode(self._tokenizer, [q.text for q in questions if q.templated], special_tokens=False))
        plain = iter(encode(self._tokenizer, [q.text for q in questions if not q.templated], special_tokens=True))
        return [self._check_length(q, next(chats if q.templated else plain)) for q in questions]

    def _check_length(self, question: _Question, token_ids: list[int]) -> tuple[_Question, IntArray] | BadRow:
        if not token_ids:
            return BadRow("prompt", "is empty", "the tokenizer makes no token of it")
        if len(token_ids) > self._max_tokens:
            detail = f"{len(token_ids):,} tokens, the limit is {self._max_tokens:,}"
            return BadRow("prompt", "is longer than data.max_prompt_tokens", detail)
        return question, np.array(token_ids, dtype=np.int32)


def _data_source(row: Row) -> str:
    value = row.get("data_source")
    return "default" if value is None else check_text(value, "data_source")


def _ground_truth(row: Row) -> Any:
    """`reward_model.ground_truth`, else the column `ground_truth`, else `answer`, else None."""
    for column in ("reward_model", "extra_info"):
        if not isinstance(row.get(column), dict | None):
            raise BadRow(column, "has the wrong type", f"{type(row[column]).__name__} where a mapping is needed")
    reward_model = row.get("reward_model") or {}
    for value in (reward_model.get("ground_truth"), row.get("ground_truth"), row.get("answer")):
        if value is not None:
            return value
    if reward_model.get("style") == "rule":
        raise BadRow("reward_model", "has no ground_truth", "style: rule needs one")
    return None
