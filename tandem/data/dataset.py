"""Rows to ask, flat or in verl's form -> Prompt. docs/data.md has a table of the columns."""

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandem.config.data import DataConfig, SftDataConfig
from tandem.data.cache import NotPackable, PackedItem, RowCache, Summary, tokenizer_of
from tandem.data.chat import TooLong, encode, render, require_one_bos, require_shown
from tandem.data.columns import Kind, check_columns
from tandem.data.forms import forms
from tandem.data.messages import Messages, messages_of, refuse_prefill, without_json_text
from tandem.data.packed import Packed, PackedItems
from tandem.data.row_images import MediaSupport, refuse_pictures, take_pictures, without_pixels
from tandem.data.rows import BadRow, Pace, Row, cell, content_digest, ground_truth_of, read_rows
from tandem.errors import UserError, for_terminal
from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.pictures.videos import Video
from tandem.types import IntArray, Message, Picture, Prompt

Item = TypeVar("Item")
Config = TypeVar("Config", DataConfig, SftDataConfig)
_CACHE = Path("~/.cache/tandem/rows")


class Dataset(ABC, Generic[Item, Config]):
    """The rows of some data files, each checked and tokenised at construction, or once and for all (`data.cache`).

    Raises UserError for unreadable files, for bad rows if `config.on_bad_row` is "error", when no row is left, and for
    pictures that the model does not see. `pictures` prepares them; without it there may be none.
    """

    rows_are: ClassVar[Kind]
    descriptions: list[str]
    """A line for each file: its name, rows by detected format, rows skipped and why the first one was."""

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
        self._count = 0
        self._parts: list[Sequence[Item]] = []
        """Of each file."""
        self._ends: list[int] = []
        """Items of the files up to each."""
        self._kinds: dict[str, tuple[int, int]] = {}
        self.largest_id: tuple[int, str] = -1, ""
        """The largest token id of all items, and the place of the first row that has it."""
        whole, bad, self.descriptions = Summary(), list[str](), []
        digests: list[str] = []
        for path in data_files:
            digests.append(content_digest(path))
            part, summary = self._load(path, digests[-1])
            self._parts.append(part)
            self._count = whole.items + len(part)
            self._ends.append(self._count)
            self.descriptions.append(_described(path, summary))
            bad += [f"{path}, row {number}: {reason}" for number, reason in summary.first_bad]
            if summary.largest_id[0] > self.largest_id[0]:
                largest, number = summary.largest_id
                self.largest_id = largest, f"{path}, row {number}"
            whole.extend(summary)
        self._kinds = whole.kinds
        self.digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
        """Of the files' content."""
        if whole.bad and (config.on_bad_row == "error" or not len(self)):
            mend = "mend them, or leave them out with data.on_bad_row=skip" if len(self) else "no usable row is left"
            first = "\n  ".join(bad[:10])
            raise UserError(f"{whole.bad:,} of {whole.bad + len(self):,} rows are bad; {mend}. The first:\n  {first}")
        self.skipped = whole.bad
        self.formats = list(whole.formats)
        """As messages call them."""

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Item:
        index += len(self) if index < 0 else 0
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]

    @property
    def items_of_files(self) -> list[int]:
        """Items that each file gave, in the order of the files."""
        return [len(part) for part in self._parts]

    @property
    def kinds(self) -> list[tuple[Item, int]]:
        """Of items whose rows are alike in all that is checked before a run: the first one, and how many there are."""
        return [(self[first], count) for first, count in self._kinds.values()]

    @property
    def forms(self) -> list[str]:
        """Whose rows these are, and what is read of them: a phrase for each form."""
        rows = (getattr(item, "row", {}) for item, _ in self.kinds)
        return forms(self.formats, rows)

    def _load(self, path: Path, digest: str) -> tuple[Sequence[Item], Summary]:
        """The items of a file: of a large one in a memory map, where the cache can hold them."""
        cache, made_of = self._config.cache, self._made_of()
        if made_of is not None and _is_large(path, cache.files_from_mib):
            found = RowCache(cache.directory or _CACHE, cache.workers).find_or_make(
                path, digest, self._reader(), made_of
            )
            if found is not None:
                arrow, summary = found
                return PackedItems(arrow, summary.sizes, self.unpack, len(self)), summary
        return self._read_into_memory(path)

    def _read_into_memory(self, path: Path) -> tuple[list[Item], Summary]:
        part, summary = list[Item](), Summary()
        pace = Pace()
        for number, row in read_rows(path):
            if pace.is_due():
                print(f"{path.name}: {number:,} rows read", flush=True)
            try:
                row_format, items = self.read(row, path.parent)
            except BadRow as error:
                summary.add_bad(number, str(error))
                continue
            summary.formats[row_format] = summary.formats.get(row_format, 0) + 1
            for item in items:
                summary.add_item(number, self.kind(item), self.largest_id_of(item))
            part.extend(items)
            self._count += len(items)
        return part, summary

    def _made_of(self) -> str | None:
        """What items depend on besides their files; None where these are not to be cached: with pictures, which are
        stored elsewhere, and of classes and tokenizers whose code is not known here."""
        tokenizer = tokenizer_of(self._tokenizer)
        kind = type(self)
        if tokenizer is None or self._sees or not kind.__module__.startswith("tandem."):
            return None
        limits = self._config.model_dump(include={"max_prompt_tokens", "max_tokens"})
        return json.dumps([f"{kind.__module__}.{kind.__name__}", limits, tokenizer, *self._made_of_besides()])

    def _made_of_besides(self) -> Sequence[str]:
        """What items of this kind of data set depend on besides."""
        return ()

    def _reader(self) -> Self:
        """This data set without items, for another process."""
        reader = copy(self)
        reader._parts, reader._ends, reader._count = [], [], 0
        return reader

    def pack_row(self, row: Row | BadRow, folder: Path) -> tuple[str, list[PackedItem]]:
        """As `read`, of which nothing but the places of the items is lost. Raises BadRow and NotPackable."""
        row_format, items = self.read(row, folder)
        return row_format, [PackedItem(self.pack(item), self.kind(item), self.largest_id_of(item)) for item in items]

    @abstractmethod
    def pack(self, item: Item, /) -> Packed:
        """All of an item but its place. Raises NotPackable."""

    @abstractmethod
    def unpack(self, packed: Packed, index: int, /) -> Item:
        """The item again, at a place in the data set."""

    def kind(self, item: Item, /) -> str:
        """Equal for items whose rows are alike in all that is checked before a run."""
        return ""

    @abstractmethod
    def largest_id_of(self, item: Item, /) -> int:
        """Of all token ids that a model reads of an item."""

    def read(self, row: Row | BadRow, folder: Path) -> tuple[str, Sequence[Item]]:
        """The format of a row, and what is made of it, without taking it in. `folder`: that of its file. Raises
        BadRow."""
        if isinstance(row, BadRow):
            raise row
        check_columns(row, self.rows_are)
        return self._read(without_json_text(row), folder)

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
        takes = MediaSupport(pictures=self._sees, videos=self._sees_videos)
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


