"""Reward functions: loaded by reference, told apart by signature, called with what they ask for.

Workers import this module, so it stays free of numpy, pydantic and torch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError
from tandem.reward.rules import BUILT_IN

if TYPE_CHECKING:
    from tandem.config import RewardConfig
    from tandem.types import Trajectory

FORMS = "`path/to/file.py:function` or `package.module:function`"


class Kind(Enum):
    """The signatures that fit. The first parameter that names the completion decides."""

    VERL = "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict"
    TRL = "f(prompts, completions, **columns) -> list[float | None]"
    TRAJECTORY = "f(completion, ground_truth, **row) -> float | dict"


_DECIDING = (("solution_str", Kind.VERL), ("completions", Kind.TRL), ("completion", Kind.TRAJECTORY))
_VERL_ARGUMENTS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function and how to call it: always by keyword, once a trajectory (TRL: once a group of siblings)."""

    reference: str
    kind: Kind
    call: Callable[..., Any]
    parameters: frozenset[str]
    takes_any: bool
    """It has `**kwargs`, so it gets every column."""

    def arguments(self, trajectory: Trajectory) -> dict[str, Any]:
        """What it is told of one trajectory: the parameters that it names, all that there are if it takes any."""
        offered = self._offered(trajectory)
        return offered if self.takes_any else {k: v for k, v in offered.items() if k in self.parameters}

    def _offered(self, trajectory: Trajectory) -> dict[str, Any]:
        prompt, row = trajectory.prompt, trajectory.prompt.row
        known = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
        if self.kind is Kind.VERL:
            return {**known, "solution_str": trajectory.text, "extra_info": row.get("extra_info")}
        if self.kind is Kind.TRAJECTORY:
            return {**row, **known, "completion": trajectory.text}
        columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        asked = row.get("prompt", prompt.text)
        # TRL answers messages with messages and text with text.
        reply = trajectory.text if isinstance(asked, str) else [{"role": "assistant", "content": trajectory.text}]
        offered = {**columns, **known, "prompts": asked, "completions": reply}
        if "completion_ids" in self.parameters:
            offered["completion_ids"] = trajectory.response_ids.tolist()
        return offered


def load(reference: str) -> RewardFunction:
    """The function that `reference` names; raises UserError when there is none or its signature fits nothing."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UserError(f"reward function {reference!r} is not a reference; write {FORMS}")
    module = _import(reference, place)
    function = vars(module).get(name)
    if function is None:
        there = sorted(n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_"))
        raise UserError(f"reward function {reference!r}: {place} has no {name!r}; its functions are {there}")
    if inspect.isclass(function) or not callable(function):
        raise UserError(f"reward function {reference!r} is {function!r}, not a function")
    return _told_apart(reference, function)


def check_functions(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """Raises one UserError that lists everything wrong with `reward.functions`; call it before allocating anything."""
    problems = []
    for reference, count in Counter(reference for reference, _ in weighted(config)).items():
        try:
            load(reference)
        except UserError as error:
            problems.append(str(error))
        if count > 1:
            problems.append(f"reward function {reference!r} is listed more than once; add its weights up")
    if not config.functions:
        problems += [no_built_in(source) for source in sorted(set(data_sources) - set(BUILT_IN))]
    if problems:
        raise UserError("reward.functions: " + "\n".join(problems))


def weighted(config: RewardConfig) -> list[tuple[str, float]]:
    """(reference, weight) of each function that a run may call: those it names, else the built-in ones."""
    named = [(f, 1.0) if isinstance(f, str) else (f.function, f.weight) for f in config.functions]
    return named or [(reference, 1.0) for reference in dict.fromkeys(BUILT_IN.values())]


def no_built_in(data_source: str) -> str:
    return (
        f"no built-in reward for data_source {data_source!r} (there are: {', '.join(BUILT_IN)}); "
        f"name your function in reward.functions as {FORMS}"
    )


def _import(reference: str, place: str) -> ModuleType:
    path = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise UserError(f"reward function {reference!r}: there is no file {path}")
    try:
        return _import_file(path) if path is not None else importlib.import_module(place)
    except Exception as error:  # importing runs the user's code, which may raise anything
        text = "".join(traceback.format_exception(error))
        raise UserError(f"reward function {reference!r}: importing {place} failed:\n{text}") from error


def _import_file(path: Path) -> ModuleType:
    """The module of a file that is on no search path, named by its place and content: imported once, edits are seen."""
    name = f"tandem_reward_{path.stem}_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _told_apart(reference: str, function: Callable[..., Any]) -> RewardFunction:
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise UserError(f"reward function {reference!r} does not tell its signature; wrap it in a def") from None
    parameters = signature.parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    kind = next((kind for name, kind in _DECIDING if name in named), None)
    foreign = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_ONLY}
    if kind is Kind.VERL:
        foreign |= {n for n, p in named.items() if p.default is p.empty} - _VERL_ARGUMENTS
    if kind is None or foreign:
        fitting = "\n  ".join(kind.value for kind in Kind)
        why = f", where nothing is known to pass as {sorted(foreign)}" if foreign else ""
        raise UserError(
            f"reward function {reference!r} has the signature {signature}{why}; "
            f"parameters are passed by name, and these signatures fit (sync or async):\n  {fitting}"
        )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return RewardFunction(reference, kind, function, frozenset(named), takes_any)
