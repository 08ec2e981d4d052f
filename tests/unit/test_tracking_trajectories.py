"""Trajectory files hold every column, aligned with the batch."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.batching.packing import to_batch
from tandem.errors import UserError
from tandem.tracking.trajectories import (
    FolderLimit,
    largest_file_bytes,
    read_groups,
    read_trajectories,
    trajectories_path,
    write_trajectories,
)
from tandem.types import Batch, Branch, Group, Prompt, Score, Status, TokenColumns, Trajectory, Turn


def prompt(index: int, ids: list[int]) -> Prompt:
    return Prompt(index, np.array(ids, np.int32), f"prompt {index}", "toy", {"answer": index})


def trajectory(asked: Prompt, sample: int, ids: list[int], mask: list[bool], **more) -> Trajectory:
    return Trajectory(
        asked,
        sample,
        np.array(ids, np.int32),
        np.array(mask),
        np.full(len(ids), -0.5, np.float32),
        np.full(len(ids), 3, np.int32),
        text=f"response {ids}",
        status=more.pop("status", Status.COMPLETED),
        **more,
    )


@pytest.fixture
def step():
    """Two prompts with two samples each: a tool turn in the first row, an empty response, a failed reward."""
    first, second = prompt(7, [1, 2, 3]), prompt(9, [4])
    groups = [
        Group(
            [
                trajectory(first, 0, [10, 11, 12], [True, False, True], turns=(Turn("policy", 2), Turn("tool", 1))),
                trajectory(first, 1, [], []),
            ],
            [Score(1.0, {"acc": 1.0, "format": 0.5}, prediction="42", seconds=0.25), Score(0.0)],
        ),
        Group(
            [
                trajectory(second, 0, [13], [True], status=Status.TRUNCATED, generation_s=1.5),
                trajectory(second, 1, [14, 15], [False, False]),
            ],
            [Score(0.5), Score(None, failure=Status.REWARD_ERROR, error="Traceback \ud800")],
        ),
    ]
    batch = Batch(
        prompt_ids=np.array([1, 2, 3, 1, 2, 3, 4, 4], np.int32),
        prompt_offsets=np.array([0, 3, 6, 7, 8]),
        response_ids=np.array([10, 11, 12, 13, 14, 15], np.int32),
        response_offsets=np.array([0, 3, 3, 4, 6]),
        loss_mask=np.array([True, False, True, True, False, False]),
        versions=np.full(6, 3, np.int32),
        groups=np.array([0, 0, 1, 1], np.int32),
        trajectories=np.arange(4, dtype=np.int32),
        prompts=np.array([0, 0, 1, 1], np.int32),
        rewards=np.array([1.0, 0.0, 0.5, 0.0], np.float32),
        scored=np.array([True, True, True, False]),
        tokens=TokenColumns(
            rollout_logprobs=np.array([-1, 0, -2, -3, 0, 0], np.float32),
            trainer_logprobs=np.array([-1.5, np.nan, -2.5, -3.5, np.nan, np.nan], np.float32),
            advantages=np.array([0.5, 0, 1.5, -1, 0, 0], np.float32),
        ),
    )
    return groups, batch


def test_every_column_comes_back(tmp_path, step):
    path = trajectories_path(tmp_path, 12)
    write_trajectories(path, 12, *step)
    assert path == tmp_path / "trajectories" / "step_000012.parquet"
    assert [entry.name for entry in path.parent.iterdir()] == ["step_000012.parquet"]
    assert read_trajectories(path).to_pydict() == {
        "step": [12] * 4,
        "prompt_index": [7, 7, 9, 9],
        "group": [0, 0, 1, 1],
        "sample": [0, 1, 0, 1],
        "data_source": ["toy"] * 4,
        "ground_truth": ["{'answer': 7}", "{'answer': 7}", "{'answer': 9}", "{'answer': 9}"],
        "prompt": ["prompt 7", "prompt 7", "prompt 9", "prompt 9"],
        "response": ["response [10, 11, 12]", "response []", "response [13]", "response [14, 15]"],
        "prompt_ids": [[1, 2, 3], [1, 2, 3], [4], [4]],
        "pictures": [None] * 4,
        "response_ids": [[10, 11, 12], [], [13], [14, 15]],
        "loss_mask": [[True, False, True], [], [True], [False, False]],
        "rollout_logprobs": [[-1, 0, -2], [], [-3], [0, 0]],
        "trainer_logprobs": [[-1.5, None, -2.5], [], [-3.5], [None, None]],
        "mismatch_max": [0.5, None, 0.5, None],
        "mismatch_at": [2, -1, 0, -1],
        "advantages": [[0.5, 0, 1.5], [], [-1], [0, 0]],
        "advantage": [1.0, None, -1.0, None],
        "policy_versions": [[3, 3, 3], [], [3], [3, 3]],
        "reward": [1.0, 0.0, 0.5, None],
        "reward_parts": [[("acc", 1.0), ("format", 0.5)], [], [], []],
        "prediction": ["42", None, None, None],
        "judgement": [None, None, None, None],
        "turns": [
            [
                {"author": "policy", "tokens": 2, "reward": None, "text": None},
                {"author": "tool", "tokens": 1, "reward": None, "text": None},
            ],
            [],
            [],
            [],
        ],
        "trajectory": [0, 1, 2, 3],
        "branch": [0] * 4,
        "messages": [None] * 4,
        "environment_reward": [None] * 4,
        "environment_weight": [0.0] * 4,
        "numbers": [[]] * 4,
        "status": ["completed", "completed", "truncated", "reward_error"],
        "error": [None, None, None, "Traceback \\ud800"],
        "generation_s": [0.0, 0.0, 1.5, 0.0],
        "reward_s": [0.25, 0.0, 0.0, 0.0],
    }


def test_a_conversation_is_a_row_a_branch_and_comes_back_whole(tmp_path):
    def branch(prompt_ids: list[int], ids: list[int], mask: list[bool], turns: tuple[Turn, ...]) -> Branch:
        arrays = (np.array(ids, np.int32), np.array(mask), np.full(len(ids), -0.5, np.float32))
        versions = np.full(len(ids), 3, np.int32)
        return Branch(np.array(prompt_ids, np.int32), *arrays, versions, turns, opening=f"opened {prompt_ids}")

    spoken = ({"role": "assistant", "content": "é", "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "2"})
    turns = (Turn("policy", 2, 0.25, "é<|end|>"), Turn("tool", 1, text="2"))
    more = branch([1, 2, 9], [20, 21], [False, True], (Turn("policy", 2, 0.5),)), branch([5], [22], [True], ())
    conversation = trajectory(
        prompt(7, [1, 2, 3]), 0, [10, 11, 12], [True, True, False], turns=turns, branches=more, messages=spoken,
        reward=0.75, numbers={"calls": 1.0},
    )  # fmt: skip
    failed = trajectory(prompt(7, [1, 2, 3]), 1, [], [], status=Status.ENVIRONMENT_ERROR, error="gone")
    scores = [
        Score(1.5, {"environment": 0.75}, environment_weight=2.0),
        Score(None, failure=Status.ENVIRONMENT_ERROR, error="gone"),
    ]
    groups = [Group([conversation, failed], scores), Group([trajectory(prompt(9, [4]), 0, [13], [True])], [Score(0.5)])]
    write_trajectories(tmp_path / "t.parquet", 4, groups, to_batch(groups))
    table = read_trajectories(tmp_path / "t.parquet").to_pydict()
    assert table["trajectory"] == [0, 0, 0, 1, 2] and table["branch"] == [0, 1, 2, 0, 0]
    assert table["prompt"] == ["prompt 7", "opened [1, 2, 9]", "opened [5]", "prompt 7", "prompt 9"]
    assert table["response"] == ["response [10, 11, 12]", None, None, "response []", "response [13]"]
    assert table["reward"] == [1.5, 1.5, 1.5, None, 0.5] and table["prompt_ids"][1:3] == [[1, 2, 9], [5]]
    assert [turn["reward"] for turn in table["turns"][1]] == [0.5]
    again = read_groups(tmp_path / "t.parquet", 4)
    assert [group.scores for group in again] == [group.scores for group in groups]
    before, after = to_batch(groups), to_batch(again)
    for name in ("prompt_ids", "response_ids", "loss_mask", "groups", "trajectories", "prompts", "rewards", "scored"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name
    found = again[0].trajectories[0]
    for name in ("messages", "reward", "numbers", "turns", "text", "status"):
        assert getattr(found, name) == getattr(conversation, name), name
    assert [(one.turns, one.opening) for one in found.branches] == [(one.turns, one.opening) for one in more]
    assert again[0].trajectories[1].status is Status.ENVIRONMENT_ERROR and again[0].trajectories[1].error == "gone"


def test_columns_that_nothing_filled_are_null(tmp_path, step):
    groups, batch = step
    batch.tokens.trainer_logprobs = batch.tokens.advantages = None
    write_trajectories(tmp_path / "t.parquet", 1, groups, batch)
    table = read_trajectories(tmp_path / "t.parquet", ["trainer_logprobs", "advantages", "advantage"])
    assert table.to_pydict() == {name: [None] * 4 for name in ("trainer_logprobs", "advantages", "advantage")}


def test_rows_must_match_the_batch(tmp_path, step):
    groups, batch = step
    with pytest.raises(AssertionError):
        write_trajectories(tmp_path / "t.parquet", 1, groups[:1], batch)
    assert not (tmp_path / "t.parquet").exists()


def test_the_newest_files_stay_and_those_of_other_names(tmp_path, step):
    own = trajectories_path(tmp_path, 1).with_name("step_1 (copy).parquet")
    own.parent.mkdir()
    own.touch()
    for number in (1, 2, 3):
        write_trajectories(trajectories_path(tmp_path, number), number, *step, FolderLimit(files=2))
    assert {path.name for path in own.parent.iterdir()} == {own.name, "step_000002.parquet", "step_000003.parquet"}


def test_the_oldest_files_go_where_all_are_larger_than_the_bound(tmp_path, step):
    folder = trajectories_path(tmp_path, 1).parent

    def write(number: int, kept: FolderLimit) -> set[str]:
        write_trajectories(trajectories_path(tmp_path, number), number, *step, kept)
        return {path.name for path in folder.iterdir()}

    assert write(9, FolderLimit()) == {"step_000009.parquet"}
    size = (folder / "step_000009.parquet").stat().st_size
    two = FolderLimit(gib=2.5 * size / 2**30)
    later = {"step_000009.parquet"}
    assert write(1, two) == later | {"step_000001.parquet"}, "what a run that went back has left does not count"
    assert write(2, two) == later | {"step_000001.parquet", "step_000002.parquet"}
    assert write(3, two) == later | {"step_000002.parquet", "step_000003.parquet"}
    assert write(4, FolderLimit(files=1, gib=1.0)) == later | {"step_000004.parquet"}
    assert write(5, FolderLimit(gib=0.5 * size / 2**30)) == later | {"step_000005.parquet"}, "the newest one stays"
    (folder / "step_000001.parquet").symlink_to(tmp_path / "an archive that is not there.parquet")
    assert write(6, two) == later | {f"step_00000{number}.parquet" for number in (1, 5, 6)}


def test_a_file_is_as_large_as_is_told(tmp_path):
    """With numbers that no codec makes shorter."""
    drawn, length, asked = np.random.default_rng(0), 1000, 50
    prompts = [prompt(number, drawn.integers(0, 150_000, asked).tolist()) for number in range(8)]
    groups = []
    for one in prompts:
        ids = drawn.integers(0, 150_000, length)
        answer = trajectory(one, 0, ids.tolist(), [True] * length)
        answer.rollout_logprobs[:] = drawn.random(length)
        answer.text = "".join(drawn.choice(list("abcdefgh ijklmnop"), 4 * length))
        groups.append(Group([answer], [Score(1.0)]))
    batch = to_batch(groups)
    batch.tokens.old_logprobs, batch.tokens.advantages = drawn.random((2, len(batch.response_ids)), np.float32)
    path = trajectories_path(tmp_path, 1)
    write_trajectories(path, 1, groups, batch)
    assert 0.6 < path.stat().st_size / largest_file_bytes(8, asked, length) < 1.1


def test_files_that_other_programs_have_written_again_are_read(tmp_path, step):
    """pandas and polars write long texts and lists, or codes of texts; numbers of any size."""
    groups, batch = step
    path = trajectories_path(tmp_path, 3)
    write_trajectories(path, 3, groups, batch)
    table = read_trajectories(path)
    others = {
        "text": pa.large_string(),
        "ids": pa.large_list(pa.int64()),
        "codes": pa.dictionary(pa.int32(), pa.string()),
    }
    for name, kind in (("prompt", "text"), ("response", "text"), ("prompt_ids", "ids"), ("status", "codes")):
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].cast(others[kind]))
    pq.write_table(table, path)
    found = read_groups(path, 3)
    assert [t.text for g in found for t in g.trajectories] == [t.text for g in groups for t in g.trajectories]
    pq.write_table(table.set_column(0, "step", pa.array(["x"] * len(table))), path)
    with pytest.raises(UserError, match="its column step is of string, not int64"):
        read_groups(path, 3)