def _described(path: Path, summary: Summary) -> str:
    found = (
        ", ".join(f"{count:,} {row_format} rows" for row_format, count in summary.formats.items()) or "no usable row"
    )
    first = ", the first: row {}: {}".format(*summary.first_bad[0]) if summary.first_bad else ""
    return f"{path.name}: {found}; {summary.bad:,} skipped{first}"


def _is_large(path: Path, mib: float | None) -> bool:
    """False also of what cannot be read, which is told where it is read."""
    try:
        return mib is not None and path.is_file() and path.stat().st_size >= mib * 2**20
    except OSError:
        return False


def _shape(value: Any) -> Any:
    """The keys of a row, and of what is in it."""
    if not isinstance(value, Mapping):
        return None
    return {str(key): _shape(inner) for key, inner in cast(Mapping[Any, Any], value).items()}


class Opened(NamedTuple):
    """What the policy is asked with on a row."""

    text: str
    token_ids: IntArray
    pictures: tuple[Picture, ...] = ()
    of_tools: int = 0
    """Tokens that describe tools; they are counted where there are too many tokens."""


class Opens(Protocol):
    """What conversations are opened with on rows. It is sent to the processes that read them."""

    @property
    def made_of(self) -> str:
        """All that an opening depends on besides the row and the tokenizer."""
        ...

    def open(self, prompt: str | Sequence[Message], most_tokens: int) -> Opened:
        """On a row with this in its column `prompt`, whose pictures are stored. Raises BadRow, and TooLong as `encode`
        does."""
        ...


