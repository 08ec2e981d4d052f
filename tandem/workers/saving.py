"""The files of a rank in a checkpoint, written and sealed while the rank goes on with the next step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from tandem.checkpoint.draft import seals_of_rank, write_seals

if TYPE_CHECKING:
    from tandem.models.storage import TensorFile


class BackgroundWrite:
    """A thread that writes files, then `seals`, which says that they are whole.

    It ends with its process, without a word: a checkpoint without the seals of a rank is none.
    """

    def __init__(self, files: Sequence[TensorFile], directory: Path, rank: int) -> None:
        self.seals = seals_of_rank(directory, rank)
        self._files = files
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what went wrong so far."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for file in self._files:
                file.write()
            write_seals(self.seals, [file.path for file in self._files])
        except BaseException as error:  # noqa: BLE001 - whatever it is, `check` raises it
            self._error = error
