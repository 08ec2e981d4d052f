"""Everything that happened to each trajectory of a step, a row a branch of it: most trajectories have one.

<run>/trajectories/step_000001.parquet      what the step learned from
<run>/validation/step_000010.parquet        the validation answers; the same columns, those of training are null
"""

import json
import os
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tandem.errors import UserError
from tandem.files import temporary_name, writing
from tandem.types import Batch, Branch, Group, IntArray, Picture, Prompt, Score, Status, Trajectory, Turn, VideoStep

_NAME = re.compile(r"step_(\d+)\.parquet")
_GIB = 2**30
_EMPTY_FILE = 8 * 2**10
"""Bytes: the names and places of columns."""
_TURNS = pa.list_(
    pa.struct([("author", pa.string()), ("tokens", pa.int32()), ("reward", pa.float64()), ("text", pa.string())])
)
_PICTURES = pa.list_(
    pa.struct(
        [("key", pa.string()), ("rows", pa.int32()), ("columns", pa.int32()), ("place", pa.int32()),
         ("step", pa.list_(pa.int32()))]
    )
)  # fmt: skip
_NUMBERS = pa.map_(pa.string(), pa.float64())
_TYPES: dict[str, pa.DataType] = {
    **dict.fromkeys(("step", "prompt_index"), pa.int64()),
    **dict.fromkeys(("group", "trajectory", "branch", "sample", "mismatch_at"), pa.int32()),
    **dict.fromkeys(("data_source", "ground_truth", "prediction", "status", "error", "judgement"), pa.string()),
    **dict.fromkeys(("prompt", "response", "messages"), pa.string()),
    **dict.fromkeys(("reward", "environment_reward", "environment_weight"), pa.float64()),
    **dict.fromkeys(("generation_s", "reward_s"), pa.float64()),
    **dict.fromkeys(("reward_parts", "numbers"), _NUMBERS),
    **dict.fromkeys(("mismatch_max", "advantage"), pa.float32()),
    **dict.fromkeys(("prompt_ids", "response_ids", "policy_versions"), pa.list_(pa.int32())),
    **dict.fromkeys(("rollout_logprobs", "trainer_logprobs", "advantages"), pa.list_(pa.float32())),
    "loss_mask": pa.list_(pa.bool_()),
    "pictures": _PICTURES,
    "turns": _TURNS,
}
"""What each column holds."""
_OFTEN_NULL = frozenset(("pictures", "prediction", "error", "judgement", "messages"))
"""Columns that may hold nothing in a whole file, so that another writer may have left out their type."""
_OF_OTHER_FILES = (OSError, pa.ArrowException, LookupError, TypeError, ValueError, AttributeError, OverflowError)


class FolderLimit(NamedTuple):
    """How much of a folder of such files stays, the newest ones; 0: all of it."""

    files: int = 0
    gib: float = 0.0


ALL = FolderLimit()


def trajectories_path(run_dir: Path, step: int) -> Path:
    return run_dir / "trajectories" / f"step_{step:06d}.parquet"


def validation_path(run_dir: Path, step: int) -> Path:
    return run_dir / "validation" / f"step_{step:06d}.parquet"


def write_trajectories(path: Path, step: int, groups: list[Group], batch: Batch, keep: FolderLimit = ALL) -> None:
    """Write one row a branch; the rows of `batch` are the branches of the trajectories of `groups`, flattened.

    Response and messages are those of a whole trajectory, and stand in the row of its first branch.

    `keep`: what stays of the folder's files, those of the newest steps up to this one, whose own stays in any case.
    Files of later steps, which a run that went back to an earlier checkpoint has left behind, are replaced as it comes
    to them.
    """
    table, temporary = _table(step, groups, batch), temporary_name(path)
    with writing(path):
        path.parent.mkdir(exist_ok=True)  # in a run's directory, which is not made anew where somebody has deleted it
        try:
            # every step pays for this file: a fast codec, no dictionaries, no statistics, no flush to the disk
            pq.write_table(table, temporary, compression="lz4", use_dictionary=False, write_statistics=False)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    _remove_old(path.parent, step, keep)


def _remove_old(folder: Path, step: int, keep: FolderLimit) -> None:
    upto = [name for number, name in _names_by_step(folder).items() if number <= step]
    stays = upto[-keep.files :]
    if keep.gib:
        sizes = [_bytes_of(f"{folder}/{name}") for name in reversed(stays)]
        fit = sum(total <= keep.gib * _GIB for total in accumulate(sizes))
        stays = stays[-max(fit, 1) :]
    for old in upto[: len(upto) - len(stays)]:
        (folder / old).unlink(missing_ok=True)


