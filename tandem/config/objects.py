"""Objects of a program in the place of names of files: what a notebook defines in a cell, written to files.

    {"reward": {"functions": [compute_score]}}    ->  RUN/objects/compute_score.pkl:compute_score
    {"data": {"train_files": [{"prompt": …}, …]}} ->  RUN/objects/data.train_files.jsonl

Processes of any number on any machine that sees the run directory then read them as they read files of the user's own,
and `tandem train --resume RUN` goes on without the program. Functions and classes are written by cloudpickle: by value
where they stand in the program itself, by name where they are in a module, which must be importable there, too.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import isclass, isroutine
from pathlib import Path
from typing import Any, cast

from tandem.config.paths import absolute
from tandem.errors import UserError
from tandem.files import replacing

DIRECTORY = "objects"
"""In the run directory."""
_ROWS = re.compile(r"data\.(train_files|val_files|(mixture|val_sets)\.[^.]+\.files)")
_PLAIN = (str, int, float, bool, type(None), Path)


def with_objects_written(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with names of files in the place of objects. Raises UserError for what cannot be written."""
    found: dict[Path, tuple[str, Any]] = {}
    trainer = tree.get("trainer")
    run_dir = cast(Mapping[str, Any], trainer).get("run_dir") if isinstance(trainer, Mapping) else None

    def place(key: str, name: str, value: Any) -> Path:
        if not isinstance(run_dir, str | Path):
            raise UserError(f"{key}: objects are written to trainer.run_dir, and none is given; give it")
        path = absolute(Path(run_dir)) / DIRECTORY / name
        if found.setdefault(path, (key, value))[1] is not value:
            raise UserError(f"{key}: {found[path][0]} has another object called {path.stem!r}; rename one")
        return path

    def replaced(value: Any, key: str) -> Any:
        if _ROWS.fullmatch(key) and value is not None and not _names_files(value):
            return [str(place(key, f"{key}.{'parquet' if _is_table(value) else 'jsonl'}", value))]
        if isinstance(value, Mapping):
            sections = cast(Mapping[str, Any], value)
            return {name: replaced(inner, f"{key}.{name}" if key else name) for name, inner in sections.items()}
        if isinstance(value, list | tuple):
            return [replaced(inner, key) for inner in cast(Iterable[Any], value)]
        if isinstance(value, Path):
            return str(value)
        return value if isinstance(value, _PLAIN) else _reference(value, key, place)

    whole = replaced(tree, "")
    if found:
        _write(found, resume=cast(Mapping[str, Any], trainer).get("resume") is True)
    return whole


def _names_files(value: Any) -> bool:
    """A file, or a list of them, or nothing."""
    listed: list[Any] = cast(list[Any], value) if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, str | Path) for one in listed)


def _reference(value: Any, key: str, place: Callable[[str, str, Any], Path]) -> Any:
    """The name under which every process finds a function or class; what else it may be is for validation to say."""
    if not (isclass(value) or isroutine(value)):
        if callable(value):
            raise UserError(f"{key}: {value!r} is neither a function nor a class; put it into a function with a name")
        return value
    name = value.__name__
    if not name.isidentifier():
        raise UserError(f"{key}: a {name} has no name, and metrics and messages go by that; write it with def")
    module: str = value.__module__ or ""
    if module != "__main__" and module in sys.modules and getattr(import_module(module), name, None) is value:
        return f"{module}:{name}"
    return f"{place(key, f'{name}.pkl', value)}:{name}"


def _write(found: Mapping[Path, tuple[str, Any]], *, resume: bool) -> None:
    directory = next(iter(found)).parent
    run_dir = directory.parent
    if not resume and ((run_dir / "checkpoints").exists() or (run_dir / "metrics.jsonl").exists()):
        mend = f"continue it with --resume {run_dir}, or give another trainer.run_dir"
        raise UserError(f"{run_dir}: holds another run; {mend}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, (key, value) in found.items():
            with replacing(path) as temporary:
                _WRITERS[path.suffix](temporary, key, value)
    except OSError as error:
        raise UserError(f"trainer.run_dir: {error}; give another one") from None


def _write_pickle(path: Path, key: str, value: Any) -> None:
    import cloudpickle  # its import takes a while, and commands do without

    try:
        path.write_bytes(cloudpickle.dumps(value))
    except Exception as error:  # whatever the objects raise that the function refers to
        mend = "it, or a variable that it uses, does not fit into another process; make such things inside the function"
        raise UserError(f"{key}: {value.__name__} cannot be written to a file ({error}): {mend}") from error


def _is_table(value: Any) -> bool:
    """An Arrow table, or a pandas data frame; neither package is imported for anything else."""
    return any(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in _TABLES for kind in type(value).__mro__)


_TABLES = ("pyarrow.Table", "pandas.DataFrame")


def _write_table(path: Path, key: str, value: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table: Any = value if isinstance(value, pa.Table) else pa.Table.from_pandas(value, preserve_index=False)
        pq.write_table(table, path)
    except pa.ArrowException as error:
        raise UserError(f"{key}: the table cannot be written ({error}); give rows, or a parquet file") from None


def _write_rows(path: Path, key: str, value: Any) -> None:
    try:
        rows: list[Any] = list(value)
    except TypeError:
        raise UserError(f"{key}: {type(value).__name__} is neither files nor rows; give a list of rows") from None
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise UserError(f"{key}: row {number} is a {type(row).__name__}; give a dict of columns")
            try:
                file.write(json.dumps({**row}, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                mend = "give text, numbers, lists and dicts, pictures by the names of their files"
                raise UserError(f"{key}: row {number}: {error}; {mend}") from None


_WRITERS: Mapping[str, Callable[[Path, str, Any], None]] = {
    ".pkl": _write_pickle,
    ".parquet": _write_table,
    ".jsonl": _write_rows,
}
