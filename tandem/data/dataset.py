"""Rows to ask, flat or in verl's form -> Prompt. docs/data.md has a table of the columns."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandem.config.tree import DataConfig, SftDataConfig
from tandem.data.chat import Messages, encode, messages_of, render
from tandem.data.pictures import Takes, refuse_pictures, take_pictures, without_pixels
from tandem.data.rows import BadRow, Row, cell, ground_truth_of, read_rows
from tandem.errors import UserError
from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.pictures.videos import Video
from tandem.types import IntArray, Picture, Prompt

Item = TypeVar("Item")
Config = TypeVar("Config", DataConfig, SftDataConfig)
UNSUPPORTED = ("tools",)
"""Columns of the verl format that change what the prompt means."""
_FIRST_LINE_S, _LINE_S = 2.0, 10.0
"""Until the first line of progress, and between two."""


class Dataset(ABC, Generic[Item, Config]):
    """The rows of some data files, each checked and tokenised at construction.

    Raises UserError for unreadable files, for bad rows if `config.on_bad_row` is "error", when no row is left, and for
    pictures that the model does not see. `pictures` prepares them; without it there may be none.
    """

    description: str
    """One line: files, rows by detected format, rows skipped."""

    def __init__(
        self,
        data_files: Sequence[Path],
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        pictures: ModelPictures | None = None,
    ):
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._config: Config = config
        self._items: list[Item] = []
        formats: Counter[str] = Counter()
        bad: list[str] = []
        say_at = time.monotonic() + _FIRST_LINE_S
        self.items_of_files: list[int] = []
        """Items that each file gave, in the order of the files."""
        for path in data_files:
            items_before = len(self)
            for number, row in read_rows(path):
                if time.monotonic() > say_at:
                    print(f"{path.name}: {number:,} rows read", flush=True)
                    say_at = time.monotonic() + _LINE_S
                try:
                    row_format, items = self.read(row, path.parent)
                except BadRow as error:
                    bad.append(f"{path}, row {number}: {error}")
                else:
                    formats[row_format] += 1
                    self._items.extend(items)
            self.items_of_files.append(len(self) - items_before)
        if bad and (config.on_bad_row == "error" or not self._items):
            mend = "mend them, or leave them out with data.on_bad_row=skip" if self._items else "no usable row is left"
            first = "\n  ".join(bad[:10])
            raise UserError(f"{len(bad):,} of {len(bad) + len(self):,} rows are bad; {mend}. The first:\n  {first}")
        self.skipped = len(bad)
        found = ", ".join(f"{count:,} {row_format} rows" for row_format, count in formats.items())
        skipped = f"{len(bad):,} skipped" + (f", the first: {bad[0]}" if bad else "")
        self.description = f"{', '.join(path.name for path in data_files)}: {found}; {skipped}"

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    def read(self, row: Row | BadRow, folder: Path) -> tuple[str, Sequence[Item]]:
        """The format of a row, and what is made of it, without taking it in. `folder`: that of its file. Raises
        BadRow."""
        if isinstance(row, BadRow):
            raise row
        for column in UNSUPPORTED:
            if row.get(column):
                raise BadRow(f"column `{column}` is not supported yet; leave it out, or empty")
        return self._read(row, folder)

    @abstractmethod
    def _read(self, row: Row, folder: Path) -> tuple[str, Sequence[Item]]:
        """As `read`."""

    @property
    def _sees(self) -> bool:
        """The model sees pictures."""
        return self._pictures is not None and self._pictures.format is not None

    @property
    def _sees_videos(self) -> bool:
        """And videos."""
        return self._pictures is not None and self._pictures.format is not None and bool(self._pictures.format.videos)

    def _take_pictures(self, row: Row, messages: Messages, folder: Path) -> tuple[Messages, list[Picture | Video]]:
        """The messages as the chat template takes them, and the pictures and videos in them, stored. Raises BadRow."""
        takes = Takes(pictures=self._sees, videos=self._sees_videos)
        messages, sources = take_pictures(row, messages, takes)
        if not sources:
            return messages, []
        if self._pictures is None:
            raise BadRow("it has pictures, and no store was given for them")
        try:
            return messages, self._pictures.prepare_all(sources, folder)
        except BadPicture as error:
            raise BadRow(str(error)) from error

    def _expand(
        self, ids: Sequence[int], pictures: Sequence[Picture | Video]
    ) -> tuple[IntArray, IntArray, tuple[Picture, ...]]:
        """Token ids with all placeholders, which token of `ids` each comes from, and the pictures with their places."""
        if self._pictures is None:
            return np.array(ids, np.int32), np.arange(len(ids)), ()
        try:
            expanded, origins, placed = self._pictures.expand(ids, pictures)
        except BadPicture as error:
            raise BadRow(f"{error}{self._spelled(ids, pictures)}") from error
        return expanded, origins, tuple(placed)

    def _spelled(self, ids: Sequence[int], pictures: Sequence[Picture | Video]) -> str:
        """What to do where text holds tokens that stand for pictures or videos; nothing where there are not more of
        them than of these."""
        assert self._pictures is not None and self._pictures.format is not None
        seen, videos = self._pictures.format, sum(isinstance(one, Video) for one in pictures)
        kinds = (seen.placeholder_id, len(pictures) - videos, "<image>"), (seen.video_id, videos, "<video>")
        for token, count, placeholder in kinds:
            if token is not None and list(ids).count(token) > count:
                name = self._tokenizer.convert_ids_to_tokens(token)
                return f"; {name} in a text counts as one: take it out, or write {placeholder} and give what it shows"
        return ""


def length_of(token_ids: Sequence[int] | IntArray, pictures: Sequence[Picture]) -> str:
    """As messages say it: with how much of it is the pictures'."""
    own = sum(picture.grid[0] * picture.grid[1] for picture in pictures)
    return f"{len(token_ids):,} tokens long" + (f", {own:,} of them for its pictures" if own else "")


class RLHFDataset(Dataset[Prompt, DataConfig]):
    """Prompts. Messages go through the chat template, with the generation prompt at the end; a string is as it is."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self._items

    def _read(self, row: Row, folder: Path) -> tuple[str, Sequence[Prompt]]:
        templated = not isinstance(row.get("prompt"), str)
        pictures: list[Picture | Video] = []
        if templated:
            messages, pictures = self._take_pictures(row, messages_of(row, "prompt"), folder)
            text = render(self._tokenizer, messages, True)
            row = without_pixels(row, messages, pictures) if pictures else row
        else:
            refuse_pictures(row, takes_pictures=self._sees)
            text = cell(row, "prompt", str)
        token_ids, _, placed = self._expand(encode(self._tokenizer, text, special_tokens=not templated), pictures)
        if not len(token_ids):
            raise BadRow("the tokenizer makes no token of column `prompt`")
        if len(token_ids) > (limit := self._config.max_prompt_tokens):
            raise BadRow(f"column `prompt` is {length_of(token_ids, placed)}; data.max_prompt_tokens is {limit:,}")
        has_source = row.get("data_source") is not None
        data_source = cell(row, "data_source", str) if has_source else "default"
        prompt = Prompt(len(self), token_ids, text, data_source, ground_truth_of(row), row, placed)
        if row.get("reward_model"):
            return "verl", [prompt]
        return "`prompt` + `data_source`" if has_source else "`prompt`", [prompt]
