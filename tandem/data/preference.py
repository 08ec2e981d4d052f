"""Pairs of answers: `chosen` and `rejected`, with or without `prompt` -> Preference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.data.rows import BadRow, Row, cell
from tandem.data.sft import DemonstrationDataset
from tandem.types import Demonstration, Preference


class PreferenceDataset(DemonstrationDataset[Preference]):
    """Each answer is read as a demonstration is; a number in `margin` says by how much the chosen one is better.

    Without `prompt` both columns hold whole conversations: what they share is the prompt, of texts up to the last space
    or line break in it.
    """

    def _read(self, row: Row, folder: Path) -> tuple[str, Sequence[Preference]]:
        kind = str if isinstance(row.get("chosen"), str) else list
        chosen: Any = cell(row, "chosen", kind)
        rejected: Any = cell(row, "rejected", kind)
        if chosen == rejected:
            raise BadRow("columns `chosen` and `rejected` are the same")
        prompt: Any = row.get("prompt")
        if prompt is None:
            shared = _shared(chosen, rejected)
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        margin = row.get("margin") or 0.0
        if not isinstance(margin, int | float):
            raise BadRow(f"column `margin` has the wrong type: {type(margin).__name__}, not a number")
        pictures = {name: row[name] for name in ("images", "image", "videos") if name in row}
        better, worse = (
            self._answer({"prompt": prompt, "completion": answer, **pictures}, folder) for answer in (chosen, rejected)
        )
        row_format = "`chosen` + `rejected`" if row.get("prompt") is None else "`prompt` + `chosen` + `rejected`"
        return row_format, [Preference(better, worse, float(margin))]

    def _answer(self, row: Row, folder: Path) -> Demonstration:
        _, turns = self._demonstrations(row, folder)
        if len(turns) > 1:
            raise BadRow("the chat template shows earlier turns of an answer otherwise than the last; give one turn")
        return turns[0]


def _shared(chosen: Any, rejected: Any) -> int:
    """Length of the prompt that both begin with."""
    shorter = min(len(chosen), len(rejected))
    shared = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    return max(chosen.rfind(space, 0, shared) for space in " \n") + 1 if isinstance(chosen, str) else shared
