"""Answers made ahead of training come back from a checkpoint as they were, bit for bit."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.checkpoint.saved_rollouts import read_rollouts, write_rollouts
from tandem.checkpoint.store import CheckpointStore
from tandem.data.rows import read_rows
from tandem.errors import UserError
from tandem.types import Branch, Group, Picture, Prompt, SavedGroup, Score, Status, Trajectory, Turn

RANDOM = np.random.default_rng(0)


def prompt_of(draw: int) -> Prompt:
    """Draw n is row n + 10."""
    return Prompt(draw + 10, np.arange(draw + 1, dtype=np.int32), f"prompt {draw}", "source", draw, {"column": draw})


def answer(draw: int, sample: int, length: int, experts: bool = False, **changes: Any) -> Trajectory:
    made = Trajectory(
        prompt_of(draw),
        sample,
        RANDOM.integers(0, 99, length).astype(np.int32),
        RANDOM.random(length) < 0.7,
        -RANDOM.random(length).astype(np.float32) * np.float32(1e-3),
        np.sort(RANDOM.integers(3, 6, length)).astype(np.int32),
        f"said {draw} \udc80 ünï",
        Status.COMPLETED,
        (Turn("policy", length),),
        0.1 + 0.2,
        RANDOM.integers(0, 8, (draw + length, 2, 3)).astype(np.uint8) if experts else None,
    )
    return replace(made, **changes)


FINISHED = {
    7: SavedGroup(
        Group(
            [answer(7, 0, 5, experts=True), answer(7, 1, 0, status=Status.ABORTED, turns=(), text="")],
            [
                Score(1 / 3, {"acc": 1.0, "far": 1e-300}, "4", error="a reason", seconds=0.1),
                Score(None, failure=Status.REWARD_TIMEOUT, error="Traceback …"),
            ],
            Score(-0.0),
        )
    ),
    9: SavedGroup(Group([answer(9, 0, 1, experts=True, turns=(Turn("policy", 0), Turn("tool", 1)))], [Score(0.0)])),
    8: SavedGroup(Group([answer(8, 0, 2), answer(8, 1, 3)], []), answer(8, 0, 4, status=Status.TRUNCATED), kept=True),
}


def branch(prompt: int, length: int, experts: bool = False) -> Branch:
    made = answer(prompt, 0, length, experts)
    turns = (Turn("policy", length, 0.1, "said"), Turn("tool", 0))
    ids = RANDOM.integers(0, 99, prompt).astype(np.int32)
    return Branch(
        ids, made.response_ids, made.loss_mask, made.rollout_logprobs, made.versions, turns, made.experts, "opened",
        (Picture("cd", (2, 1), prompt),),
    )  # fmt: skip


def conversation(draw: int, sample: int, *branches: Branch, **changes: Any) -> Trajectory:
    """Opened with other tokens than the row's prompt."""
    ids = RANDOM.integers(0, 99, sample + 3).astype(np.int32)
    shown = [Picture("ab", (1, 2), place) for place in (1, sample + 3)]
    opened = replace(prompt_of(draw), token_ids=ids, text="opened", pictures=(shown[0],))
    call = {
        "role": "assistant",
        "content": "\ud800",
        "tool_calls": [{"id": "1", "function": {"arguments": {"x": 0.1}}}],
    }
    more = {
        "messages": (call, {"role": "tool", "content": "12"}),
        "opened_with": ({"role": "user", "content": "1 + 11?"},),
        "last_turn": Status.COMPLETED,
        "reward": 0.1 + 0.2,
        "numbers": {"calls": 2.0},
        "turns": (Turn("policy", 2, 0.25), Turn("tool", 1)),
        "pictures": (shown[1],),
    }
    return answer(draw, sample, 3, prompt=opened, branches=branches, **{**more, **changes})


CONVERSATIONS = {
    4: SavedGroup(
        Group(
            [
                conversation(4, 0, branch(5, 2), branch(0, 4, experts=True)),
                conversation(4, 1, ends_in=0),
                conversation(4, 2, messages=(), turns=(), reward=None, status=Status.TRUNCATED),
                answer(4, 3, 0, status=Status.ENVIRONMENT_ERROR, turns=(), error="the server is gone"),
            ],
            [Score(1.0), Score(0.5), Score(0.0), Score(None, failure=Status.ENVIRONMENT_ERROR, error="gone")],
        ),
        conversation(4, 0, branch(2, 1)),
    )
}


