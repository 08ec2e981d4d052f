"""What rows cost, by hand, and how equal the ranks' work is in each pass of a step."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import GptOssConfig, Qwen2Config, Qwen3MoeConfig

from tandem.batching.balance import BalancedPass, balance_rows, row_costs
from tandem.batching.packing import split_groups
from tandem.models.cost import TOKENS_ALONE, RowCost, row_cost
from tandem.types import Batch
from tests.cluster_workers import ragged_batch


def test_a_row_costs_its_tokens_its_scores_and_its_pairs() -> None:
    """Prompts of 3, answers of 4 and 2, whose last tokens are not fed: tokens 3 to 5, and 3."""
    batch = ragged_batch([4, 2])
    cost = RowCost(token=100.0, predicted=10.0, pairs=((None, 1.0),))
    prompt = 300 + (1 + 2 + 3)
    assert row_costs(batch, batch.groups, cost).tolist() == [prompt + 300 + (4 + 5 + 6) + 40, prompt + 100 + 4 + 20]
    windowed = RowCost(token=0.0, pairs=((2, 1.0), (None, 10.0)))
    assert row_costs(batch, batch.groups, windowed)[0] == (1 + 2 + 2 + 2 + 2 + 2) + 10 * (1 + 2 + 3 + 4 + 5 + 6)
    batch.groups[:] = batch.prompts[:] = 0
    assert row_costs(batch, batch.groups, cost).tolist() == [661, 124], "siblings share their prompt"


def test_the_cost_of_models_by_their_sizes() -> None:
    """Attention: queries and outputs of 4 heads of 8, keys and values of 2; a feed-forward layer is three matrices."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100}
    dense = row_cost(Qwen2Config(**sizes, num_hidden_layers=3, intermediate_size=64), value_head=False)
    attention = 32 * (2 * 4 * 8 + 2 * 2 * 8)
    assert dense == RowCost(3 * (attention + 3 * 32 * 64), 3200, ((None, 3 * 2 * 32),))
    assert row_cost(Qwen2Config(**sizes), value_head=True).predicted == 0
    sparse = Qwen3MoeConfig(
        **sizes, num_hidden_layers=1, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
    )
    assert row_cost(sparse, value_head=False).token == attention + 3 * 32 * 2 * 16
    windows = row_cost(GptOssConfig(**sizes, num_hidden_layers=4, sliding_window=7), value_head=False).pairs
    assert windows == ((None, 2 * 64), (7, 2 * 64))


def skewed_step(groups: int) -> Batch:
    """Groups of 4 siblings; a tenth of the rows is ten times as long as the others."""
    rng = np.random.default_rng(0)
    batch = ragged_batch(
        np.where(rng.random(4 * groups) < 0.1, 500, rng.integers(10, 90, 4 * groups)).tolist(), prompt=40
    )
    batch.groups = batch.prompts = np.repeat(np.arange(groups, dtype=np.int32), 4)
    return batch


def busiest_share(batch: Batch, ranks: list[np.ndarray], rows: np.ndarray, cost: RowCost) -> float:
    """What the busiest rank has to do in a pass, to what each had if the pass were shared evenly."""
    own = [row_costs(batch, batch.groups, cost)[np.intersect1d(rank, rows)].sum() for rank in ranks]
    return max(own) * len(own) / sum(own)


COST = RowCost(1.0, 0.2, ((None, 0.01),))


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_equally_busy_in_every_optimizer_step(epochs: int, ranks: int) -> None:
    """Of each epoch, though its cut is another one; balanced as a whole alone, they are not."""
    batch = skewed_step(128)
    cuts = [rows for epoch in range(epochs) for rows in split_groups(batch, 4, epoch)]
    everything = np.arange(len(batch))
    parts = balance_rows(batch, ranks, COST, [BalancedPass(everything), *(BalancedPass(rows, 3.0) for rows in cuts)])
    assert np.array_equal(np.sort(np.concatenate(parts)), everything)
    assert busiest_share(batch, parts, everything, COST) < 1.05
    assert max(busiest_share(batch, parts, rows, COST) for rows in cuts) < 1.1
    blind = balance_rows(batch, ranks, COST)
    assert max(busiest_share(batch, blind, rows, COST) for rows in cuts) > 1.15


def test_attention_counts() -> None:
    """One row of 4,000 tokens has as many tokens as eight of 500, and more pairs than they."""
    batch = ragged_batch([4000, *[500] * 8], prompt=0)
    by_tokens = balance_rows(batch, 2, TOKENS_ALONE)
    assert sorted(map(len, by_tokens)) == [1, 8]
    by_cost = balance_rows(batch, 2, RowCost(1.0, 0.0, ((None, 1e-3),)))
    assert sorted(map(len, by_cost)) == [1, 8]
    batch = ragged_batch([4000, *[500] * 12], prompt=0)
    assert sorted(map(len, balance_rows(batch, 2, TOKENS_ALONE))) == [3, 10]
    assert sorted(map(len, balance_rows(batch, 2, RowCost(1.0, 0.0, ((None, 1e-3),))))) == [1, 12]


def test_siblings_stay_together_unless_that_leaves_ranks_idle() -> None:
    many = skewed_step(64)
    assert all(len(np.unique(many.groups[part])) * 4 == len(part) for part in balance_rows(many, 2))
    alone = ragged_batch([100] * 4)
    alone.groups = alone.prompts = np.zeros(4, np.int32)
    assert [len(part) for part in balance_rows(alone, 2)] == [2, 2]
