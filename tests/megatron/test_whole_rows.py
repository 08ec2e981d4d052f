"""Megatron-Core knows no shared beginnings: each row gets back all that comes before its answer."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is in .venv-megatron (scripts/megatron-env) only", allow_module_level=True)

from tandem.batching.packing import micro_batches
from tandem.training.megatron.packed_rows import whole_rows
from tests.unit.test_batching_prompt_trees import beginnings, contexts


@pytest.mark.parametrize("budget", [300, 100_000])
def test_each_row_begins_with_its_whole_prompt(budget: int) -> None:
    batch = beginnings(3)
    found: list[tuple[bytes, int, int]] = []
    for part in micro_batches(batch, range(len(batch)), budget, prompts_once=False):
        lengths, tokens, scored = whole_rows(part)
        ends = lengths.cumsum()
        starts = ends - lengths
        for place, target, source in zip(scored, part.targets.tolist(), part.source.tolist(), strict=True):
            start = starts[np.searchsorted(ends, place, side="right")]
            found.append((part.token_ids[tokens[start : place + 1]].tobytes(), target, source))
    assert sorted(found) == sorted(contexts(batch))
