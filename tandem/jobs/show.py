"""What a model will read of a data row: `tandem data show`."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig, pictures_directory
from tandem.data.dataset import Dataset, RLHFDataset
from tandem.data.preference import PreferenceDataset, dataset_of
from tandem.data.rows import BadRow, Pace, read_rows
from tandem.data.sft import SftDataset
from tandem.errors import UserError, for_terminal
from tandem.jobs.openings import Openings, make_openings, unknown_part
from tandem.models.loading import load_tokenizer
from tandem.pictures.shown import ModelPictures
from tandem.types import BoolArray, Demonstration, IntArray, Preference, Prompt, RatedAnswer

Kind = Literal["prompt", "learned", "not learned"]
_STYLES: dict[Kind, tuple[str, str]] = {
    "prompt": ("blue", "bright_blue"),
    "learned": ("green", "bright_green"),
    "not learned": ("white", "bright_black"),
}
"""In turn, so that one sees where tokens end."""
_REPEATED = 8
"""So many equal tokens, as those of a picture, are shown as one and a number."""
_LETTER = 4
"""The most bytes of a letter in UTF-8, and so the most tokens."""


class TokenSpan(NamedTuple):
    """Neighbouring tokens of one kind."""

    kind: Kind
    token_ids: IntArray


class _Found(NamedTuple):
    """A row, and what is made of it."""

    path: Path
    number: int
    """Counted from 1 in its file, as messages about files have it."""
    data_row: int
    """The number of its first item among those of all files, from 0: `prompt_index` of a run."""
    row_format: str
    items: Sequence[Any]


def show_row(
    config: TrainConfig | SftConfig,
    dataset: type[Dataset[Any, Any]],
    split: str,
    row: int | None,
    prompt_index: int | None,
) -> list[Text]:
    """What is made of a row of the `train` or `val` files, line by line: of row `row`, counted from 1 through all
    files, or else of the one that is `prompt_index` in a run, where rows that are left out do not count."""
    tokenizer = load_tokenizer(config.model)
    pictures = ModelPictures(config.model.path, config.data.images, pictures_directory(config), config.data.videos)
    conversation = config.conversation if isinstance(config, TrainConfig) else None
    opens: dict[str, Openings | None] = {}
    if conversation is not None:
        opens = {"opens": make_openings(conversation, config.model, tokenizer, pictures)}
    reader = dataset([], tokenizer, config.data, pictures, **opens)
    data = config.data
    of_split = (data.train_paths, data.train_key) if split == "train" else (data.val_paths, "data.val_files")
    found = _find(*of_split, reader, row, prompt_index)
    count = len(found.items)
    many = f"data rows {found.data_row} to {found.data_row + count - 1}" if count > 1 else f"data row {found.data_row}"
    lines = [Text(f"{found.path}, row {found.number} ({many} of a run): {found.row_format}", style="bold")]
    for item in found.items:
        lines += _described(tokenizer, item)
    if conversation is not None and (unknown := unknown_part(conversation)) is not None:
        lines.append(Text(f"known when a conversation is held: {unknown}", style="dim"))
    return lines


def dataset_for(config: TrainConfig | SftConfig) -> type[Dataset[Any, Any]]:
    match config:
        case TrainConfig():
            return RLHFDataset
        case DpoConfig():
            return dataset_of(config)
        case RewardModelConfig():
            return PreferenceDataset
        case _:
            return SftDataset


def _find(
    files: Sequence[Path], key: str, reader: Dataset[Any, Any], row: int | None, prompt_index: int | None
) -> _Found:
    """Raises UserError where there is none, and where the row that was asked for is bad."""
    if not files:
        raise UserError(f"{key}: there are none; give some")
    rows = items = 0
    pace = Pace()
    for path in files:
        for number, content in read_rows(path):
            rows += 1
            if pace.is_due():
                print(f"{rows:,} rows read", flush=True)
            try:
                row_format, made = reader.read(content, path.parent)
            except BadRow as error:
                if rows == row:
                    raise UserError(f"{path}, row {number}: {error}") from None
                continue
            if rows == row or (prompt_index is not None and items + len(made) > prompt_index):
                return _Found(path, number, items, row_format, made)
            items += len(made)
    if row is not None:
        raise UserError(f"--row {row}: {key} holds {rows:,} rows")
    kept = f"{key} makes {items:,} data rows of {rows:,} rows"
    raise UserError(f"--prompt-index {prompt_index}: {kept}; the first one is 0")


def _described(
    tokenizer: PreTrainedTokenizerBase, item: Prompt | Demonstration | Preference | RatedAnswer
) -> Iterator[Text]:
    match item:
        case Prompt():
            yield from shown_tokens(tokenizer, [TokenSpan("prompt", item.token_ids)])
            yield Text(f"data_source: {item.data_source}; ground truth: {item.ground_truth!r}")
        case Demonstration():
            learned = _runs(item.response_ids, item.loss_mask)
            yield from shown_tokens(tokenizer, [TokenSpan("prompt", item.prompt_ids), *learned])
        case RatedAnswer():
            yield Text("good" if item.desirable else "bad", style="bold")
            yield from _described(tokenizer, item.answer)
        case Preference():
            for name, answer in (("chosen", item.chosen), ("rejected", item.rejected)):
                yield Text(name, style="bold")
                yield from _described(tokenizer, answer)


def _runs(token_ids: IntArray, learned: BoolArray) -> Iterator[TokenSpan]:
    start = 0
    for value, group in groupby(learned.tolist()):
        stop = start + len(list(group))
        yield TokenSpan("learned" if value else "not learned", token_ids[start:stop])
        start = stop


def shown_tokens(tokenizer: PreTrainedTokenizerBase, runs: Sequence[TokenSpan]) -> Iterator[Text]:
    """A heading and the text of each run, in which neighbouring tokens differ in colour. Tokens of which none is text
    by itself, as the bytes of a letter, are shown as one."""
    for run in runs:
        yield Text(f"--- {run.kind}, {len(run.token_ids):,} tokens", style="dim")
        text, styles = Text(), _STYLES[run.kind]
        for place, (spelled, group) in enumerate(groupby(_spelled(tokenizer, run.token_ids.tolist()))):
            count = len(list(group))
            if count > _REPEATED:
                text.append(f"{spelled} x {count}", style=f"bold {styles[place % 2]}")
                continue
            for each in range(count):
                text.append(spelled, style=styles[(place + each) % 2])
        yield text


def _spelled(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> Iterator[str]:
    begun = list[int]()
    for place, token in enumerate(token_ids, start=1):
        begun.append(token)
        decoded = str(tokenizer.decode(begun, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if not decoded.endswith("\ufffd") or len(begun) == _LETTER or place == len(token_ids):
            yield for_terminal(decoded)
            begun = []
