"""vLLM that notes, for each sample that has ended, how many tokens of its prompt were in the cache."""

from pathlib import Path
from typing import Any

from tandem.generation.vllm import VllmEngine
from tandem.types import Completion, Delta


class CountedVllm(VllmEngine):
    def __init__(self, counts: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counts = counts

    def _read(self, output: Any) -> tuple[int, Completion | Delta]:
        if output.finished:
            with self._counts.open("a") as file:
                file.write(f"{output.num_cached_tokens}\n")
        return super()._read(output)
