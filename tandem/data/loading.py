"""Data files -> rows, each checked and tokenised, or reported: what RLHFDataset and SftDataset share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from tandem.data.rows import BadRow, Row, RowFormat, detect_format, read_rows
from tandem.errors import UserError

Parsed = TypeVar("Parsed")
Encoded = TypeVar("Encoded")
CHUNK_ROWS = 1024
LISTED = 10
Place = tuple[int, int]
"""File (index) and row number: sorts in reading order."""


class RowReport:
    """What was read: rows used by format, bad rows with their place."""

    def __init__(self, files: Sequence[Path]):
        self.files = files
        self.formats: Counter[RowFormat] = Counter()
        self.bad: list[tuple[Place, BadRow]] = []

    def describe(self) -> str:
        """One line: rows, files, formats, rows skipped by reason."""
        names = ", ".join(path.name for path in self.files) if len(self.files) <= 3 else f"{len(self.files)} files"
        formats = ", ".join(f"{count:,} {kind.title}" for kind, count in self.formats.items())
        reasons = Counter(bad.fault for _, bad in self.bad)
        skipped = "; ".join(f"{count:,}: {fault}" for fault, count in reasons.most_common())
        return f"{names}: {formats}; {len(self.bad):,} skipped" + (f" ({skipped})" if skipped else "")

    def settle(self, on_bad_row: Literal["error", "skip"]) -> None:
        """Raise UserError over the bad rows when the policy is `error`, or when no row is left."""
        used = self.formats.total()
        if not self.bad or (used and on_bad_row == "skip"):
            return
        rows = "1 row is" if len(self.bad) == 1 else f"{len(self.bad):,} rows are"
        first = sorted(self.bad, key=lambda item: item[0])[:LISTED]
        lines = [f"  {self.files[file]}, row {row}: {bad}" for (file, row), bad in first]
        if len(self.bad) > LISTED:
            lines.append(f"  … and {len(self.bad) - LISTED:,} more")
        mend = "mend them, or leave them out with data.on_bad_row=skip" if used else "no usable row is left"
        raise UserError("\n".join([f"{rows} bad, of {used + len(self.bad):,}; {mend}", *lines]))


def load_rows(
    files: Sequence[Path],
    accepted: Sequence[RowFormat],
    parse: Callable[[Row, RowFormat], Parsed],
    encode: Callable[[list[Parsed]], list[Encoded | BadRow]],
    on_bad_row: Literal["error", "skip"],
) -> tuple[list[Encoded], RowReport]:
    """Every good row of `files` in order, and the report on all.

    `parse` checks one row (raises BadRow), `encode` tokenises many at once and may find further bad ones.
    Raises UserError for unreadable files, for bad rows where the policy says so, and when nothing is left.
    """
    if not files:
        raise UserError("no data files are given; name at least one")
    report = RowReport(files)
    result: list[Encoded] = []
    for chunk in _chunks(files):
        good: list[tuple[Place, RowFormat, Parsed]] = []
        for place, row in chunk:
            try:
                if isinstance(row, BadRow):
                    raise row
                row_format = detect_format(row, accepted)
                good.append((place, row_format, parse(row, row_format)))
            except BadRow as bad:
                report.bad.append((place, bad))
        encoded = encode([parsed for _, _, parsed in good])
        for (place, row_format, _), item in zip(good, encoded, strict=True):
            if isinstance(item, BadRow):
                report.bad.append((place, item))
            else:
                report.formats[row_format] += 1
                result.append(item)
    report.settle(on_bad_row)
    return result, report


def _chunks(files: Sequence[Path]) -> Iterator[list[tuple[Place, Row | BadRow]]]:
    rows = (((file, number), row) for file, path in enumerate(files) for number, row in read_rows(path))
    while chunk := list(islice(rows, CHUNK_ROWS)):
        yield chunk
