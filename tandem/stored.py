"""Small files that describe runs and models, read whole: as what they are to hold, or refused in one message.

Whatever is wrong with such a file (it is empty, cut, no text, nested too deeply, a directory, of another shape), what
is raised is a DamagedFile. Nothing is mended, moved or deleted here.
"""

import json
import re
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tandem.config import yaml12
from tandem.errors import UserError

T = TypeVar("T")
_CHECKPOINT = re.compile(r"step_\d{6,}")
_SHOWN = 80
"""Characters of a value at fault."""


class DamagedFile(UserError):
    """A file that cannot be read as what it is to be. The message has its name, the reason, and the mend if known."""

    def __init__(self, path: Path, reason: str, mend: str = "") -> None:
        super().__init__(f"{path}: {reason}; {mend}" if mend else f"{path}: {reason}")
        self.path, self.reason, self.mend = path, reason, mend

    def __reduce__(self) -> tuple[type["DamagedFile"], tuple[Path, str, str]]:
        return type(self), (self.path, self.reason, self.mend)


def read_bytes(path: Path, mend: str = "") -> bytes:
    """Raises DamagedFile, as all of these do: also where there is no such file."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # the second for a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise DamagedFile(path, f"cannot be read ({reason})", mend) from None


def read_text(path: Path, mend: str = "") -> str:
    """Of UTF-8."""
    try:
        return read_bytes(path, mend).decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(path, f"is no text in UTF-8 ({error.reason} at byte {error.start})", mend) from None


def read_json(path: Path, kind: type[T], mend: str = "") -> T:
    """The value in a JSON file, strictly of this type, which pydantic knows: a dataclass, `dict[str, Any]`, …"""
    text = read_text(path, mend)
    try:
        tree = parse_json(text)
        yaml12.check_size(tree)
        if is_dataclass(kind):  # pydantic takes no mapping for one where it is strict, but an object of JSON
            return _adapter(kind).validate_json(text, strict=True)
        return _adapter(kind).validate_python(tree, strict=True)
    except ValidationError as error:
        raise DamagedFile(path, first_mistake(error), mend) from None
    except ValueError as error:
        raise DamagedFile(path, f"not valid JSON ({error})" if text.strip() else "is empty", mend) from None


def read_yaml(path: Path, kind: type[T], mend: str = "") -> T:
    """The value in a YAML file, strictly of this type."""
    text = read_text(path, mend)
    try:
        tree = yaml12.read(text)
    except yaml12.YAMLError as error:
        raise DamagedFile(path, f"not valid YAML: {error}", mend) from None
    try:
        return _adapter(kind).validate_python(tree, strict=True)
    except ValidationError as error:
        raise DamagedFile(path, first_mistake(error) if text.strip() else "is empty", mend) from None


def parse_json(text: str | bytes) -> Any:
    """The value. Raises ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_pointer(path: Path) -> Path:
    """The checkpoint that a run's `checkpoints/latest` or `best` names; it lies beside that file."""
    mend = "write the name of a checkpoint beside it into it, as step_000010"
    name = read_text(path, mend).strip()
    if not _CHECKPOINT.fullmatch(name):
        raise DamagedFile(path, f"names no checkpoint, but says {name[:_SHOWN]!r}" if name else "is empty", mend)
    return path.parent / name


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def first_mistake(error: ValidationError) -> str:
    """What is wrong first, with its key."""
    item, *_ = error.errors(include_url=False)
    key, message = ".".join(map(str, item["loc"])), item["msg"]
    given = "" if item["type"] in ("missing", "unexpected_keyword_argument") else f", not {item['input']!r:.{_SHOWN}}"
    return f"{key}{': ' if key else ''}{message[0].lower()}{message[1:]}{given}"
