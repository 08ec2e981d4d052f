"""What the controller may call on a worker, and how one call becomes one call a rank: single controller, SPMD inside.

    class Scorer(Worker):
        @register(Dispatch.DATA_PARALLEL)
        def logprobs(self, batch: Batch) -> FloatArray: ...

`group.logprobs(batch)` then sends every rank its rows, and joins what the ranks answer into one column of the batch
(Sheng et al. 2024, HybridFlow, section 4.1: transfer protocols).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from tandem.batching.packing import balance_rows, select_rows
from tandem.types import Batch, IntArray

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Mesh:
    """The ranks of a worker group as a grid: sizes by dimension, outermost first; ranks count row by row.

    Ranks that differ only in other dimensions than `data` get the same rows and give the same answer.
    """

    shape: Mapping[str, int]

    @property
    def size(self) -> int:
        return math.prod(self.shape.values())

    def data_groups(self) -> list[list[int]]:
        """The ranks of each data-parallel group; the first of them answers: it is in the last pipeline stage."""
        ranks = np.arange(self.size).reshape(tuple(self.shape.values()))
        names = list(self.shape)
        if "pipeline" in names:
            ranks = np.flip(ranks, names.index("pipeline"))
            ranks, names = _outermost(ranks, names, "pipeline")
        ranks, _ = _outermost(ranks, names, "data") if "data" in names else (ranks[None], names)
        return ranks.reshape(len(ranks), -1).tolist()


def _outermost(ranks: IntArray, names: list[str], name: str) -> tuple[IntArray, list[str]]:
    return np.moveaxis(ranks, names.index(name), 0), [name, *(other for other in names if other != name)]


@dataclass(frozen=True, slots=True)
class Arguments:
    """Of one call on one rank. Ranks that share `args` and `kwargs` are sent them once."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: IntArray | None = None
    """Of the first argument, a Batch or a list: those that this rank gets; None: all."""

    def take(self) -> tuple[Any, ...]:
        """`args` as the rank sees them."""
        if self.rows is None:
            return self.args
        first, *rest = self.args
        mine = select_rows(first, self.rows) if isinstance(first, Batch) else [first[row] for row in self.rows]
        return (mine, *rest)


Calls = list[Arguments | None]
"""One a rank; None: this rank is not called."""


@dataclass(frozen=True)
class Dispatch:
    """How arguments reach the ranks, and how their answers become one. Anyone may make another pair."""

    distribute: Callable[[Mesh, Arguments], Calls]
    collect: Callable[[Mesh, Calls, list[Any]], Any]
    """Gets the answers by rank, None from ranks that were not called."""

    ALL: ClassVar["Dispatch"]
    """The same arguments to every rank; a list of the answers back."""
    RANK_ZERO: ClassVar["Dispatch"]
    """Rank 0 alone is called; its answer back."""
    REPLICATED: ClassVar["Dispatch"]
    """The same arguments to every rank; all answer the same, so rank 0's answer back."""
    DATA_PARALLEL: ClassVar["Dispatch"]
    """The rows of the first argument (a Batch or a list) are spread over the data-parallel groups.

    Answers with a number a row (list or array) or a number a response token (array) are joined in the order of the
    rows; tuples are joined part by part; anything else is the same on every rank, so the first rank's is the answer.
    """


@dataclass(frozen=True, slots=True)
class Registration:
    dispatch: Dispatch
    mesh: str


def register(dispatch: Dispatch, mesh: str = "training") -> Callable[[Function], Function]:
    """Mark a method of a worker that the controller may call.

    `mesh` names the one of the worker's meshes that it means; `ranks` is there always, every rank for itself.
    """

    def mark(method: Function) -> Function:
        method.__dict__["registration"] = Registration(dispatch, mesh)
        return method

    return mark


def registration(kind: type, method: str) -> Registration:
    """How `kind.method` is called; AttributeError when it is not registered."""
    for base in kind.__mro__:
        marked = getattr(base.__dict__.get(method), "registration", None)
        if marked is not None:
            return marked
    raise AttributeError(f"{kind.__name__}.{method} is not registered: decorate it with @register(Dispatch.…)")


def _to_all(mesh: Mesh, arguments: Arguments) -> Calls:
    return [arguments] * mesh.size


def _to_rank_zero(mesh: Mesh, arguments: Arguments) -> Calls:
    return [arguments, *[None] * (mesh.size - 1)]


def _first(mesh: Mesh, calls: Calls, answers: list[Any]) -> Any:
    return answers[0]


def _spread_rows(mesh: Mesh, arguments: Arguments) -> Calls:
    groups = mesh.data_groups()
    if len(groups) == 1:
        return [arguments] * mesh.size
    whole = arguments.args[0]
    parts = balance_rows(whole, len(groups)) if isinstance(whole, Batch) else _even_parts(len(whole), len(groups))
    calls: Calls = [None] * mesh.size
    for ranks, rows in zip(groups, parts, strict=True):
        for rank in ranks:
            calls[rank] = replace(arguments, rows=rows)
    return calls


def _even_parts(rows: int, parts: int) -> list[IntArray]:
    return np.array_split(np.arange(rows), parts)


def _join_rows(mesh: Mesh, calls: Calls, answers: list[Any]) -> Any:
    speakers = [group[0] for group in mesh.data_groups()]
    called = [arguments for rank in speakers if (arguments := calls[rank]) is not None]
    if len(called) == 1:
        return answers[speakers[0]]
    return _join([answers[rank] for rank in speakers], called[0].args[0], [call.rows for call in called])


def _join(parts: Sequence[Any], whole: Any, rows: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(_join(part, whole, rows) for part in zip(*parts, strict=True))
    if isinstance(first, list):
        joined: list[Any] = [None] * len(whole)
        for part, mine in zip(parts, rows, strict=True):
            for row, answer in zip(mine, part, strict=True):
                joined[row] = answer
        return joined
    return _join_arrays(parts, whole, rows) if isinstance(first, np.ndarray) else first


def _join_arrays(parts: Sequence[Any], whole: Any, rows: Sequence[Any]) -> Any:
    by_row = all(len(part) == len(mine) for part, mine in zip(parts, rows, strict=True))
    if by_row:
        joined = np.empty((len(whole), *parts[0].shape[1:]), parts[0].dtype)
        for part, mine in zip(parts, rows, strict=True):
            joined[mine] = part
        return joined
    starts = whole.response_offsets
    joined = np.empty((int(starts[-1]), *parts[0].shape[1:]), parts[0].dtype)
    for part, mine in zip(parts, rows, strict=True):
        lengths = (starts[1:] - starts[:-1])[mine]
        for start, stop, begin in zip(starts[mine], starts[mine] + lengths, lengths.cumsum() - lengths, strict=True):
            joined[start:stop] = part[begin : begin + stop - start]
    return joined


Dispatch.ALL = Dispatch(_to_all, lambda mesh, calls, answers: answers)
Dispatch.RANK_ZERO = Dispatch(_to_rank_zero, _first)
Dispatch.REPLICATED = Dispatch(_to_all, _first)
Dispatch.DATA_PARALLEL = Dispatch(_spread_rows, _join_rows)
