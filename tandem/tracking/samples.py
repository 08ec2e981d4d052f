"""The trajectories that the report shows, turn by turn where they are conversations, and the rows that trackers do."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tandem.errors import UserError
from tandem.pictures.store import PictureStore, Pixels
from tandem.pictures.thumbnails import small_pixels, thumbnail
from tandem.tracking.base import Sample
from tandem.tracking.trajectories import read_trajectories, reading_trajectories

Row = dict[str, Any]
_PER_STEP = 4
_CHARACTERS, _TURN_CHARACTERS, _CALL_CHARACTERS = 6_000, 2_000, 500
_CELLS = 600
_TURNS, _BRANCHES = 40, 8
_PICTURES = 6
_COLUMNS = (
    "step", "trajectory", "branch", "prompt_index", "sample", "prompt", "response", "messages", "reward", "advantage",
    "advantages", "loss_mask", "turns", "status", "error", "numbers", "pictures",
)  # fmt: skip


def samples(files: Sequence[Path], pictures: PictureStore | None = None) -> list[Row]:
    """Trajectories of the first, the middle and the last step: the best, the worst and some between.

    `pictures`: where those of their prompts are stored. A file that a crash of the machine has emptied is left out, and
    named; so is any other that is no file of trajectories.
    """
    shown: list[Row] = []
    for path in sorted({files[0], files[len(files) // 2], files[-1]}) if files else []:
        try:
            with reading_trajectories(path):
                table = read_trajectories(path, _COLUMNS)
                chosen = _chosen(table, _PER_STEP)
                shown += [_shown(_branches_of(table, trajectory), pictures) for trajectory in chosen]
        except UserError as error:
            print(f"{path}: left out of the report, for it cannot be read ({error})", flush=True)
    return shown


def table_of(path: Path, count: int, store: PictureStore) -> list[Sample]:
    """So many trajectories of a file at most: the best, the worst and some between, in this order.

    `store`: where the pictures of their prompts are, if they have any.
    """
    columns = ("trajectory", "branch", "prompt", "response", "reward", "advantage", "pictures")
    table = read_trajectories(path, columns)
    rows = {row["trajectory"]: row for row in table.filter(pc.field("branch") == 0).to_pylist()}
    shown = [rows[trajectory] for trajectory in _chosen(table, count)]
    return [
        Sample(
            _cut(row["prompt"], _CHARACTERS),
            _cut(row["response"], _CHARACTERS),
            row["reward"],
            row["advantage"],
            _small(row.get("pictures") or [], store),
        )
        for row in shown
    ]


def _small(pictures: Sequence[Row], store: PictureStore) -> tuple[Pixels, ...]:
    small = (small_pixels(store, one["key"]) for one in pictures[:_PICTURES])
    return tuple(picture for picture in small if picture is not None)


def _chosen(table: pa.Table, count: int) -> list[int]:
    table = table.filter(pc.field("branch") == 0).select(["trajectory", "reward", "advantage"])
    scored = table.filter(pc.field("reward").is_valid())
    rows = (scored if len(scored) else table).sort_by([("reward", "descending"), ("advantage", "descending")])
    places = np.linspace(0, len(rows) - 1, min(len(rows), count)).round().astype(int)
    return rows["trajectory"].take(places).to_pylist()


def _branches_of(table: pa.Table, trajectory: int) -> list[Row]:
    return table.filter(pc.field("trajectory") == trajectory).sort_by("branch").to_pylist()


def _shown(rows: list[Row], store: PictureStore | None) -> Row:
    """What the page draws of a trajectory, whose branches `rows` are: `branches`, or, where it is one turn of text, its
    `response` and the `advantages` of its tokens, unless they are all alike or too many to see."""
    first = rows[0]
    names = ("step", "prompt_index", "sample", "reward", "advantage", "status")
    shown = {name: first[name] for name in names}
    shown["error"] = _cut(first["error"] or "", _TURN_CHARACTERS)
    shown["counts"] = {name: number for name, number in first["numbers"] if number}
    shown["prompt"], shown["response"] = (_cut(first[name], _CHARACTERS) for name in ("prompt", "response"))
    shown["branches"] = _branches(rows) if any(turn.get("text") is not None for turn in first["turns"]) else []
    pictures = first.get("pictures") or []
    small = [thumbnail(store, one["key"]) for one in pictures[:_PICTURES]] if store else []
    shown["pictures"] = [picture for picture in small if picture is not None]
    shown["more_pictures"] = len(pictures) - len(shown["pictures"])
    shown["more_branches"] = max(0, len(rows) - _BRANCHES)
    alike = len(set(first["advantages"] or [])) < 2
    shown["advantages"] = [] if alike or len(first["advantages"]) > _CELLS else first["advantages"]
    return shown


def _branches(rows: list[Row]) -> list[Row]:
    every = [_turns(row) for row in rows]
    _note_calls(json.loads(rows[0]["messages"] or "[]"), every)
    return [
        {"prompt": _cut(row["prompt"], _CHARACTERS), "turns": _without_middle(turns), "cells": _cells(row)}
        for row, turns in zip(rows[:_BRANCHES], every, strict=False)
    ]


def _turns(row: Row) -> list[Row]:
    """Each turn with its text, and the mean advantage of those of its tokens that are trained on."""
    turns, start, cells = list[Row](), 0, _of_trained(row)
    for turn in row["turns"]:
        own = [cell for cell in cells[start : start + turn["tokens"]] if cell is not None]
        start += turn["tokens"]
        told = {name: turn[name] for name in ("author", "tokens", "reward")}
        mean = float(np.mean(own)) if own else None
        text = _cut(turn["text"] or "", _TURN_CHARACTERS)
        turns.append({**told, "trained": len(own), "advantage": mean, "text": text, "calls": []})
    return turns


def _note_calls(messages: list[Row], branches: list[list[Row]]) -> None:
    """Add what was read as calls to the turns of the policy. The messages are those of the first branch where an agent
    program asked, else of all."""
    spoken = [message for message in messages if message["role"] == "assistant"]
    own = [[turn for turn in turns if turn["author"] == "policy"] for turns in branches]
    for turns in (own[0], [turn for branch in own for turn in branch]):
        if len(turns) == len(spoken):
            for turn, message in zip(turns, spoken, strict=True):
                turn["calls"] = [_call(call["function"]) for call in message.get("tool_calls") or []]
            return


def _call(function: Row) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return _cut(f"{function['name']} {arguments}", _CALL_CHARACTERS)


def _without_middle(turns: list[Row]) -> list[Row | int]:
    """A number stands for so many turns that are left out."""
    if len(turns) <= _TURNS:
        return [*turns]
    return [*turns[: _TURNS // 2], len(turns) - _TURNS, *turns[-_TURNS // 2 :]]


def _of_trained(row: Row) -> list[float | None]:
    """The advantage of each response token, 0 where none is known; None where it is not trained on."""
    advantages = row["advantages"] or [0.0] * len(row["loss_mask"])
    return [
        (advantage or 0.0) if trained else None for advantage, trained in zip(advantages, row["loss_mask"], strict=True)
    ]


def _cells(row: Row) -> list[float | None]:
    cells = _of_trained(row)
    return cells if len(cells) <= _CELLS else []


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"
