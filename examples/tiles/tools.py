"""The tool of examples/tiles/look.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Tiles:
    """The pairs of one row, which lie face down."""

    def __init__(self, folder: str) -> None:
        """`folder`: where the rows' paths begin."""
        self._folder = Path(folder)
        self._paths: list[str] = []

    def reset(self, pairs: list[str], **row: Any) -> None:
        self._paths = pairs

    def look(self, pair: str) -> list[dict[str, Any]]:
        """Turn a pair of tiles over.

        Args:
            pair: 1 or 2.
        """
        if pair not in ("1", "2"):
            raise ValueError(f"there is no pair {pair!r}")
        return [{"type": "image", "path": str(self._folder / self._paths[int(pair) - 1])}]
