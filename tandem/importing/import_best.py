"""The metric of validated answers by which a checkpoint is the best one."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tandem.errors import UserError
from tandem.importing.outcome import Imported
from tandem.tracking import names

_ROWS = 2000
"""So many of each file are looked at."""
DEFAULT = "default"
"""`data_source` of rows without that column."""


def reward_metric(source: str, samples: int) -> str:
    """The mean reward of `samples` answers to each row whose `data_source` is `source`."""
    return names.OF_VALIDATION[0].replace("<source>", source).replace("<N>", str(samples))


def source_of(files: Sequence[str], made: Imported) -> str:
    """The `data_source` of the rows to validate on, with a note where the files do not tell which, or tell several."""
    found = _sources(files)
    if not found:
        made.notes.append(
            f"trainer.best_metric: {DEFAULT} is the data_source of rows without that column; where yours have one, "
            "write its value in the place of it"
        )
    elif len(found) > 1:
        made.notes.append(
            f"trainer.best_metric: it is of rows of data_source {found[0]} alone; {', '.join(found[1:])} have metrics "
            "of their own: choose"
        )
    return found[0] if found else DEFAULT


def _sources(files: Sequence[str]) -> list[str]:
    """Those of local files, sorted; none where one of them cannot be read here."""
    from tandem.data.rows import BadRow, read_rows

    found = set[str]()
    try:
        for file in files:
            rows = (row for _, row in islice(read_rows(Path(file).expanduser()), _ROWS) if not isinstance(row, BadRow))
            found |= {str(row.get("data_source") or DEFAULT) for row in rows}
    except UserError:
        return []
    return sorted(found)
