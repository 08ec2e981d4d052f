"""A way for a test to keep an engine of another process from running ahead of it."""

from pathlib import Path

STEPS = 10


class ShortRuns:
    """Within it the shared engine of vLLM makes `STEPS` steps after each message, and waits for the next one."""

    def __init__(self, file: Path) -> None:
        """`file`: is there while runs are to be short."""
        self.file = file

    def __enter__(self) -> None:
        self.file.touch()

    def __exit__(self, *_: object) -> None:
        self.file.unlink()