class RLHFDataset(Dataset[Prompt, DataConfig]):
    """Prompts. Messages go through the chat template, with the generation prompt at the end; a string is as it is.

    Where rows open conversations, `opens` makes their tokens, with what is known of the tools; then a string is what
    the user says.
    """

    rows_are = "prompts"

    def __init__(
        self,
        data_files: Sequence[Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        pictures: ModelPictures | None = None,
        opens: Opens | None = None,
    ):
        self._opens = opens
        super().__init__(data_files, tokenizer, config, pictures)

    def _made_of_besides(self) -> Sequence[str]:
        return () if self._opens is None else (self._opens.made_of,)

    def pack(self, item: Prompt, /) -> Packed:
        """Raises NotPackable where JSON has no form for the row, or a different one."""
        try:
            whole = json.dumps([item.text, item.row], ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            whole = "null"
        if item.pictures or json.loads(whole) != [item.text, item.row]:
            raise NotPackable("a row has pictures, or a value that JSON has no form for")
        return Packed((item.token_ids,), whole)

    def unpack(self, packed: Packed, index: int, /) -> Prompt:
        text, row = json.loads(packed.text)
        return Prompt(index, packed.arrays[0], text, row.get("data_source") or "default", ground_truth_of(row), row)

    def largest_id_of(self, item: Prompt, /) -> int:
        return int(item.token_ids.max())

    def kind(self, item: Prompt, /) -> str:
        has_video = any(picture.step for picture in item.pictures)
        row = item.row
        return json.dumps(
            [item.data_source, item.ground_truth is None, str(row.get("agent_name")), has_video, _shape(row)]
        )

    def _read(self, row: Row, folder: Path) -> tuple[str, Sequence[Prompt]]:
        limit = self._config.max_prompt_tokens
        try:
            row, opened = self._opened(row, folder)
        except TooLong as error:
            length = f"{error} long{_of_tools(error.of_tools)}"
            raise BadRow(f"column `prompt` is {length}; data.max_prompt_tokens is {limit:,}") from None
        token_ids, placed = opened.token_ids, opened.pictures
        if not len(token_ids):
            raise BadRow("the tokenizer makes no token of column `prompt`")
        templated = self._opens is not None or not isinstance(row["prompt"], str)
        require_one_bos(self._tokenizer, token_ids, templated=templated)
        if len(token_ids) > limit:
            length = f"{length_of(token_ids, placed)}{_of_tools(opened.of_tools)}"
            raise BadRow(f"column `prompt` is {length}; data.max_prompt_tokens is {limit:,}")
        has_source = row.get("data_source") is not None
        data_source = cell(row, "data_source", str) if has_source else "default"
        if for_terminal(data_source) != data_source or len(data_source.splitlines()) > 1:
            raise BadRow(
                f"column `data_source` has control characters or several lines, and names metrics: {data_source!r}"
            )
        prompt = Prompt(len(self), token_ids, opened.text, data_source, ground_truth_of(row), row, placed)
        if row.get("reward_model"):
            return "verl", [prompt]
        return "`prompt` + `data_source`" if has_source else "`prompt`", [prompt]

    def _opened(self, row: Row, folder: Path) -> tuple[Row, Opened]:
        """The row, whose pictures are stored, and what the policy is asked with. Raises BadRow and TooLong."""
        limit = self._config.max_prompt_tokens
        if isinstance(row.get("prompt"), str):
            refuse_pictures(row, takes_pictures=self._sees)
            text = cell(row, "prompt", str)
            if self._opens is not None:
                return row, self._opens.open(text, limit)
            ids, _, placed = self._expand(encode(self._tokenizer, text, special_tokens=True, most_tokens=limit), ())
            return row, Opened(text, ids, placed)
        given = messages_of(row, "prompt")
        refuse_prefill(given, "prompt")
        messages, pictures = self._take_pictures(row, given, folder)
        row = without_pixels(row, messages, pictures) if pictures else row
        if self._opens is not None:
            return row, self._opens.open(row["prompt"], limit)
        text = render(self._tokenizer, messages, True)
        require_shown(self._tokenizer, messages, True)
        ids = encode(self._tokenizer, text, special_tokens=False, most_tokens=limit)
        token_ids, _, placed = self._expand(ids, pictures)
        return row, Opened(text, token_ids, placed)


def _of_tools(tokens: int) -> str:
    """How much of a length is the tools', where it is known."""
    return f", {tokens:,} of them for the descriptions of tools (conversation.environment.tools)" if tokens else ""
