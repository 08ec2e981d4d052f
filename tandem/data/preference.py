"""Pairs of answers: `chosen` and `rejected`, with or without `prompt` -> Preference; answers with a `label` ->
RatedAnswer."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unicodedata import category

from tandem.config.tree import DpoConfig
from tandem.data.packed import Packed
from tandem.data.rows import BadRow, Row, cell, in_words
from tandem.data.sft import DemonstrationDataset, largest_id, unpack_demonstration
from tandem.types import Demonstration, Preference, RatedAnswer

Item = TypeVar("Item")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff60\U00020000-\U0003ffff]"
)
"""Letters and marks of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""


class AnswersDataset(DemonstrationDataset[Item]):
    """Answers of one turn, or of several where the chat template shows all of them alike."""

    def _answer(self, row: Row, folder: Path, column: str = "completion") -> Demonstration:
        """`column`: where the answer stands."""
        _, turns = self._demonstrations(row, folder, column)
        if len(turns) > 1:
            raise BadRow("the chat template shows earlier turns of an answer otherwise than the last; give one turn")
        return turns[0]


class PreferenceDataset(AnswersDataset[Preference]):
    """Each answer is read as a demonstration is; a number in `margin` says by how much the chosen one is better.

    Without `prompt` both columns hold whole conversations: what they share is the prompt, of texts up to the last place
    in it where a word ends.
    """

    rows_are = "pairs"

    def pack(self, item: Preference, /) -> Packed:
        chosen, rejected = (self._pack_demonstration(answer) for answer in (item.chosen, item.rejected))
        return Packed((*chosen.arrays, *rejected.arrays), item.margin.hex())

    def unpack(self, packed: Packed, index: int, /) -> Preference:
        chosen, rejected = (unpack_demonstration(arrays, index) for arrays in (packed.arrays[:3], packed.arrays[3:]))
        return Preference(chosen, rejected, float.fromhex(packed.text))

    def largest_id_of(self, item: Preference, /) -> int:
        return max(largest_id(item.chosen), largest_id(item.rejected))

    def _read(self, row: Row, folder: Path) -> tuple[str, Sequence[Preference]]:
        pair = _pair(row)
        margin = row.get("margin") or 0.0
        if not isinstance(margin, int | float):
            raise BadRow(f"column `margin` has the wrong type: {in_words(type(margin))}, not a number")
        better, worse = (self._answer(pair, folder, column) for column in ("chosen", "rejected"))
        return _pair_format(row), [Preference(better, worse, float(margin))]


class RatedDataset(AnswersDataset[RatedAnswer]):
    """`prompt` and `completion`, or `messages`, and in `label` whether the answer is good; of a row with `chosen` and
    `rejected` two, the better one good and the other bad."""

    rows_are = "rated"

    def pack(self, item: RatedAnswer, /) -> Packed:
        return self._pack_demonstration(item.answer, "good" if item.desirable else "bad")

    def unpack(self, packed: Packed, index: int, /) -> RatedAnswer:
        return RatedAnswer(unpack_demonstration(packed.arrays, index), packed.text == "good")

    def largest_id_of(self, item: RatedAnswer, /) -> int:
        return largest_id(item.answer)

    def _read(self, row: Row, folder: Path) -> tuple[str, Sequence[RatedAnswer]]:
        if row.get("label") is None and row.get("chosen") is not None:
            pair = _pair(row)
            better = self._rated(pair, folder, True, column="chosen")
            return _pair_format(row), [better, self._rated(pair, folder, False, place=1, column="rejected")]
        good = cell(row, "label", bool)
        columns = "`messages`" if row.get("messages") is not None else "`prompt` + `completion`"
        return f"{columns} + `label`", [self._rated(row, folder, good)]

    def _rated(self, row: Row, folder: Path, good: bool, /, place: int = 0, column: str = "completion") -> RatedAnswer:
        answer = self._answer(row, folder, column)
        if any(picture.place >= len(answer.prompt_ids) for picture in answer.pictures):
            raise BadRow("a picture comes after the first answer; kto pairs the prompt with other rows' answers")
        return RatedAnswer(replace(answer, index=len(self) + place), good)


def dataset_of(config: DpoConfig) -> type[PreferenceDataset] | type[RatedDataset]:
    """Of the rows that `preference.loss` is on."""
    return RatedDataset if config.preference.loss == "kto" else PreferenceDataset


def _pair(row: Row) -> Row:
    """The row with `prompt`, and `chosen` and `rejected` that follow it. Raises BadRow."""
    kind = str if isinstance(row.get("chosen"), str) else list
    chosen: Any = cell(row, "chosen", kind, blank=True)
    rejected: Any = cell(row, "rejected", kind, blank=True)
    if chosen == rejected:
        raise BadRow("columns `chosen` and `rejected` are the same")
    prompt: Any = row.get("prompt")
    if prompt is None:
        shared = _shared(chosen, rejected)
        prompt = chosen[:shared]
        if not prompt:
            raise BadRow("there is no column `prompt`, and `chosen` and `rejected` begin with nothing that they share")
    elif kind is list:
        prompt, shared = _prompt_of_messages(prompt, chosen, rejected)
    else:
        shared = 0
    for column, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer[shared:]:
            raise BadRow(f"column `{column}` holds the prompt alone: nothing follows what both columns begin with")
    return {**row, "prompt": prompt, "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _prompt_of_messages(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, int]:
    """The prompt as messages, and how many of both answers repeat it: a prompt that is text is what the user says, or
    the user's last words in the conversation that both answers begin with."""
    if not isinstance(prompt, str):
        repeated = isinstance(prompt, list) and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
        return prompt, len(prompt) if repeated else 0
    shared = _shared(chosen, rejected)
    if not shared:
        return [{"role": "user", "content": prompt}], 0
    if not any(isinstance(said, dict) and said.get("content") == prompt for said in chosen[:shared]):
        raise BadRow(
            "column `prompt` is text, and not among the messages that `chosen` and `rejected` begin with; leave it "
            "out, or give the messages of the prompt there"
        )
    return chosen[:shared], shared


def _pair_format(row: Row) -> str:
    return "`chosen` + `rejected`" if row.get("prompt") is None else "`prompt` + `chosen` + `rejected`"


def _shared(chosen: Any, rejected: Any) -> int:
    """Length of the prompt that both begin with."""
    shorter = min(len(chosen), len(rejected))
    shared = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    if not isinstance(chosen, str):
        return shared
    return next((at for at in range(shared, 0, -1) if _ends_word(chosen, at) and _ends_word(rejected, at)), 0)


def _ends_word(text: str, at: int) -> bool:
    """A word may end before place `at`: after a space or a line break, or where the script has none between words."""
    if text[at - 1] in " \n":
        return True
    marked = at < len(text) and category(text[at]).startswith("M")  # part of the letter before it
    return bool(_UNSPACED.match(text[at - 1])) and not marked
