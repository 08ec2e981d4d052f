"""Installed distributions that sandboxed programs may import: their files, and those of what they require."""

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from tandem.errors import UserError

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)[^;]*(?:;(.*))?")


def find_packages(names: Sequence[str]) -> Mapping[str, Path]:
    """Module or folder name -> where it is installed, of these distributions and of all that they require.

    Raises UserError for one that is not installed. What it requires only elsewhere, or for an extra, may be absent.
    """
    found: dict[str, Path] = {}
    seen: set[str] = set()
    waiting = [(name, True) for name in names]
    while waiting:
        name, needed = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            distribution = metadata.distribution(name)
        except (metadata.PackageNotFoundError, ValueError):
            if needed:
                raise UserError(f"packages: {name!r} is not installed here; pip install it, or leave it out") from None
            continue
        found |= _top_level(distribution)
        for requirement in distribution.requires or []:
            if (match := _REQUIREMENT.match(requirement)) and "extra ==" not in (match[2] or ""):
                waiting.append((match[1], False))
    return found


def _top_level(distribution: metadata.Distribution) -> dict[str, Path]:
    """The files and folders of a distribution in the folder that it is installed in."""
    first = {path.parts[0] for path in distribution.files or [] if path.parts[0] not in ("..", "__pycache__")}
    return {name: Path(str(distribution.locate_file(name))) for name in sorted(first)}
