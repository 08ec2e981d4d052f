"""Published raw files -> parquet of verl rows, one module a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

Converter = Callable[[Path, Path], dict[str, int]]


def _gsm8k(source: Path, out: Path) -> dict[str, int]:
    from tandem.data.preprocess.gsm8k import convert

    return convert(source, out)


CONVERTERS: Mapping[str, Converter] = MappingProxyType({"gsm8k": _gsm8k})
"""Name in `tandem data NAME` to (source, output folder) -> rows by split; imports on the first call."""
