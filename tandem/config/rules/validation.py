"""What validation needs: rows, and engines with room for their answers."""

from collections.abc import Iterator
from typing import Any, cast

from tandem.config.tree import RolloutConfig, RunConfig


def validation_has_rows(config: RunConfig) -> Iterator[str]:
    data = cast(Any, config).data
    if config.trainer.eval_every and not (data.val_files or getattr(data, "val_sets", None)):  # absent where unsound
        yield f"trainer.eval_every: {config.trainer.eval_every} needs data.val_files, and none is given"


def validation_has_room(config: RolloutConfig) -> Iterator[str]:
    most = config.generation.max_response_tokens
    for name, one in config.data.val_sets.items():
        if one.max_response_tokens is not None and one.max_response_tokens > most:
            yield (
                f"generation: max_response_tokens: {most:,}, for which engines have room, is less than "
                f"data.val_sets.{name}.max_response_tokens: {one.max_response_tokens:,}; raise it"
            )
