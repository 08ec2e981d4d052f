"""sort4 as scripts/quickstart leaves it, or one whose model has learned nothing: what some benchmarks begin with."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WARM = ROOT / "runs/quickstart-warmup"


class Warmed(NamedTuple):
    rows: Path
    """The folder of train.jsonl and val.jsonl."""
    model: Path


@contextmanager
def warmed(small: bool) -> Iterator[Warmed]:
    """What the quickstart has made; small: made here, and removed at the end."""
    if small:
        sys.path.append(str(ROOT / "examples/sort4"))
        import task

        with TemporaryDirectory() as folder:
            task.make(Path(folder), seed=0)
            yield Warmed(Path(folder), Path(folder) / "model")
        return
    model = next(WARM.glob("sft/checkpoints/step_*/model"), None)
    if model is None:
        sys.exit(f"no model in {WARM}: run scripts/quickstart first")
    yield Warmed(WARM / "task", model)
