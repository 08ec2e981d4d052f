"""Answers that were made ahead of training, in a checkpoint.

    state/rollouts.safetensors     one number a token: ids, mask, log-probs, versions, experts; answers head to tail
    state/rollouts.json            the rest, by draw: what each answer said, how it ended, its score

Prompts are not written: a draw names its row of the data. Checksums of the prompt's tokens and of every column tell
whether that row is still what was answered, and what the scores were given for.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
from safetensors.numpy import load_file, save_file

from tandem.errors import UserError
from tandem.files import write_text
from tandem.types import Finished, Group, Prompt, Score, Status, Trajectory, Turn

_ARRAYS, _REST = "state/rollouts.safetensors", "state/rollouts.json"
_COLUMNS: dict[str, Any] = {
    "response_ids": np.int32,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "versions": np.int32,
}
"""Those of a Trajectory that have one number a response token."""
_Array = np.ndarray[Any, np.dtype[Any]]


def write_rollouts(checkpoint: Path, finished: Mapping[int, Finished]) -> None:
    """Write what was `finished`, by draw, into a checkpoint that is being written.

    Raises UserError where a column holds what has no checksum.
    """
    save_file(_arrays(list(_answers(finished.values()))), checkpoint / _ARRAYS)
    # One by one: other threads wait while one draw is encoded, and not while all of them are.
    described = [json.dumps(_describe(number, one)) for number, one in finished.items()]
    write_text(checkpoint / _REST, f"[{','.join(described)}]")


def read_rollouts(checkpoint: Path, prompt_of: Callable[[int], Prompt]) -> dict[int, Finished]:
    """What `write_rollouts` wrote, bit for bit; nothing where the checkpoint has none. `prompt_of`: of each draw.

    Raises UserError where a row is not the one that was answered and scored.
    """
    if not (checkpoint / _REST).exists():
        return {}
    rows = _split(load_file(checkpoint / _ARRAYS))
    described: list[dict[str, Any]] = json.loads((checkpoint / _REST).read_text(encoding="utf-8"))
    prompts = {one["draw"]: prompt_of(one["draw"]) for one in described}
    _check_rows(described, prompts)
    return {one["draw"]: _finished(one, prompts[one["draw"]], rows) for one in described}


def _answers(finished: Iterable[Finished]) -> Iterator[Trajectory]:
    """All of them, in the order in which their arrays are written."""
    for one in finished:
        yield from one.group.trajectories
        if one.greedy is not None:
            yield one.greedy


def _arrays(answers: list[Trajectory]) -> dict[str, _Array]:
    def column(name: str, kind: Any) -> _Array:
        return np.concatenate([np.zeros(0, kind), *(getattr(answer, name) for answer in answers)], dtype=kind)

    arrays = {name: column(name, kind) for name, kind in _COLUMNS.items()}
    arrays["lengths"] = np.array([len(answer.response_ids) for answer in answers], np.int64)
    recorded = [answer.experts for answer in answers if answer.experts is not None]
    if recorded:
        rows = [-1 if answer.experts is None else len(answer.experts) for answer in answers]
        arrays |= {"experts": np.concatenate(recorded), "expert_rows": np.array(rows, np.int64)}
    return arrays


def _split(arrays: dict[str, _Array]) -> Iterator[dict[str, _Array]]:
    """The arrays of one answer after another, each of them a copy of its own."""
    start = expert = 0
    experts = arrays.get("expert_rows", np.full(len(arrays["lengths"]), -1)).tolist()
    for length, rows in zip(arrays["lengths"].tolist(), experts, strict=True):
        own = {name: arrays[name][start : start + length].copy() for name in _COLUMNS}
        start += length
        if rows >= 0:
            own["experts"] = arrays["experts"][expert : expert + rows].copy()
            expert += rows
        yield own


def _describe(number: int, one: Finished) -> dict[str, Any]:
    prompt = one.group.trajectories[0].prompt
    return {
        "draw": number,
        "kept": one.kept,
        "row": prompt.index,
        "checksums": _checksums(prompt),
        "answers": [_describe_answer(answer) for answer in one.group.trajectories],
        "scores": [asdict(score) for score in one.group.scores],
        "greedy_score": None if one.group.greedy is None else asdict(one.group.greedy),
        "greedy_answer": None if one.greedy is None else _describe_answer(one.greedy),
    }


def _describe_answer(answer: Trajectory) -> dict[str, Any]:
    return {
        "sample": answer.sample,
        "text": answer.text,
        "status": answer.status,
        "turns": [asdict(turn) for turn in answer.turns],
        "generation_s": answer.generation_s,
    }


def _finished(described: dict[str, Any], prompt: Prompt, rows: Iterator[dict[str, _Array]]) -> Finished:
    answers = [_trajectory(one, prompt, next(rows)) for one in described["answers"]]
    scores = [_score(one) for one in described["scores"]]
    greedy, score = described["greedy_answer"], described["greedy_score"]
    group = Group(answers, scores, None if score is None else _score(score))
    return Finished(group, None if greedy is None else _trajectory(greedy, prompt, next(rows)), described["kept"])


def _trajectory(described: dict[str, Any], prompt: Prompt, arrays: dict[str, _Array]) -> Trajectory:
    status, turns = Status(described["status"]), tuple(Turn(**turn) for turn in described["turns"])
    return Trajectory(**{**described, **arrays, "prompt": prompt, "status": status, "turns": turns})


def _score(described: dict[str, Any]) -> Score:
    failure = described["failure"]
    return Score(**{**described, "failure": None if failure is None else Status(failure)})


def _check_rows(described: list[dict[str, Any]], prompts: Mapping[int, Prompt]) -> None:
    """Raises UserError where rows have changed since they were answered."""
    changes = {one["row"]: changed for one in described if (changed := _changes(one, prompts[one["draw"]]))}
    if changes:
        row, changed = next(iter(changes.items()))
        others = f", as {len(changes) - 1} more rows have" if len(changes) > 1 else ""
        raise UserError(
            f"cannot resume: the checkpoint holds answers and scores of data row {row}, which has changed since "
            f"({', '.join(changed)}){others}; put the data back, or add trainer.save_rollouts=false, with which what "
            "was answered ahead of training is answered and scored anew"
        )


def _changes(described: dict[str, Any], prompt: Prompt) -> list[str]:
    """The names of what is not as it was."""
    if prompt.index != described["row"]:
        return ["its place in the data"]
    before, now = described["checksums"], _checksums(prompt)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _checksums(prompt: Prompt) -> dict[str, int]:
    """By name: what reward functions see of a row, and the tokens that were answered."""
    seen = {**prompt.row, "data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    try:
        checksums = {f"`{name}`": zlib.crc32(_stable(value)) for name, value in seen.items()}
    except TypeError as error:
        raise UserError(
            f"data row {prompt.index}: {error}, so that a resumed run could not tell whether the row has changed; "
            "leave that column out, or give trainer.save_rollouts=false"
        ) from error
    return {**checksums, "tokens of the prompt": zlib.crc32(np.asarray(prompt.token_ids, np.int32).tobytes())}


def _stable(value: Any) -> bytes:
    """The same bytes for the same value in every process. Raises TypeError where a value has none."""
    return json.dumps(value, sort_keys=True, default=_described_alike).encode()


def _described_alike(value: Any) -> str:
    """What JSON does not have of the values that parquet does."""
    if isinstance(value, bytes | Decimal | date | time | timedelta | UUID):
        return repr(value)
    raise TypeError(f"a column holds a {type(value).__name__}, which has no checksum")
