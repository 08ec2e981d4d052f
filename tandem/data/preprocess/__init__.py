"""Published raw files -> parquet of verl rows, one module a data set."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tandem.data.preprocess import gsm8k

CONVERTERS: Mapping[str, Callable[[Path, Path], dict[str, int]]] = {"gsm8k": gsm8k.convert}
"""Name in `tandem data NAME` to (source, output folder) -> rows by split."""
