"""Answers that were made ahead of training, in a checkpoint.

    state/rollouts.safetensors     one number a token: ids, mask, log-probs, versions, experts; branches head to tail
    state/rollouts.json            the rest, by draw: what each answer said, how it ended, its score

Rows of the data are not written: a draw names its own. Checksums of the prompt's tokens and of every column tell
whether that row is still what was answered, and what the scores were given for. A conversation was opened with tokens
of its own, and so was each further branch: these are written.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
from safetensors.numpy import load_file, save_file

from tandem.errors import UserError
from tandem.files import write_text
from tandem.types import Branch, Group, Picture, Prompt, SavedGroup, Score, Status, Trajectory, Turn, VideoStep

_ARRAYS, _REST = "state/rollouts.safetensors", "state/rollouts.json"
_COLUMNS: dict[str, Any] = {
    "response_ids": np.int32,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "versions": np.int32,
}
"""Those of a Branch that have one number a response token."""
_OF_BRANCHES = ("branches", "openings", "pictures")
"""What is described of each branch of an answer: its turns, its opening, its pictures."""
_Array = np.ndarray[Any, np.dtype[Any]]


def write_rollouts(checkpoint: Path, finished: Mapping[int, SavedGroup]) -> None:
    """Write what was `finished`, by draw, into a checkpoint that is being written.

    Raises UserError where a column holds what has no checksum.
    """
    save_file(_arrays(list(_branches(finished.values()))), checkpoint / _ARRAYS)
    # One by one: other threads wait while one draw is encoded, and not while all of them are.
    described = [json.dumps(_describe(number, one)) for number, one in finished.items()]
    write_text(checkpoint / _REST, f"[{','.join(described)}]")


def read_rollouts(checkpoint: Path, prompt_of: Callable[[int], Prompt]) -> dict[int, SavedGroup]:
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


def _answers(one: SavedGroup) -> list[Trajectory]:
    return one.group.trajectories + ([] if one.greedy is None else [one.greedy])


def _is_conversation(one: SavedGroup) -> bool:
    """Its answers were opened with other tokens than the row's prompt. Not all need have come to a turn."""
    answers = _answers(one)
    return any(answer.messages or not (answer.turns or answer.status is Status.ABORTED) for answer in answers)


def _branches(finished: Iterable[SavedGroup]) -> Iterator[Branch]:
    """All of them, in the order in which their arrays are written; without the prompt where that is the row's."""
    for one in finished:
        opened = _is_conversation(one)
        for answer in _answers(one):
            first, *others = answer.every_branch
            yield first if opened else replace(first, prompt_ids=first.prompt_ids[:0])
            yield from others


def _arrays(branches: list[Branch]) -> dict[str, _Array]:
    def column(name: str, kind: Any) -> _Array:
        return np.concatenate([np.zeros(0, kind), *(getattr(branch, name) for branch in branches)], dtype=kind)

    arrays = {name: column(name, kind) for name, kind in {**_COLUMNS, "prompt_ids": np.int32}.items()}
    arrays["lengths"] = np.array([len(branch.response_ids) for branch in branches], np.int64)
    arrays["prompt_lengths"] = np.array([len(branch.prompt_ids) for branch in branches], np.int64)
    recorded = [branch.experts for branch in branches if branch.experts is not None]
    if recorded:
        rows = [-1 if branch.experts is None else len(branch.experts) for branch in branches]
        arrays |= {"experts": np.concatenate(recorded), "expert_rows": np.array(rows, np.int64)}
    return arrays


def _split(arrays: dict[str, _Array]) -> Iterator[Branch]:
    """One branch after another, without turns; each array a copy of its own."""
    start = prompt = expert = 0
    experts = arrays.get("expert_rows", np.full(len(arrays["lengths"]), -1)).tolist()
    lengths = zip(arrays["lengths"].tolist(), arrays["prompt_lengths"].tolist(), experts, strict=True)
    for length, prompt_length, rows in lengths:
        own: dict[str, Any] = {name: arrays[name][start : start + length].copy() for name in _COLUMNS}
        own["prompt_ids"] = arrays["prompt_ids"][prompt : prompt + prompt_length].copy()
        start, prompt = start + length, prompt + prompt_length
        if rows >= 0:
            own["experts"] = arrays["experts"][expert : expert + rows].copy()
            expert += rows
        yield Branch(**own)


