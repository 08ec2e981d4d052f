"""Rows to ask: verl and TRL rows -> Prompt."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandem.config.tree import DataConfig, SftDataConfig
from tandem.data.chat import encode, messages_of, render
from tandem.data.rows import BadRow, Row, cell, read_rows
from tandem.errors import UserError
from tandem.types import Prompt

Item = TypeVar("Item")
Config = TypeVar("Config", DataConfig, SftDataConfig)
UNSUPPORTED = ("images", "videos", "tools", "agent_name")
"""Columns of the verl format that change what the prompt means."""


class Dataset(ABC, Generic[Item, Config]):
    """The rows of some data files, each checked and tokenised at construction.

    Raises UserError for unreadable files, for bad rows if `config.on_bad_row` is "error", and when no row is left.
    """

    description: str
    """One line: files, rows by detected format, rows skipped."""

    def __init__(self, data_files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, config: Config):
        self._tokenizer = tokenizer
        self._config: Config = config
        self._items: list[Item] = []
        formats: Counter[str] = Counter()
        bad: list[str] = []
        for path in data_files:
            for number, row in read_rows(path):
                try:
                    row_format, item = self._read(_supported(row))
                except BadRow as error:
                    bad.append(f"{path}, row {number}: {error}")
                else:
                    formats[row_format] += 1
                    self._items.append(item)
        if bad and (config.on_bad_row == "error" or not self._items):
            raise UserError(_complaint(bad, len(self._items)))
        self.skipped = len(bad)
        found = ", ".join(f"{count:,} {row_format} rows" for row_format, count in formats.items())
        self.description = f"{', '.join(path.name for path in data_files)}: {found}; {len(bad):,} skipped"
        if bad:
            self.description += f", the first: {bad[0]}"

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    @abstractmethod
    def _read(self, row: Row) -> tuple[str, Item]:
        """The format of a row, and what is made of it. Raises BadRow."""


def _supported(row: Row | BadRow) -> Row:
    if isinstance(row, BadRow):
        raise row
    for column in UNSUPPORTED:
        if row.get(column):
            raise BadRow(f"column `{column}` is not supported yet; leave it out, or empty")
    return row


def _complaint(bad: list[str], used: int) -> str:
    mend = "mend them, or leave them out with data.on_bad_row=skip" if used else "no usable row is left"
    return "\n  ".join([f"{len(bad):,} of {used + len(bad):,} rows are bad; {mend}. At most ten are named:", *bad[:10]])


class RLHFDataset(Dataset[Prompt, DataConfig]):
    """Prompts. Messages go through the chat template, with the generation prompt at the end; a string is as it is."""

    @property
    def data_sources(self) -> list[str]:
        return sorted({prompt.data_source for prompt in self._items})

    def _read(self, row: Row) -> tuple[str, Prompt]:
        templated = not isinstance(row.get("prompt"), str)
        text = self._render(row) if templated else cell(row, "prompt", str)
        token_ids = encode(self._tokenizer, text, special_tokens=not templated)
        if len(token_ids) > (limit := self._config.max_prompt_tokens):
            raise BadRow(f"column `prompt` is {len(token_ids):,} tokens long; data.max_prompt_tokens is {limit:,}")
        verl = row.get("data_source") is not None
        data_source = cell(row, "data_source", str) if verl else "default"
        token_array = np.array(token_ids, dtype=np.int32)
        prompt = Prompt(len(self._items), token_array, text, data_source, _ground_truth(row), row)
        return "verl" if verl else "TRL", prompt

    def _render(self, row: Row) -> str:
        messages = messages_of(row, "prompt")
        if messages[-1]["role"] == "assistant":
            raise BadRow("column `prompt` ends with an assistant message: there is nothing left to answer")
        return render(self._tokenizer, messages, generation_prompt=True)


def _ground_truth(row: Row) -> Any:
    """`reward_model.ground_truth`, else the column `ground_truth`, else `answer`, else None."""
    reward_model = cell(row, "reward_model", dict) if row.get("reward_model") else {}
    values = (reward_model.get("ground_truth"), row.get("ground_truth"), row.get("answer"))
    return next((value for value in values if value is not None), None)