def _bytes_of(path: str) -> int:
    """0 where somebody else has taken it away, or it is a link to what is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def largest_file_bytes(answers: int, prompt_tokens: int, response_tokens: int) -> int:
    """About what a file of so many answers takes where each prompt and each response has so many tokens, in one branch.

    A response token is its id, two log-probs, an advantage and a version of four bytes each, a bit of the mask, and
    some letters of text that lz4 makes shorter; a prompt token is its id and its text. A file without rows takes some.
    """
    return _EMPTY_FILE + answers * (8 * prompt_tokens + 21 * response_tokens)


def files_by_step(folder: Path) -> dict[int, Path]:
    """The files of the steps, ascending. Whatever else lies there, such as a copy of one, is the user's."""
    return {step: folder / name for step, name in _names_by_step(folder).items()}


def _names_by_step(folder: Path) -> dict[int, str]:
    """Names alone: each step looks through a hundred, and paths of them take twice as long to make as all else."""
    named = map(_NAME.fullmatch, os.listdir(folder) if folder.is_dir() else ())
    return dict(sorted((int(name[1]), name[0]) for name in named if name))


def read_trajectories(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Raises TypeError where a column holds something else than such files do."""
    table = pq.ParquetFile(path).read(columns=list(columns) if columns else None)
    for field in table.schema:
        if pa.types.is_null(field.type) and field.name in _OFTEN_NULL:
            continue
        if not _alike(field.type, _TYPES.get(field.name, field.type)):
            raise TypeError(f"its column {field.name} is of {field.type}, not {_TYPES[field.name]}")
    return table


def read_groups(path: Path, step: int) -> list[Group]:
    """The trajectories of a file with their scores, siblings together, for `step` of this run: versions are counted
    from there, so that answers are as stale as in the step that they are of. UserError when it is no such file."""
    with reading_trajectories(path):
        rows = read_trajectories(path).to_pylist()
        groups: dict[int, Group] = {}
        for row in rows:
            group, later = groups.setdefault(row["group"], Group([], [])), step - row["step"]
            if row["branch"]:
                group.trajectories[-1].branches += (_branch(row, later),)
                continue
            group.trajectories.append(_trajectory(row, later))
            group.scores.append(_score(row))
    return list(groups.values())


def staleness_of(path: Path) -> int:
    """How many versions before those of its step the oldest trained token of a file was made; UserError as above."""
    with reading_trajectories(path):
        table = read_trajectories(path, ["step", "policy_versions", "loss_mask"])
        names = ("policy_versions", "loss_mask")
        versions, trained = (table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in names)
        return int((table["step"][0].as_py() - 1 - versions[trained]).max(initial=0))


def largest_id_of(path: Path) -> int:
    """The largest token id in a file; UserError as above."""
    with reading_trajectories(path):
        table = read_trajectories(path, ["prompt_ids", "response_ids"])
        ids = (table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in table.column_names)
        return max(int(of_column.max(initial=-1)) for of_column in ids)


def _alike(one: pa.DataType, other: pa.DataType) -> bool:
    """As far as values are read alike: whole numbers of any size, and other numbers; texts and lists of any kind, as
    other programs write them; a map as a list of pairs. Of structures the fields are not looked at."""
    one, other = (kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (one, other))
    if _is_list(one) and _is_list(other):
        return _alike(one.value_type, other.value_type)
    if _is_list(one) and pa.types.is_map(other):
        return pa.types.is_struct(one.value_type)
    return one == other or any(kind(one) and kind(other) for kind in _KINDS)


def _is_text(one: pa.DataType) -> bool:
    return pa.types.is_string(one) or pa.types.is_large_string(one) or pa.types.is_string_view(one)


def _is_list(one: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    return any(kind(one) for kind in lists)


_KINDS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_struct, _is_text)
"""Within which values are read alike."""


@contextmanager
def reading_trajectories(path: Path) -> Generator[None]:
    """Around what takes a file of trajectories apart. Raises UserError where it is none: such a file may be cut, or
    hold other columns, or other values in them, and what reads a column then raises anything of these."""
    try:
        yield
    except UserError:
        raise
    except _OF_OTHER_FILES as error:
        raise UserError(f"{path}: not a file of trajectories ({error}); give one of RUN/trajectories") from error


def _branch(row: dict[str, Any], later: int) -> Branch:
    return Branch(
        prompt_ids=np.array(row["prompt_ids"], np.int32),
        response_ids=np.array(row["response_ids"], np.int32),
        loss_mask=np.array(row["loss_mask"], np.bool_),
        rollout_logprobs=np.array(row["rollout_logprobs"], np.float32),
        versions=np.array(row["policy_versions"], np.int32) + np.int32(later),
        turns=tuple(Turn(**turn) for turn in row["turns"]),
        opening=row["prompt"],
        pictures=tuple(_picture(described) for described in row.get("pictures") or ()),
    )


def _trajectory(row: dict[str, Any], later: int) -> Trajectory:
    own, status = _branch(row, later), Status(row["status"])
    lost = row["reward"] is None and status is not Status.ENVIRONMENT_ERROR
    return Trajectory(
        prompt=Prompt(
            row["prompt_index"],
            own.prompt_ids,
            own.opening,
            row["data_source"],
            row["ground_truth"],
            pictures=own.prompt_pictures,
        ),
        sample=row["sample"],
        response_ids=own.response_ids,
        loss_mask=own.loss_mask,
        rollout_logprobs=own.rollout_logprobs,
        versions=own.versions,
        text=row["response"],
        status=Status.COMPLETED if lost else status,
        turns=own.turns,
        generation_s=row["generation_s"],
        messages=tuple(json.loads(row["messages"] or "[]")),
        reward=row["environment_reward"],
        numbers=dict(row["numbers"]),
        error=row["error"] if status is Status.ENVIRONMENT_ERROR or dict(row["numbers"]).get("without_room") else None,
        pictures=own.response_pictures,
    )


def _score(row: dict[str, Any]) -> Score:
    failure = None if row["reward"] is not None else Status(row["status"])
    parts = dict(row["reward_parts"])
    weight = row["environment_weight"]
    said, judgement = row["error"], row.get("judgement")  # files of older runs have no judgements
    return Score(row["reward"], parts, row["prediction"], failure, said, row["reward_s"], weight, judgement)


def _table(step: int, groups: list[Group], batch: Batch) -> pa.Table:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [score for group in groups for score in group.scores]
    rows = [branch for trajectory in trajectories for branch in trajectory.every_branch]
    firsts = batch.first_branches
    assert len(trajectories) == len(scores) == len(firsts), (len(trajectories), len(scores), len(firsts))
    assert len(rows) == len(batch), (len(rows), len(batch))
    of_trajectories = _of_trajectories(trajectories, scores)
    if len(rows) > len(trajectories):
        of_trajectories = of_trajectories.take(pa.array(batch.trajectories))
    numbers = np.arange(len(batch)) - firsts[batch.trajectories]
    tokens, offsets = batch.tokens, batch.response_offsets
    mismatch_max, mismatch_at = _worst_mismatch(batch)
    columns = {
        "step": pa.array(np.full(len(batch), step, np.int64)),
        "group": pa.array(batch.groups),
        "trajectory": pa.array(batch.trajectories),
        "branch": pa.array(numbers, pa.int32()),
        **{name: of_trajectories[name] for name in of_trajectories.column_names},
        "prompt": _text(row.opening for row in rows),
        **{name: _of_firsts(texts, numbers) for name, texts in _texts(trajectories).items()},
        "prompt_ids": _ragged(batch.prompt_offsets, _ids(batch, rows, "prompt_ids"), pa.int32()),
        "pictures": _pictures(batch, rows),
        "response_ids": _ragged(offsets, _ids(batch, rows, "response_ids"), pa.int32()),
        "loss_mask": _ragged(offsets, batch.loss_mask, pa.bool_()),
        "rollout_logprobs": _ragged(offsets, tokens.rollout_logprobs, pa.float32()),
        "trainer_logprobs": _ragged(offsets, tokens.trainer_logprobs, pa.float32()),
        "mismatch_max": pa.array(mismatch_max, pa.float32(), from_pandas=True),
        "mismatch_at": pa.array(mismatch_at, pa.int32()),
        "advantages": _ragged(offsets, tokens.advantages, pa.float32()),
        "advantage": pa.array(_mean_over_trained(batch), pa.float32(), from_pandas=True),
        "policy_versions": _ragged(offsets, batch.versions, pa.int32()),
        "turns": pa.array([[(t.author, t.tokens, t.reward, t.text) for t in row.turns] for row in rows], _TURNS),
    }
    return pa.table(columns)


def _ids(batch: Batch, rows: Sequence[Branch], name: Literal["prompt_ids", "response_ids"]) -> IntArray:
    """As the model has them: a batch marks the tokens of pictures."""
    return np.concatenate([getattr(row, name) for row in rows]) if batch.pictures else getattr(batch, name)


def _pictures(batch: Batch, rows: Sequence[Branch]) -> pa.Array:
    """Null where no row has any: every step pays for this column."""
    if not batch.pictures:
        return pa.nulls(len(rows), _PICTURES)
    return pa.array([[(one.key, *one.grid, one.place, one.step) for one in row.pictures] for row in rows], _PICTURES)


def _picture(described: dict[str, Any]) -> Picture:
    step, grid = described.get("step"), (described["rows"], described["columns"])
    return Picture(described["key"], grid, described["place"], step=VideoStep(*step) if step else None)


def _of_trajectories(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> pa.Table:
    """A row a trajectory: what all its branches share."""
    return pa.table(
        {
            "prompt_index": pa.array([t.prompt.index for t in trajectories], pa.int64()),
            "sample": pa.array([t.sample for t in trajectories], pa.int32()),
            "data_source": _text(t.prompt.data_source for t in trajectories),
            "ground_truth": _text(str(t.prompt.ground_truth) for t in trajectories),
            "reward": pa.array([s.value for s in scores], pa.float64()),
            "reward_parts": pa.array([list(s.parts.items()) for s in scores], _NUMBERS),
            "environment_reward": pa.array([t.reward for t in trajectories], pa.float64()),
            "environment_weight": pa.array([s.environment_weight for s in scores], pa.float64()),
            "numbers": pa.array([list(t.numbers.items()) for t in trajectories], _NUMBERS),
            "prediction": _text(s.prediction for s in scores),
            "status": _text(score.failure or t.status for t, score in zip(trajectories, scores, strict=True)),
            "error": _text(_why(t, s) for t, s in zip(trajectories, scores, strict=True)),
            "judgement": _text(s.judgement for s in scores),
            "generation_s": pa.array([t.generation_s for t in trajectories], pa.float64()),
            "reward_s": pa.array([s.seconds for s in scores], pa.float64()),
        }
    )


def _why(trajectory: Trajectory, score: Score) -> str | None:
    """What went wrong with it, and with its reward."""
    said = dict.fromkeys(error for error in (trajectory.error, score.error) if error)
    return "\n".join(said) or None


def _texts(trajectories: Sequence[Trajectory]) -> dict[str, list[str | None]]:
    """What may be long, by column: an entry a trajectory."""
    return {
        "response": [t.text for t in trajectories],
        "messages": [json.dumps(t.messages) if t.messages else None for t in trajectories],
    }


def _of_firsts(texts: Sequence[str | None], numbers_B: IntArray) -> pa.Array:
    """A text a trajectory in the rows of first branches, null in others."""
    rest = iter(texts)
    return _text(None if number else next(rest) for number in numbers_B.tolist())


def _ragged(offsets: IntArray, values: np.ndarray[Any, Any] | None, kind: pa.DataType) -> pa.Array:
    """A list a row, without a Python list; a NaN becomes null, and so does each row of a column that is not filled."""
    if values is None:
        return pa.nulls(len(offsets) - 1, pa.list_(kind))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, kind, from_pandas=True))


def _text(values: Iterable[str | None]) -> pa.Array:
    """UTF-8 cannot hold lone surrogates, which JSON rows and user functions may bring; they become escapes."""
    texts = list(values)
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        clean = [None if text is None else text.encode("utf-8", "backslashreplace").decode() for text in texts]
        return pa.array(clean, pa.string())


def _mean_over_trained(batch: Batch) -> np.ndarray[Any, Any]:
    """`[B]`: the mean advantage of each row's trained tokens; NaN where there is none."""
    means = np.full(len(batch), np.nan)
    if batch.tokens.advantages is not None:
        rows = batch.row_of_token[batch.loss_mask]
        counts = np.bincount(rows, minlength=len(batch))
        sums = np.bincount(rows, weights=batch.tokens.advantages[batch.loss_mask], minlength=len(batch))
        np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _worst_mismatch(batch: Batch) -> tuple[np.ndarray[Any, Any], IntArray]:
    """`[B]` each: the largest |trainer - rollout| log-prob of each row, and at which response token; NaN, -1: none."""
    largest, places = np.full(len(batch), np.nan, np.float32), np.full(len(batch), -1)
    trainer, rollout = batch.tokens.trainer_logprobs, batch.tokens.rollout_logprobs
    if trainer is not None and rollout is not None:
        known = np.flatnonzero(batch.loss_mask & ~np.isnan(trainer))
        difference, rows = np.abs(trainer - rollout)[known], batch.row_of_token[known]
        order = np.argsort(difference, kind="stable")
        largest[rows[order]] = difference[order]  # the last one to be written stays
        places[rows[order]] = known[order] - batch.response_offsets[rows[order]]
    return largest, places
