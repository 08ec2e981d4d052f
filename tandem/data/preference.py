"""Pairs of answers: `chosen` and `rejected`, with or without `prompt` -> Preference; answers with a `label` ->
RatedAnswer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tandem.config.tree import DpoConfig
from tandem.data.packed import Packed
from tandem.data.rows import BadRow, Row, cell
from tandem.data.sft import DemonstrationDataset, unpack_demonstration
from tandem.types import Demonstration, Preference, RatedAnswer

Item = TypeVar("Item")


class AnswersDataset(DemonstrationDataset[Item]):
    """Answers of one turn."""

    def _answer(self, row: Row, folder: Path) -> Demonstration:
        _, turns = self._demonstrations(row, folder)
        if len(turns) > 1:
            raise BadRow("the chat template shows earlier turns of an answer otherwise than the last; give one turn")
        return turns[0]


class PreferenceDataset(AnswersDataset[Preference]):
    """Each answer is read as a demonstration is; a number in `margin` says by how much the chosen one is better.

    Without `prompt` both columns hold whole conversations: what they share is the prompt, of texts up to the last space
    or line break in it.
    """

    def pack(self, item: Preference, /) -> Packed:
        chosen, rejected = (self._pack_demonstration(answer) for answer in (item.chosen, item.rejected))
        return Packed((*chosen.arrays, *rejected.arrays), item.margin.hex())

    def unpack(self, packed: Packed, index: int, /) -> Preference:
        chosen, rejected = (unpack_demonstration(arrays, index) for arrays in (packed.arrays[:3], packed.arrays[3:]))
        return Preference(chosen, rejected, float.fromhex(packed.text))

    def _read(self, row: Row, folder: Path) -> tuple[str, Sequence[Preference]]:
        answers = _two_answers(row)
        margin = row.get("margin") or 0.0
        if not isinstance(margin, int | float):
            raise BadRow(f"column `margin` has the wrong type: {type(margin).__name__}, not a number")
        better, worse = (self._answer(answer, folder) for answer in answers)
        return _pair_format(row), [Preference(better, worse, float(margin))]


class RatedDataset(AnswersDataset[RatedAnswer]):
    """`prompt` and `completion`, or `messages`, and in `label` whether the answer is good; of a row with `chosen` and
    `rejected` two, the better one good and the other bad."""

    def pack(self, item: RatedAnswer, /) -> Packed:
        return self._pack_demonstration(item.answer, "good" if item.desirable else "bad")

    def unpack(self, packed: Packed, index: int, /) -> RatedAnswer:
        return RatedAnswer(unpack_demonstration(packed.arrays, index), packed.text == "good")

    def _read(self, row: Row, folder: Path) -> tuple[str, Sequence[RatedAnswer]]:
        if row.get("label") is None and row.get("chosen") is not None:
            better, worse = _two_answers(row)
            return _pair_format(row), [self._rated(better, folder, True), self._rated(worse, folder, False, place=1)]
        good = cell(row, "label", bool)
        columns = "`messages`" if row.get("messages") is not None else "`prompt` + `completion`"
        return f"{columns} + `label`", [self._rated(row, folder, good)]

    def _rated(self, row: Row, folder: Path, good: bool, /, place: int = 0) -> RatedAnswer:
        answer = self._answer(row, folder)
        if any(picture.place >= len(answer.prompt_ids) for picture in answer.pictures):
            raise BadRow("a picture comes after the first answer; kto pairs the prompt with other rows' answers")
        return RatedAnswer(replace(answer, index=len(self) + place), good)


def dataset_of(config: DpoConfig) -> type[PreferenceDataset] | type[RatedDataset]:
    """Of the rows that `preference.loss` is on."""
    return RatedDataset if config.preference.loss == "kto" else PreferenceDataset


def _two_answers(row: Row) -> tuple[Row, Row]:
    """Rows with `prompt` and `completion`, of the better answer and of the other. Raises BadRow."""
    kind = str if isinstance(row.get("chosen"), str) else list
    chosen: Any = cell(row, "chosen", kind)
    rejected: Any = cell(row, "rejected", kind)
    if chosen == rejected:
        raise BadRow("columns `chosen` and `rejected` are the same")
    prompt: Any = row.get("prompt")
    if prompt is None:
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    common = {"prompt": prompt, **{name: row[name] for name in ("images", "image", "videos") if name in row}}
    return {**common, "completion": chosen}, {**common, "completion": rejected}


def _pair_format(row: Row) -> str:
    return "`chosen` + `rejected`" if row.get("prompt") is None else "`prompt` + `chosen` + `rejected`"


def _shared(chosen: Any, rejected: Any) -> int:
    """Length of the prompt that both begin with."""
    shorter = min(len(chosen), len(rejected))
    shared = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    return max(chosen.rfind(space, 0, shared) for space in " \n") + 1 if isinstance(chosen, str) else shared
