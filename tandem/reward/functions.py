"""Reward functions: loaded by reference, recognised by signature, called with what they ask for, their results read."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np

from tandem.errors import UserError
from tandem.files import load_named, users_traceback
from tandem.reward.rules import BUILT_IN, CHECKS
from tandem.types import Message, Prompt, Score, Status, Trajectory

if TYPE_CHECKING:  # workers import this module and need no pydantic
    from tandem.config.reward import RewardConfig

_FORMS = "`path/to/file.py:function` or `package.module:function`"
SIGNATURES = """
  compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict
  f(prompts, completions, **columns) -> list[float | None]
  f(completion, ground_truth, **row) -> float | dict
All but the one with `completions` may also take `messages` and `turns` of a conversation."""
_CONVERSATION = ("messages", "turns")
"""What functions of one trajectory may ask for by name: what was said to the policy and by it, and its own turns alone;
messages as chat templates take them."""
_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info", *_CONVERSATION)
_OFFERED = ("data_source", "ground_truth", "prompts")
"""What functions of the other signatures may ask for besides columns."""
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NUMERIC = (int, float, SupportsFloat)
"""numpy's numbers and one-element tensors too; the slow check comes last."""
_UNCHANGEABLE = (str, int, float, type(None))


class Kind(StrEnum):
    """The kinds of signatures, each by the name of the parameter that holds the completion."""

    VERL = "solution_str"
    TRL = "completions"
    TRAJECTORY = "completion"


