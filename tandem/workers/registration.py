"""How a worker says which of its methods the controller may call, and how such a call reaches the ranks.

    class Scorer(Worker[ScorerSpec]):
        @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
        def logprobs(self, batch: Batch) -> FloatArray: ...

The controller then sends every data-parallel group its rows, and joins their answers into one column of the whole batch
(`tandem.controller.dispatch`; Sheng et al. 2024, HybridFlow, section 4.1: transfer protocols).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np

from tandem.models.cost import TOKENS_ALONE, RowCost
from tandem.types import IntArray

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Mesh:
    """The ranks of a worker group as a grid: sizes by dimension, outermost first; ranks count row by row.

    Ranks that differ only in other dimensions than `data` get the same rows and give the same answer.
    """

    shape: Mapping[str, int]
    cost: RowCost = TOKENS_ALONE
    """Of the worker's model: by what the rows of a batch are balanced over data-parallel groups."""

    @property
    def size(self) -> int:
        return math.prod(self.shape.values())

    def data_groups(self) -> list[list[int]]:
        """The ranks of each data-parallel group. The first of them answers for the group: it is in the last pipeline
        stage, which holds the outputs."""
        return self._data_groups

    @cached_property
    def answering_ranks(self) -> list[int]:
        """The rank that answers for each data-parallel group."""
        return [group[0] for group in self._data_groups]

    @cached_property
    def group_of_answering_rank(self) -> dict[int, int]:
        """The number of its data-parallel group."""
        return {rank: group for group, rank in enumerate(self.answering_ranks)}

    @cached_property
    def _data_groups(self) -> list[list[int]]:
        ranks = np.arange(self.size).reshape(tuple(self.shape.values()))
        dimensions = list(self.shape)
        if "pipeline" in dimensions:
            ranks = np.flip(ranks, dimensions.index("pipeline"))
            ranks, dimensions = _move_outermost(ranks, dimensions, "pipeline")
        if "data" in dimensions:
            ranks, _ = _move_outermost(ranks, dimensions, "data")
        else:
            ranks = ranks[None]
        return ranks.reshape(len(ranks), -1).tolist()


def _move_outermost(ranks: IntArray, dimensions: list[str], name: str) -> tuple[IntArray, list[str]]:
    reordered = [name, *(other for other in dimensions if other != name)]
    return np.moveaxis(ranks, dimensions.index(name), 0), reordered


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call on one rank. Ranks that share one such object are sent it once."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


Calls = dict[int, Arguments]
"""The calls of one method, by rank; other ranks are not called."""


class Dispatch(Enum):
    """Which ranks are called, and with what."""

    ALL = "every rank, with the same arguments; the answer is the list of the ranks' answers"
    RANK_ZERO = "rank 0 alone; the answer is its answer"
    REPLICATED = "every rank, with the same arguments; all answer the same, so the answer is rank 0's"
    DATA_PARALLEL = "every rank, with its data-parallel group's rows of the first argument, a Batch or a list"
    EACH = (
        "the rank that answers for each data-parallel group that the first argument, a mapping by number of the group, "
        "has an entry for, with that entry. The answer is the mapping of these groups' answers"
    )


@dataclass(frozen=True)
class OwnDispatch:
    """A pair of your own, in place of a `Dispatch`: how arguments reach the ranks, and how answers become one."""

    distribute: Callable[[Mesh, Arguments], Calls]
    collect: Callable[[Mesh, Calls, dict[int, Any]], Any]
    """Gets the answers by rank, in the order of the calls."""


class Returns(Enum):
    """What a data-parallel method returns, and so how the groups' answers become one."""

    SAME = "the same on every rank, as metrics that were summed over them"
    PER_ROW = "a list or an array with one entry for each row that the rank was given"
    PER_TOKEN = "an array with one entry for each response token of the rows that the rank was given"


@dataclass(frozen=True, slots=True)
class Registration:
    """What `register` says of a method."""

    dispatch: Dispatch | OwnDispatch
    mesh: str
    returns: Returns | tuple[Returns, ...]
    """A tuple: the method returns a tuple of so many parts."""


def register(
    dispatch: Dispatch | OwnDispatch, *, mesh: str = "training", returns: Returns | tuple[Returns, ...] | None = None
) -> Callable[[Function], Function]:
    """Mark a method of a worker that the controller may call.

    `mesh` names one of the worker's meshes; `ranks`, in which every rank stands for itself, is always there. `returns`
    is for DATA_PARALLEL alone, which needs it: nothing is guessed from the shape of an answer. TypeError without.
    """
    if (dispatch is Dispatch.DATA_PARALLEL) != (returns is not None):
        raise TypeError("register: `returns` says how the answers of a DATA_PARALLEL method are joined, and only those")

    def mark(method: Function) -> Function:
        method.__dict__["registration"] = Registration(dispatch, mesh, returns or Returns.SAME)
        return method

    return mark


@cache  # every call of the controller asks
def registration(kind: type, method: str) -> Registration:
    """How `kind.method` is called; AttributeError when it is not registered."""
    for base in kind.__mro__:
        marked = getattr(base.__dict__.get(method), "registration", None)
        if marked is not None:
            return marked
    raise AttributeError(f"{kind.__name__}.{method} is not registered: decorate it with @register(Dispatch.…)")


def returns_of_rows(kind: type, method: str) -> Returns | tuple[Returns, ...]:
    """What `kind.method` returns about rows, also where a subclass dispatches the data-parallel method otherwise."""
    for base in kind.__mro__:
        marked = getattr(base.__dict__.get(method), "registration", None)
        if marked is not None and marked.dispatch is Dispatch.DATA_PARALLEL:
            return marked.returns
    raise AttributeError(f"{kind.__name__}.{method} is not registered for Dispatch.DATA_PARALLEL")