def _describe(number: int, one: SavedGroup) -> dict[str, Any]:
    prompt, opened = one.group.trajectories[0].prompt, _is_conversation(one)
    return {
        "draw": number,
        "kept": one.kept,
        "row": prompt.index,
        "conversation": opened,
        "checksums": _checksums(prompt, tokens=not opened),
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
        "branches": [[asdict(turn) for turn in branch.turns] for branch in answer.every_branch],
        "openings": [branch.opening for branch in answer.every_branch],
        "pictures": [[asdict(picture) for picture in branch.pictures] for branch in answer.every_branch],
        "generation_s": answer.generation_s,
        "messages": answer.messages,
        "opened_with": answer.opened_with,
        "last_turn": answer.last_turn,
        "ends_in": answer.ends_in,
        "reward": answer.reward,
        "numbers": dict(answer.numbers),
        "error": answer.error,
    }


def _finished(described: dict[str, Any], prompt: Prompt, rows: Iterator[Branch]) -> SavedGroup:
    opened = described["conversation"]
    answers = [_trajectory(one, prompt, rows, opened) for one in described["answers"]]
    scores = [_score(one) for one in described["scores"]]
    greedy, score = described["greedy_answer"], described["greedy_score"]
    group = Group(answers, scores, None if score is None else _score(score))
    answer = None if greedy is None else _trajectory(greedy, prompt, rows, opened)
    return SavedGroup(group, answer, described["kept"])


def _trajectory(described: dict[str, Any], prompt: Prompt, rows: Iterator[Branch], opened: bool) -> Trajectory:
    first, *others = (
        replace(next(rows), turns=tuple(Turn(**turn) for turn in turns), opening=opening, pictures=_pictures(shown))
        for turns, opening, shown in zip(*(described[name] for name in _OF_BRANCHES), strict=True)
    )
    if opened:
        prompt = replace(prompt, token_ids=first.prompt_ids, text=first.opening, pictures=first.prompt_pictures)
    arrays = {name: getattr(first, name) for name in (*_COLUMNS, "turns", "experts")}
    same = ("sample", "text", "generation_s", "ends_in", "reward", "numbers", "error")
    return Trajectory(
        prompt=prompt,
        status=Status(described["status"]),
        messages=tuple(described["messages"]),
        opened_with=tuple(described.get("opened_with", ())),  # checkpoints of before 2026-11-28 have neither
        last_turn=Status(last_turn) if (last_turn := described.get("last_turn")) else None,
        branches=tuple(others),
        pictures=first.response_pictures if opened else (),
        **arrays,
        **{name: described[name] for name in same},
    )


def _pictures(described: list[dict[str, Any]]) -> tuple[Picture, ...]:
    steps = (VideoStep(*one["step"]) if one.get("step") else None for one in described)
    return tuple(
        Picture(one["key"], tuple(one["grid"]), one["place"], step=step)
        for one, step in zip(described, steps, strict=True)
    )


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
    before, now = described["checksums"], _checksums(prompt, tokens=not described["conversation"])
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _checksums(prompt: Prompt, *, tokens: bool) -> dict[str, int]:
    """By name: what reward functions see of a row, and `tokens`, those that were answered."""
    seen = {**prompt.row, "data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    try:
        checksums = {f"`{name}`": zlib.crc32(_stable(value)) for name, value in seen.items()}
    except TypeError as error:
        raise UserError(
            f"data row {prompt.index}: {error}, so that a resumed run could not tell whether the row has changed; "
            "leave that column out, or give trainer.save_rollouts=false"
        ) from error
    if tokens:
        checksums["tokens of the prompt"] = zlib.crc32(np.asarray(prompt.token_ids, np.int32).tobytes())
    return checksums


def _stable(value: Any) -> bytes:
    """The same bytes for the same value in every process. Raises TypeError where a value has none."""
    return json.dumps(value, sort_keys=True, default=_described_alike).encode()


def _described_alike(value: Any) -> str:
    """What JSON does not have of the values that parquet does."""
    if isinstance(value, bytes | Decimal | date | time | timedelta | UUID):
        return repr(value)
    raise TypeError(f"a column holds a {type(value).__name__}, which has no checksum")
