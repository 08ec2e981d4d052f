"""Rows of a class of the user's own, read when they are drawn: generated ones, or more than fit into memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from transformers import PreTrainedTokenizerBase

from tandem.config.data import DataConfig
from tandem.data.classes import dataset_class
from tandem.data.dataset import Opens, RLHFDataset
from tandem.data.rows import BadRow, Row
from tandem.errors import UserError
from tandem.files import users_traceback
from tandem.pictures.shown import ModelPictures
from tandem.types import Prompt

_LOOKED_AT = 100
"""So many rows are read before a run starts, for what is checked there."""


class RowSource(Protocol):
    """Rows by number. Made as `Class(files, **arguments)`, with the paths of `data.train_files`."""

    def __len__(self) -> int:
        """How many there are; the same in a resumed run."""
        ...

    def __getitem__(self, index: int, /) -> Row:
        """Row `index`, as a dict of the columns of docs/data.md: the same whenever it is asked for."""
        ...


class OwnDataset(RLHFDataset):
    """The rows of `data.dataset`. Raises UserError for a class that cannot be made or lacks a method, and for bad rows
    when they are drawn; the first ones are read at once."""

    def __init__(
        self,
        data_files: Sequence[Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        pictures: ModelPictures | None = None,
        opens: Opens | None = None,
    ):
        super().__init__([], tokenizer, config, pictures, opens)
        assert config.dataset is not None
        self._what = f"data.dataset: {config.dataset}"
        self._rows = self._made(data_files)
        self._count = self._called(len, self._rows)
        if not self._count:
            raise UserError(f"{self._what} has no rows")
        looked_at = [self[index] for index in range(min(len(self), _LOOKED_AT))]
        largest = max(looked_at, key=self.largest_id_of)
        self.largest_id = self.largest_id_of(largest), f"{self._what}, row {largest.index}"
        kinds = {self.kind(prompt): prompt for prompt in reversed(looked_at)}
        self._first = [(prompt, 1) for prompt in kinds.values()]
        self.skipped = 0
        self.descriptions = [f"{config.dataset}: {len(self):,} rows, read when they are drawn"]

    @property
    def items_of_files(self) -> list[int]:
        return [len(self)]

    @property
    def kinds(self) -> list[tuple[Prompt, int]]:
        """Of the first rows."""
        return self._first

    def __getitem__(self, index: int) -> Prompt:
        row = self._called(self._rows.__getitem__, index, what=f", row {index} of {len(self):,}")
        try:
            if not isinstance(row, dict):
                raise BadRow(f"it is a {type(row).__name__}, not a dict of columns")
            _, (prompt,) = self.read(cast(Row, row), Path.cwd())
        except (BadRow, TypeError, ValueError) as error:  # values of other types than files have: arrays, say
            raise UserError(f"{self._what}, row {index}: {error}") from None
        return replace(prompt, index=index)

    def _made(self, files: Sequence[Path]) -> RowSource:
        return self._called(dataset_class(str(self._config.dataset)), list(files), **self._config.dataset_arguments)

    def _called(self, function: Any, *arguments: Any, what: str = "", **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"{self._what}{what} failed:\n{users_traceback(error, __file__)}") from error