@dataclass(frozen=True)
class RewardFunction:
    """A user's function and how to call it: always by keyword, once a trajectory (TRL: once a group of siblings)."""

    reference: str
    name: str
    weight: float
    kind: Kind
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    given: Mapping[str, Any]
    """What the configuration passes to every call."""
    score_together: str | None = None
    """The column in which rows are alike whose completions are scored in one call."""

    def arguments(self, prompt: Prompt) -> dict[str, Any]:
        """What the function is called with besides the completion: what it names, or with `**kwargs` all there is."""
        offered = {"extra_info": prompt.row.get("extra_info")} if self.kind is Kind.VERL else dict(prompt.row)
        offered |= {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
        if self.kind is Kind.TRL:
            offered["prompts"] = prompt.row.get("prompt", prompt.text)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        taken = offered if takes_any else offered.keys() & self.parameters.keys()
        return {name: offered[name] for name in taken if name not in self.given}

    def conversation(self, trajectory: Trajectory) -> dict[str, Any]:
        """What the function asks for by name of `messages` and `turns`. A column of that name goes first."""
        wanted = [name for name in _CONVERSATION if name in self.parameters and name not in self.given]
        if self.kind is Kind.TRAJECTORY:
            wanted = [name for name in wanted if name not in trajectory.prompt.row]
        if not wanted or self.kind is Kind.TRL:
            return {}
        said = _said(trajectory)
        offered = {
            "messages": [*_asked(trajectory.prompt), *said],
            "turns": [message for message in said if message["role"] == "assistant"],
        }
        return {name: offered[name] for name in wanted}

    def needed_columns(self) -> list[str]:
        """The columns without which a call fails: parameters that have no other value, and `score_together`."""
        offered = {self.kind, *(_VERL_ARGUMENTS if self.kind is Kind.VERL else _OFFERED)}
        if self.kind is Kind.TRAJECTORY:
            offered |= {*_CONVERSATION}
        needed = [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is parameter.empty and parameter.kind not in _VARIABLE
        ]
        together = [self.score_together] if self.score_together else []
        return [name for name in needed if name not in offered and name not in self.given] + together

    def completion(self, trajectory: Trajectory) -> Any:
        """The text; for TRL's functions, where the prompt is messages or the answer a conversation, messages."""
        asked_with_messages = not isinstance(trajectory.prompt.row.get("prompt", ""), str)
        chat = self.kind is Kind.TRL and (asked_with_messages or bool(trajectory.messages))
        return _said(trajectory) if chat else trajectory.text


def _said(trajectory: Trajectory) -> list[Message]:
    """What came after the prompt; an answer of one turn is one message."""
    return [*trajectory.messages] or [{"role": "assistant", "content": trajectory.text}]


def _asked(prompt: Prompt) -> list[Message]:
    """The messages of the data row."""
    asked: Any = prompt.row.get("prompt", prompt.text)
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else [*asked]


@dataclass
class RewardCall:
    """One call of a reward function, and what came of it."""

    reference: str
    seed: int
    """The seed of `random` and `numpy.random`; below 2 ** 32."""
    arguments: list[bytes]
    """The other arguments for each completion, pickled: siblings share the bytes, and none of the objects in them."""
    completions: list[Any]
    """That of one trajectory (TRL: of all siblings)."""
    scores: Sequence[Score] = ()
    runs_alone: bool = False
    """It may have hung or killed a worker, so it runs alone next time."""


def check_functions(
    config: RewardConfig,
    data_sources: Iterable[str],
    data: Mapping[str, Sequence[Prompt]] | None = None,
    counts: Mapping[str, Sequence[int]] | None = None,
) -> list[RewardFunction]:
    """The functions that a run may call; raises one UserError that lists everything wrong with `reward.functions`.

    `data` holds the prompts whose answers will be scored, by where they are from (`data.train_files`): each must have
    the columns that the functions need, and some a ground truth where a built-in function reads it. `counts` says how
    many prompts each of `data` stands for, default one.
    """
    named: list[tuple[str, dict[str, Any]]] = [
        (f, {}) if isinstance(f, str) else (f.function, f.model_dump(exclude={"function"})) for f in config.functions
    ]
    found = sorted({BUILT_IN[source] for source in data_sources if source in BUILT_IN})
    functions: list[RewardFunction] = []
    problems: list[str] = []
    for reference, options in named or [(reference, {}) for reference in found]:
        try:
            functions.append(load(reference, **options, import_timeout_s=config.import_timeout_s))
            if reference in CHECKS:
                _load_callable(CHECKS[reference])(**functions[-1].given)
        except UserError as error:
            problems.append(str(error))
    if len({function.name for function in functions}) < len(functions):
        problems.append("two functions have the same name, and metrics go by that; rename one")
    missing = [] if named else sorted(set(data_sources) - set(BUILT_IN))
    if missing:
        problems.append(
            f"no built-in reward for data_source {missing} (only {list(BUILT_IN)}); name yours as {_FORMS}, or one of "
            f"these: {', '.join(sorted(set(BUILT_IN.values())))}"
        )
    for where, prompts in (data or {}).items():
        problems += _absent_columns(functions, where, prompts, (counts or {}).get(where) or [1] * len(prompts))
        for reference in sorted({function.reference for function in functions} & set(BUILT_IN.values())):
            scored = [prompt for prompt in prompts if named or BUILT_IN.get(prompt.data_source) == reference]
            problems += _absent_ground_truth(reference, where, scored)
    if problems:
        raise UserError("reward.functions: " + "\n".join(problems))
    return functions


def _absent_columns(
    functions: Sequence[RewardFunction], where: str, prompts: Sequence[Prompt], counts: Sequence[int]
) -> Iterator[str]:
    """What to say of each column that a function needs and that rows of `where` lack; each prompt stands for so many
    of `counts`."""
    count = sum(counts)
    for function in functions:
        for column in function.needed_columns():
            lacking = [prompt for prompt in prompts if not _has_column(prompt, column)]
            if lacking:
                lack = sum(n for prompt, n in zip(prompts, counts, strict=True) if not _has_column(prompt, column))
                rows = "no row has" if lack == count else f"{lack:,} of {count:,} rows lack"
                has = ", ".join(lacking[0].row) or "no columns"
                inside = any(_has_column(prompt, f"extra_info.{column}") for prompt in lacking)
                mend = _read_extra_info(function, column) if inside else "add the column"
                yield (
                    f"{function.reference!r} needs the column `{column}`, which {rows} in {where} (one of these has "
                    f"only {has}); {mend}, or give the parameter a default or a value in `arguments`"
                )


def _read_extra_info(function: RewardFunction, column: str) -> str:
    """How a function gets what is not a column, but an entry of `extra_info`."""
    if column == function.score_together:
        return f"it is inside `extra_info`: name it extra_info.{column}"
    each = "extra_info[i]" if function.kind is Kind.TRL else "extra_info"
    return f"it is inside `extra_info`: take the parameter `extra_info`, and read {each}['{column}']"


def _absent_ground_truth(reference: str, where: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """What to say where a built-in function scores these prompts and none has a ground truth."""
    if prompts and all(prompt.ground_truth is None for prompt in prompts):
        yield (
            f"{reference!r} needs a ground truth, which no row has in {where}: neither reward_model.ground_truth nor a "
            f"column `ground_truth` or `answer` (one of these has only {', '.join(prompts[0].row) or 'no columns'})"
        )


def _has_column(prompt: Prompt, name: str) -> bool:
    try:
        column_value(prompt, name)
    except KeyError:
        return False
    return True


def column_value(prompt: Prompt, name: str) -> Any:
    """The value of a column, or of an entry in it (`extra_info.problem`). Raises KeyError where there is none."""
    value: Any = prompt.row
    for key in name.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[key]
    return value


def load(
    reference: str,
    weight: float = 1.0,
    arguments: Mapping[str, Any] | None = None,
    score_together: str | None = None,
    import_timeout_s: float = math.inf,
) -> RewardFunction:
    """The function that `reference` names; raises UserError when there is none or its signature fits nothing."""
    function, given = _load_callable(reference, import_timeout_s), dict(arguments or {})
    try:
        signature = inspect.signature(function)
        kind = next((kind for kind in Kind if kind in signature.parameters), None)
        if kind is None:
            raise TypeError(f"no parameter is named {' or '.join(Kind)}")
        if score_together and kind is not Kind.TRL:
            raise TypeError("score_together is for functions of `completions`")
        offered = {p: None for p in signature.parameters if kind is not Kind.VERL or p in _VERL_ARGUMENTS}
        signature.bind(**offered | given)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward function {reference!r}: its signature does not fit: {error}. "
            f"Parameters are passed by name, to functions like these (sync or async):{SIGNATURES}"
        ) from None
    name = reference.rpartition(":")[2]
    return RewardFunction(reference, name, weight, kind, function, signature.parameters, given, score_together)


def _load_callable(reference: str, import_timeout_s: float = math.inf) -> Callable[..., Any]:
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UserError(f"reward function {reference!r} is not a reference; write {_FORMS}")
    function = load_named(reference, "reward function", import_timeout_s)
    if not callable(function):
        raise UserError(f"reward function {reference!r}: {place} has no function {name!r}")
    return function


def execute(function: RewardFunction, call: RewardCall) -> list[Score]:
    """One score a completion. Raises nothing: whatever goes wrong is the score of all of them."""
    start = time.perf_counter()
    random.seed(call.seed)
    np.random.seed(call.seed)
    count = len(call.completions)
    try:
        results = _call(function, call)
        return [_read_result(function.kind, result, (time.perf_counter() - start) / count) for result in results]
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
        shown = f"failed\n{users_traceback(error, __file__)}"
        return failed_scores(count, shown, Status.REWARD_ERROR, (time.perf_counter() - start) / count)


def failed_scores(count: int, error: str, failure: Status, seconds: float) -> list[Score]:
    return [Score(None, failure=failure, error=error, seconds=seconds) for _ in range(count)]


def _call(function: RewardFunction, call: RewardCall) -> Sequence[Any]:
    """What the function returns, one entry a completion. Raises TypeError where the number of entries is another, or
    where the function has changed its arguments."""
    pairs = zip(call.arguments, call.completions, strict=True)
    rows = [{**pickle.loads(arguments), function.kind: completion} for arguments, completion in pairs]
    together = function.kind is Kind.TRL
    columns = {name: [row.get(name) for row in rows] for name in rows[0]} if together else rows[0]
    changeable = [value for row in rows for value in row.values() if not isinstance(value, _UNCHANGEABLE)]
    before = pickle.dumps(changeable) if changeable else None
    result = function.function(**columns, **function.given)
    result = asyncio.run(result) if inspect.iscoroutine(result) else result
    if changeable and pickle.dumps(changeable) != before:
        raise TypeError("changed its arguments; copy what it changes")
    if not together:
        return [result]
    if not isinstance(result, Sequence) or len(result) != len(rows):
        raise TypeError(f"returned {result!r:.200} for {len(rows)} completions, not a list of a number for each")
    return result


def _read_result(kind: Kind, reward: Any, seconds: float) -> Score:
    if reward is None and kind is Kind.TRL:
        return Score(None, failure=Status.NOT_SCORED, seconds=seconds)
    if not isinstance(reward, Mapping):
        return Score(_number(reward, "the reward"), seconds=seconds)
    others = {str(name): part for name, part in reward.items() if name not in ("score", "pred")}
    parts = {name: _number(part, repr(name)) for name, part in others.items() if isinstance(part, _NUMERIC)}
    prediction, reason = (None if reward.get(key) is None else str(reward[key]) for key in ("pred", "reason"))
    return Score(_number(reward.get("score"), "'score'"), parts, prediction, error=reason, seconds=seconds)


def _number(value: Any, what: str) -> float:
    """A finite float out of any single number: Python's, numpy's, a one-element tensor. Raises TypeError."""
    if not isinstance(value, _NUMERIC):
        raise TypeError(f"returned {type(value).__name__} {value!r:.200} as {what}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise TypeError(f"returned {number} as {what}; it must be finite")
    return number
