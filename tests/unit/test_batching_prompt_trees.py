"""Prompts that begin alike: each beginning is computed once, and every token keeps its own context."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.batching.packing import demonstrations_to_batch, micro_batches
from tandem.batching.prompt_trees import BLOCK, paths_of, segments_of
from tandem.models.attention import packed_attention
from tandem.types import Batch, Demonstration, MicroBatch
from tests.unit.test_training_fsdp import assert_close, engine_of, model_of, train


def beginnings(seed: int, vocabulary: int = 29, count: int = 12) -> Batch:
    """Rows of four groups, whose prompts are blocks of two kinds, and a rest that may be empty or a block long."""
    random = np.random.default_rng(seed)
    kinds = random.integers(1, vocabulary, (2, BLOCK))
    made: list[Demonstration] = []
    for _ in range(count):
        blocks = [kinds[kind] for kind in random.integers(0, 2, random.integers(0, 4))]
        prompt = np.concatenate([*blocks, random.integers(1, vocabulary, random.choice([0, 1, 5, BLOCK]))])
        prompt = prompt if len(prompt) else kinds[0][:3]
        answer = random.integers(1, vocabulary, random.integers(1, 5))
        made.append(Demonstration(0, prompt.astype(np.int32), answer.astype(np.int32), np.ones(len(answer), np.bool_)))
    batch = demonstrations_to_batch(made, np.sort(random.integers(0, 4, count)))
    batch.tokens.loss_weights = (batch.loss_mask / batch.loss_mask.sum()).astype(np.float32)
    batch.tokens.shares = batch.tokens.loss_weights
    batch.tokens.advantages = random.standard_normal(len(batch.response_ids)).astype(np.float32)
    return batch


def seen(part: MicroBatch) -> list[tuple[bytes, int, int]]:
    """For each scored token: all tokens that its prediction is computed from, itself, and where it is in the batch."""
    found: list[tuple[bytes, int, int]] = []
    for place, target, source in zip(
        part.predicted_at.tolist(), part.targets.tolist(), part.source.tolist(), strict=True
    ):
        segment = int(np.searchsorted(part.offsets, place, side="right")) - 1
        tokens = [part.token_ids[part.offsets[segment] : place + 1]]
        while (segment := int(part.prefixes[segment])) >= 0:
            tokens.append(part.token_ids[part.offsets[segment] : part.offsets[segment + 1]])
        found.append((np.concatenate(tokens[::-1]).tobytes(), target, source))
    return found


def contexts(batch: Batch) -> list[tuple[bytes, int, int]]:
    """The same from the rows."""
    found: list[tuple[bytes, int, int]] = []
    for row in range(len(batch)):
        prompt = batch.prompt_ids[batch.prompt_offsets[row] : batch.prompt_offsets[row + 1]]
        for source in range(batch.response_offsets[row], batch.response_offsets[row + 1]):
            answer = batch.response_ids[batch.response_offsets[row] : source]
            found.append((np.concatenate((prompt, answer)).tobytes(), int(batch.response_ids[source]), source))
    return found


@pytest.mark.parametrize("budget", [1, 300, 700, 100_000])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_keeps_its_context_and_budgets_are_kept(seed: int, budget: int) -> None:
    batch = beginnings(seed)
    parts = micro_batches(batch, range(len(batch)), budget)
    assert sorted(pair for part in parts for pair in seen(part)) == sorted(contexts(batch))
    for part in parts:
        assert (part.prefixes < np.arange(len(part.prefixes))).all(), "a segment stands after what it continues"
        assert len(part.token_ids) <= budget or len(np.unique(batch.row_of_token[part.source])) == 1
    for part in micro_batches(batch, range(len(batch)), budget, prompts_once=False):
        own = np.unique(batch.row_of_token[part.source])
        whole = (np.diff(batch.prompt_offsets) + np.diff(batch.response_offsets) - 1)[own].sum()
        assert whole <= budget or len(own) == 1


def test_what_prompts_share_is_there_once() -> None:
    """Two conversations behind one system prompt: of turns each prompt begins with the one before it."""
    random = np.random.default_rng(0)
    system, others = random.integers(0, 9, 2 * BLOCK), [random.integers(0, 9, BLOCK) for _ in range(3)]
    prompts = [system, np.r_[system, others[0]], np.r_[system, others[0], others[1], 1, 2], np.r_[system, others[2]]]
    lengths = np.array([len(prompt) for prompt in prompts])
    tree = segments_of(np.cumsum(lengths) - lengths, lengths, paths_of(prompt.astype(np.int32) for prompt in prompts))
    assert tree.lengths.tolist() == [2 * BLOCK, BLOCK, BLOCK + 2, BLOCK]
    assert tree.prefixes.tolist() == [-1, 0, 1, 0]
    assert tree.last_P.tolist() == [0, 1, 2, 3]


def test_a_conversation_of_many_turns_costs_its_tokens_once() -> None:
    random = np.random.default_rng(0)
    text = random.integers(0, 30, 21 * BLOCK).astype(np.int32)
    answer, mask = np.array([1, 2], np.int32), np.ones(2, np.bool_)
    turns = [Demonstration(0, text[: turn * BLOCK], answer, mask) for turn in range(1, 21)]
    (part,) = micro_batches(demonstrations_to_batch(turns, np.zeros(20, np.int32)), range(20), 21 * BLOCK)
    assert len(part.token_ids) == 20 * BLOCK + 20


@pytest.mark.parametrize("worth", [1, 100_000], ids=["in pieces", "copied"])
@pytest.mark.parametrize("family", ["Qwen2", "Mistral"])
def test_loss_and_gradients_are_those_of_rows_alone(family: str, worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too, long beginnings are pieces of their own and short ones copied."""
    monkeypatch.setattr(packed_attention, "_WORTH_A_PIECE", worth)
    engine, batch = engine_of(model_of(family)), beginnings(3)
    together, apart = micro_batches(batch, range(len(batch)), 100_000), micro_batches(batch, range(len(batch)), 1)
    assert len(together) == 1 and max(map(len, _chains(together[0]))) == 4, "prompts continue one another"
    (wanted_loss, wanted), (loss, gradients) = train(engine, apart), train(engine, together)
    assert loss == pytest.approx(wanted_loss, abs=1e-6)
    assert_close(gradients, wanted, 3e-6)


def _chains(part: MicroBatch) -> list[list[int]]:
    """Each segment with all that it continues."""
    found: list[list[int]] = []
    for segment, prefix in enumerate(part.prefixes.tolist()):
        found.append([segment, *(found[prefix] if prefix >= 0 else [])])
    return found
