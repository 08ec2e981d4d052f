"""Kinds of keys that name files: a loaded configuration means the same files from every directory.

    data/train.parquet      ->  /home/ada/data/train.parquet                            LocalPath
    rewards.py:score        ->  /home/ada/rewards.py:score                              Reference
    runs/sft                ->  /home/ada/runs/sft/checkpoints/step_000010/model        ModelPath
    Qwen/Qwen3-0.6B         ->  ~/.cache/huggingface/hub/…/snapshots/<commit>           ModelPath
    hub:openai/gsm8k/main[train]    ->  the split's files in such a snapshot            DataPaths

Relative paths start at the directory that the command runs in, `~` is the home directory.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, ValidationInfo

from tandem import hub
from tandem.stored import read_pointer

CHECKPOINTS_IN_USE = "checkpoints in use"
"""In the context of a validation: what the keys of the run that is resumed have stood for since it began, path by the
last part of the key."""

HUB_PINS = "hub pins"
"""In the context of a validation: the commits of the Hub's repositories that the run that is resumed has used."""


def absolute(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path has no NUL character")
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # ~name of a user that does not exist
        raise ValueError(str(error)) from None


def absolute_reference(reference: str) -> str:
    """`file.py:name` with the whole path of the file; `package.module:name` as it is."""
    place, colon, name = reference.rpartition(":")
    return f"{absolute(Path(place))}{colon}{name}" if place.endswith(".py") else reference


def checkpoint_directory(path: Path, info: ValidationInfo) -> Path:
    """The checkpoint that `path` stands for: a run's newest one, or that of `checkpoints/latest` or `best`.

    For a run that is resumed it is the one that it was at its start. Anything else stands for itself.
    """
    path = absolute(path)
    pointer = path if path.name in ("latest", "best") else path / "checkpoints" / "latest"
    context = cast(Mapping[str, Mapping[str, Path]], info.context or {})
    used = context.get(CHECKPOINTS_IN_USE, {}).get(info.field_name or "")
    if used is not None and pointer.parent in used.parents:
        return used
    with _unreadable_told():
        if pointer.exists() and pointer.parent.name == "checkpoints":
            path = read_pointer(pointer)
    return path


def model_directory(path: Path, info: ValidationInfo) -> Path:
    """The Hugging Face directory that `path` stands for, or `path` where it stands for none.

    A run directory is its newest checkpoint; so is `checkpoints/latest` in it, and `checkpoints/best` is the best one;
    of a checkpoint it is `model/`. For a run that is resumed it is the directory that it was at its start. An id of the
    Hub is its snapshot in the cache, which has no weights before `hub.fetch_weights`.
    """
    if (model := hub.model_id(path)) is not None:
        return hub.model_snapshot(model, _pins(info))
    path = hub.restored(checkpoint_directory(path, info))
    inside = path / "model"
    with _unreadable_told():
        holds_model = (inside / "config.json").is_file() and not (path / "config.json").exists()
    return inside if holds_model else path


def data_files(given: Any, info: ValidationInfo) -> Any:
    """A list of files, with those of a split in the place of each id of the Hub. One file may stand without a list."""
    if isinstance(given, str | Path):
        given = [given]
    if not isinstance(given, list):
        return given
    found: list[Any] = []
    for one in cast(list[Any], given):
        if isinstance(one, str) and one.startswith("hub:"):
            found += hub.data_files(one, _pins(info))
        else:
            found.append(hub.restored(Path(one)) if isinstance(one, str | Path) else one)
    return found


def _pins(info: ValidationInfo) -> Mapping[hub.Pin, str]:
    return cast(Mapping[str, Any], info.context or {}).get(HUB_PINS, {})


@contextmanager
def _unreadable_told() -> Generator[None]:
    """What may not be read, or has a name that is too long, is a mistake of the key."""
    try:
        yield
    except OSError as error:
        raise ValueError(str(error)) from None


LocalPath = Annotated[Path, AfterValidator(absolute)]
"""A file or a directory."""
DataPaths = Annotated[list[LocalPath], BeforeValidator(data_files)]
"""Files, and ids of data sets of the Hub."""
ModelPath = Annotated[Path, AfterValidator(model_directory)]
"""A Hugging Face directory, or what `model_directory` finds one in."""
CheckpointPath = Annotated[Path, AfterValidator(checkpoint_directory)]
"""A directory `step_000010` of a run, or what `checkpoint_directory` finds one in."""
Reference = Annotated[str, AfterValidator(absolute_reference)]
"""`path/to/file.py:name` or `package.module:name`."""
