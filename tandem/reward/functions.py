"""Reward functions: loaded by reference, told apart by signature, called with what they ask for, their answers read."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import math
import pickle
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np

from tandem.errors import UserError
from tandem.reward.rules import BUILT_IN
from tandem.types import Score, Status, Trajectory

if TYPE_CHECKING:  # workers import this module and need no pydantic
    from tandem.config import RewardConfig

_FORMS = "`path/to/file.py:function` or `package.module:function`"
SIGNATURES = """
  compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict
  f(prompts, completions, **columns) -> list[float | None]
  f(completion, ground_truth, **row) -> float | dict"""
_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_NUMERIC = (int, float, SupportsFloat)
"""numpy's numbers and one-element tensors too; the slow check comes last."""


class Kind(StrEnum):
    """The signatures that fit, each by the parameter that holds the completion and tells it apart."""

    VERL = "solution_str"
    TRL = "completions"
    TRAJECTORY = "completion"


class BadReward(TypeError):
    """A reward function returned something that is not a reward."""


@dataclass(frozen=True)
class RewardFunction:
    """A user's function and how to call it: always by keyword, once a trajectory (TRL: once a group of siblings)."""

    reference: str
    name: str
    weight: float
    kind: Kind
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]

    def arguments(self, trajectory: Trajectory) -> dict[str, Any]:
        """What it is told of one trajectory: the parameters that it names, all that there are with `**kwargs`."""
        prompt, row, text = trajectory.prompt, trajectory.prompt.row, trajectory.text
        offered = {"extra_info": row.get("extra_info")} if self.kind is Kind.VERL else dict(row)
        offered |= {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, self.kind.value: text}
        if self.kind is Kind.TRL:
            offered["prompts"] = row.get("prompt", prompt.text)
            if not isinstance(offered["prompts"], str):  # TRL answers messages with messages
                offered["completions"] = [{"role": "assistant", "content": text}]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        return {name: value for name, value in offered.items() if takes_any or name in self.parameters}


@dataclass
class Call:
    """One call of a reward function, and what came of it."""

    reference: str
    seed: int
    """Of `random` and `numpy.random`; below 2 ** 32."""
    places: list[str]
    """Of each row, for messages: `row 12, sample 3`."""
    rows: list[bytes]
    """Arguments of each trajectory (TRL: of all siblings), pickled one by one so that none share an object."""
    scores: list[Score] = field(default_factory=list[Score])
    suspect: bool = False
    """It may have hung or killed a worker, so it runs alone next time."""

    def lose(self, reason: str, failure: Status = Status.REWARD_ERROR, seconds: float = 0.0) -> None:
        self.scores = [lost(self.reference, place, reason, failure, seconds) for place in self.places]


def lost(reference: str, place: str, reason: str, failure: Status = Status.REWARD_ERROR, seconds: float = 0.0) -> Score:
    return Score(None, failure=failure, error=f"reward function {reference!r} on {place}: {reason}", seconds=seconds)


def check_functions(config: RewardConfig, data_sources: Iterable[str]) -> list[RewardFunction]:
    """The functions that a run may call; raises one UserError that lists everything wrong with `reward.functions`."""
    named = [(f, 1.0) if isinstance(f, str) else (f.function, f.weight) for f in config.functions]
    functions: list[RewardFunction] = []
    problems: list[str] = []
    for reference, weight in named or [(reference, 1.0) for reference in sorted(set(BUILT_IN.values()))]:
        try:
            functions.append(load(reference, weight))
        except UserError as error:
            problems.append(str(error))
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            problems.append(f"{count} functions are named {name!r}, and metrics go by that; rename them")
    missing = [] if named else sorted(set(data_sources) - set(BUILT_IN))
    if missing:
        problems.append(f"no built-in reward for data_source {missing} (only {list(BUILT_IN)}); name yours as {_FORMS}")
    if problems:
        raise UserError("reward.functions: " + "\n".join(problems))
    return functions


def load(reference: str, weight: float = 1.0) -> RewardFunction:
    """The function that `reference` names; raises UserError when there is none or its signature fits nothing."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UserError(f"reward function {reference!r} is not a reference; write {_FORMS}")
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        raise UserError(f"reward function {reference!r}: there is no file {place}")
    try:
        function = getattr(_import(place), name, None)
    except Exception as error:  # importing runs the user's code, which may raise anything
        text = traceback.format_exc()
        raise UserError(f"reward function {reference!r}: importing {place} failed:\n{text}") from error
    if not callable(function):
        raise UserError(f"reward function {reference!r}: {place} has no function {name!r}")
    try:
        signature = inspect.signature(function)
        kind = next((kind for kind in Kind if kind in signature.parameters), None)
        if kind is None:
            raise TypeError(f"no parameter is named {' or '.join(Kind)}")
        signature.bind(**{p: None for p in signature.parameters if kind is not Kind.VERL or p in _VERL_ARGUMENTS})
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward function {reference!r}: its signature does not fit: {error}. "
            f"Parameters are passed by name, to functions like these (sync or async):{SIGNATURES}"
        ) from None
    return RewardFunction(reference, name, weight, kind, function, signature.parameters)


def _import(place: str) -> ModuleType:
    """A module, or a file under a name made of its path and content: imported once, edits are seen."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).expanduser().resolve()
    name = f"tandem_reward_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def execute(function: RewardFunction, call: Call) -> list[Score]:
    """One score a row. Raises nothing: whatever goes wrong is the score."""
    start = time.perf_counter()
    random.seed(call.seed)
    np.random.seed(call.seed)
    try:
        rewards = _rewards(function, call)
        call.scores = [_read(function, place, reward) for place, reward in zip(call.places, rewards, strict=True)]
    except BadReward as error:
        call.lose(str(error))
    except BaseException:  # noqa: BLE001 - user code may raise anything, SystemExit too
        call.lose("raised\n" + traceback.format_exc().rstrip())
    seconds = (time.perf_counter() - start) / len(call.rows)
    return [replace(score, seconds=seconds) for score in call.scores]


def _rewards(function: RewardFunction, call: Call) -> Iterable[Any]:
    """What it returns, one entry a row."""
    rows = [pickle.loads(row) for row in call.rows]
    together = function.kind is Kind.TRL
    arguments = {name: [row[name] for row in rows] for name in rows[0]} if together else rows[0]
    result = function.function(**arguments)
    result = asyncio.run(result) if inspect.iscoroutine(result) else result
    if not together:
        return [result]
    if isinstance(result, Mapping | Set) or len(result) != len(rows):
        raise BadReward(f"returned {result!r:.200} for {len(rows)} completions, not a list of a number for each")
    return result


def _read(function: RewardFunction, place: str, reward: Any) -> Score:
    if reward is None and function.kind is Kind.TRL:
        return Score(None, failure=Status.NOT_SCORED)
    try:
        if not isinstance(reward, Mapping):
            return Score(_number(reward, "the reward"))
        numbers = {str(name): part for name, part in reward.items() if isinstance(part, _NUMERIC)}
        parts = {name: _number(part, repr(name)) for name, part in numbers.items() if name not in ("score", "pred")}
        prediction = None if reward.get("pred") is None else str(reward["pred"])
        return Score(_number(reward.get("score"), "'score'"), parts, prediction)
    except BadReward as error:
        return lost(function.reference, place, str(error))


def _number(value: Any, what: str) -> float:
    """A finite float out of any single number: Python's, numpy's, a one-element tensor."""
    if not isinstance(value, _NUMERIC):
        raise BadReward(f"returned {type(value).__name__} {value!r:.200} as {what}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise BadReward(f"returned {number} as {what}; it must be finite")
    return number
