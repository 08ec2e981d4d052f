"""Which command a configuration is for, where nobody says it: by its keys, or by its rows where keys do not tell."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tandem.config.job import Job
from tandem.config.load import written_tree
from tandem.config.paths import DataPaths
from tandem.errors import UserError
from tandem.planning.planned_jobs import jobs_of


def job_of(path: Path, overrides: Sequence[str]) -> Job:
    """A reward model's configuration has the keys of `tandem sft`, and pairs for rows. What is wrong with the
    configuration, or with its files, is told when it is loaded."""
    from tandem.data.columns import has_form
    from tandem.data.rows import Row

    tree = written_tree(path, overrides)
    likeliest, *others = jobs_of(tree)
    row = _first_row(tree.get("data")) if others else Row()
    if has_form(row, "pairs") and not has_form(row, "demonstrations"):
        return "reward-model"
    return "sft" if has_form(row, "demonstrations") and not has_form(row, "prompts") else likeliest


def _first_row(data: Any) -> dict[str, Any]:
    """That of the files to train on; an empty one where it cannot be read."""
    from tandem.data.rows import BadRow, read_rows

    section = _section(data)
    of_sets = (_section(one).get("files") for one in _section(section.get("mixture")).values())
    files = next((given for given in (section.get("train_files"), *of_sets) if given), [])
    try:
        paths = TypeAdapter[list[Path]](DataPaths).validate_python(files)
        row = next(read_rows(paths[0]))[1] if paths else {}
    except (ValidationError, UserError):
        return {}
    return {} if isinstance(row, BadRow) else row


def _section(value: Any) -> dict[str, Any]:
    """The value, or an empty section where it is none: nothing was checked yet."""
    return value if isinstance(value, dict) else {}
