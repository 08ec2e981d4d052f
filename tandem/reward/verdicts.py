"""What a reward function returned, checked: a number, nothing, or a failure that names the function and the row.

Workers import this module, so it stays free of numpy, pydantic and torch.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple, SupportsFloat

from tandem.reward.functions import Kind, RewardFunction

STATISTICS = frozenset({"mean", "max", "min", "std", "errors", "timeouts", "not_scored"})
"""Names under `reward/` that a part may not take."""


_NUMERIC = (int, float, SupportsFloat)
"""numpy's numbers and one-element tensors too; the slow check comes last."""


class Failure(NamedTuple):
    message: str
    """Function, row and traceback or reason."""
    site: str
    """Where it went wrong, without the row: equal for failures that are worth telling once."""
    timed_out: bool = False


class Verdict(NamedTuple):
    """One function on one trajectory. `value` None without a failure: the function does not apply."""

    value: float | None
    parts: Mapping[str, float] = {}
    prediction: str | None = None
    failure: Failure | None = None


class BadReward(TypeError):
    """A reward function returned something that is not a reward."""


def read(function: RewardFunction, places: Sequence[str], result: Any) -> list[Verdict]:
    """One verdict a place out of one call's result; raises BadReward when the result as a whole is of no use."""
    if function.kind is not Kind.TRL:
        return [_read_one(function, places[0], result)]
    if not isinstance(result, Collection) or isinstance(result, str | bytes | Mapping | Set):
        raise BadReward(f"returned {_short(result)}, not a list")
    rewards = list(result)
    if len(rewards) != len(places):
        raise BadReward(f"returned {len(rewards)} rewards for {len(places)} completions")
    return [
        Verdict(None) if reward is None else _read_one(function, place, reward)
        for place, reward in zip(places, rewards, strict=True)
    ]


def failed(reference: str, place: str, error: BaseException) -> Verdict:
    """The verdict on a trajectory whose reward function raised, or returned no reward."""
    frames = traceback.extract_tb(error.__traceback__)
    text = str(error) if isinstance(error, BadReward) else "raised\n" + _user_traceback(error)
    site = f"{reference} {type(error).__name__} {[(frame.filename, frame.lineno) for frame in frames[-1:]]}"
    return Verdict(None, failure=Failure(f"reward function {reference!r} on {place}: {text.rstrip()}", site))


def _user_traceback(error: BaseException) -> str:
    """The traceback from where the worker calls the user's code."""
    trace = error.__traceback__
    own = trace.tb_frame.f_code.co_filename if trace else ""
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename == own:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _read_one(function: RewardFunction, place: str, result: Any) -> Verdict:
    try:
        if isinstance(result, Mapping) and function.kind is not Kind.TRL:
            return _read_dict(result)
        return Verdict(_number(result, "the reward"))
    except BadReward as error:
        return failed(function.reference, place, error)


def _read_dict(result: Mapping[Any, Any]) -> Verdict:
    if "score" not in result:
        raise BadReward(f"returned a dict without 'score': {_short(result)}")
    parts = {
        str(name): _number(value, repr(name))
        for name, value in result.items()
        if name not in ("score", "pred") and isinstance(value, _NUMERIC)
    }
    if taken := STATISTICS & parts.keys():
        raise BadReward(f"returned parts named {sorted(taken)}, which are metrics of their own; rename them")
    prediction = result.get("pred")
    return Verdict(_number(result["score"], "'score'"), parts, None if prediction is None else str(prediction))


def _number(value: Any, what: str) -> float:
    """A finite float out of any single number: Python's, numpy's, a one-element tensor."""
    if not isinstance(value, _NUMERIC):
        raise BadReward(f"returned {_short(value)} as {what}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadReward(f"returned {_short(value)} as {what}, not a number: {error}") from error
    if not math.isfinite(number):
        raise BadReward(f"returned {number} as {what}; it must be finite")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 200 else text[:200] + '…'}"