def assert_same(left: Any, right: Any) -> None:
    """Of the same types, all the way down; floats by their bits."""
    assert type(left) is type(right), (left, right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif hasattr(left, "__dataclass_fields__"):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    else:
        assert repr(left) == repr(right)


def written(directory: Path, finished: dict[int, SavedGroup]) -> Path:
    (directory / "state").mkdir()
    write_rollouts(directory, finished)
    return directory


@pytest.mark.parametrize("draws", [[7, 9, 8, 4], [4, 7], [8], []])
def test_what_was_finished_comes_back_as_it_was(draws: list[int], tmp_path: Path) -> None:
    finished = {draw: (FINISHED | CONVERSATIONS)[draw] for draw in draws}
    assert_same(read_rollouts(written(tmp_path, finished), prompt_of), finished)


def test_a_checkpoint_that_says_nothing_of_openings_is_read(tmp_path: Path) -> None:
    """As checkpoints were until 2026-11-28: neither what a conversation was opened with nor how its last turn ended."""
    checkpoint = written(tmp_path, CONVERSATIONS)
    (path,) = (checkpoint / "state").glob("*.json")
    described = json.loads(path.read_text(encoding="utf-8"))
    for one in described:
        for of_answer in (*one["answers"], *filter(None, [one["greedy_answer"]])):
            del of_answer["opened_with"], of_answer["last_turn"]
    path.write_text(json.dumps(described), encoding="utf-8")
    (finished,) = read_rollouts(checkpoint, prompt_of).values()
    for now, then in zip(finished.group.trajectories, CONVERSATIONS[4].group.trajectories, strict=True):
        assert_same(now, replace(then, opened_with=(), last_turn=None))


def test_a_conversation_on_a_row_that_has_changed_is_refused(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, CONVERSATIONS)
    with pytest.raises(UserError, match=r"row 14, which has changed since \(`column`\); put"):
        read_rollouts(checkpoint, lambda draw: replace(prompt_of(draw), row={"column": "another"}))


def test_a_checkpoint_without_them_has_none(tmp_path: Path) -> None:
    assert read_rollouts(tmp_path, prompt_of) == {}


def test_arrays_may_be_written_to(tmp_path: Path) -> None:
    one = read_rollouts(written(tmp_path, FINISHED), prompt_of)[7].group.trajectories[0]
    one.loss_mask[:] = False


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"index": 4}, "its place in the data"),
        ({"token_ids": np.array([5], np.int32)}, "tokens of the prompt"),
        ({"ground_truth": "another"}, "`ground_truth`"),
        ({"data_source": "another", "row": {"columns": 0}}, "`column`, `columns`, `data_source`"),
    ],
)
def test_answers_to_another_row_are_refused(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    checkpoint = written(tmp_path, FINISHED)
    told = (
        rf"answers and scores of data row 17, which has changed since \({named}\), as 2 more rows have; put the data "
        "back, or add trainer.save_rollouts=false"
    )
    with pytest.raises(UserError, match=told):
        read_rollouts(checkpoint, lambda draw: replace(prompt_of(draw), **changed))


def test_one_row_that_has_changed_is_told_alone(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, FINISHED)
    with pytest.raises(UserError, match=r"row 18, which has changed since \(`ground_truth`\); put"):
        read_rollouts(checkpoint, lambda draw: replace(prompt_of(draw), ground_truth=None if draw == 8 else draw))


def test_a_row_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    """Every kind of value that parquet files hold."""
    numbers = np.arange(2)
    table = pa.table(
        {
            "bytes": [b"\x00\xff", None],
            "decimal": [Decimal("1.10"), Decimal("2")],
            "date": [date(2026, 1, 2), None],
            "time": [time(1, 2, 3), None],
            "stamp": pa.array([datetime(2026, 1, 2, tzinfo=UTC), None]),
            "duration": [timedelta(seconds=3), None],
            "nested": [{"tests": ["a", None], "ü": float("nan")}] * 2,
            "map": pa.array([[("key", 1)], []], pa.map_(pa.string(), pa.int64())),
            "number": numbers / 3,
        }
    )
    pq.write_table(table, tmp_path / "data.parquet")

    def read_again(draw: int) -> Prompt:
        rows = dict(read_rows(tmp_path / "data.parquet"))
        return replace(prompt_of(draw), row=rows[draw])

    kept = {draw: SavedGroup(Group([answer(draw, 0, 1, prompt=read_again(draw))], [Score(0.0)])) for draw in (1, 2)}
    assert [*read_rollouts(written(tmp_path, kept), read_again)] == [1, 2]


def test_what_has_no_checksum_is_told(tmp_path: Path) -> None:
    prompt = replace(prompt_of(7), row={"column": object()})
    kept = {7: SavedGroup(Group([answer(7, 0, 1, prompt=prompt)], [Score(0.0)]))}
    with pytest.raises(UserError, match=r"data row 17: a column holds a object.*or give trainer.save_rollouts=false"):
        written(tmp_path, kept)


@pytest.mark.parametrize("name", ["rollouts.json", "rollouts.safetensors"])
@pytest.mark.parametrize("gone", [True, False])
def test_damage_is_told_as_that_of_other_files(name: str, gone: bool, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    with store.write(3) as draft:
        written(draft.directory, FINISHED)
    store.finish()
    file = tmp_path / "checkpoints/step_000003/state" / name
    content = file.read_bytes()
    file.unlink() if gone else file.write_bytes(content[:-1] + b"x")
    with pytest.raises(UserError, match=f"step_000003: damaged .*{name}.*name of an earlier one into .*latest"):
        store.latest()
