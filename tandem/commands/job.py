"""Which command a configuration is for, where nobody says it: by its keys, and by its rows where keys are of several."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tandem.config.load import written_tree
from tandem.config.paths import DataPaths
from tandem.errors import UserError
from tandem.planning.job import Job, jobs_of


def job_of(path: Path, overrides: Sequence[str]) -> Job:
    """A reward model's configuration has the keys of `tandem sft`, and pairs for rows. What is wrong with the
    configuration, or with its files, is told when it is loaded."""
    from tandem.data.columns import has_form

    tree = written_tree(path, overrides)
    jobs = jobs_of(tree)
    row = _first_row(tree.get("data")) if len(jobs) > 1 else {}
    if has_form(row, "pairs") and not has_form(row, "demonstrations"):
        return "reward-model"
    return "sft" if has_form(row, "demonstrations") and not has_form(row, "prompts") else jobs[0]


def _first_row(data: Any) -> Mapping[str, Any]:
    """That of the files to train on; an empty one where it cannot be read."""
    from tandem.data.rows import BadRow, read_rows

    section: Mapping[str, Any] = data if isinstance(data, dict) else {}
    mixture = section.get("mixture")
    sets = list(mixture.values()) if isinstance(mixture, dict) else []
    files = section.get("train_files") or next((one.get("files") for one in sets if isinstance(one, dict)), None)
    try:
        paths = TypeAdapter[list[Path]](DataPaths).validate_python(files or [])
        row = next(read_rows(paths[0]))[1] if paths else {}
    except (ValidationError, UserError):
        return {}
    return {} if isinstance(row, BadRow) else row
