"""A state mixer as a function of hidden states and of the states before them.

transformers' mixers keep their states in a cache, of which they ask four things. An object that answers these for one
call makes any of them a function; none of their code is touched.

Suffixes: `_B` rows, `_T` places of a row in one call.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

CACHES = ("cache_params", "past_key_values")
"""What a mixer's `forward` calls its cache."""


class State(NamedTuple):
    """What a mixer knows of the tokens before a place, of some rows."""

    conv: Tensor
    """The latest inputs of its convolution, `[B, channels, kernel size]`, in the model's dtype."""
    recurrent: Tensor | None
    """`[B, ...]`, float32 in all mixers; None of one that is a convolution alone."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "State":
        return State(function(self.conv), None if self.recurrent is None else function(self.recurrent))

    def take(self, row_B: Tensor) -> "State":
        """A copy of the states of some rows, int64 `[B]`."""
        return self.map(lambda x: x.index_select(0, row_B))

    def first(self, rows: int) -> "State":
        """A view of the states of the first rows."""
        return self.map(lambda x: x[:rows])

    def pairs(self, other: "State") -> Iterator[tuple[Tensor, Tensor]]:
        """Each of its tensors with that of another."""
        yield self.conv, other.conv
        if self.recurrent is not None and other.recurrent is not None:
            yield self.recurrent, other.recurrent

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self if x is not None)


def joined(states: Sequence[State]) -> State:
    """The rows of one after those of another."""
    if len(states) == 1:
        return states[0]
    recurrent = [state.recurrent for state in states if state.recurrent is not None]
    return State(torch.cat([state.conv for state in states]), torch.cat(recurrent) if recurrent else None)


class StateMixer:
    """A mixer of a model, called with any rows, whatever plan its model runs by."""

    def __init__(self, module: nn.Module, number: int) -> None:
        """`number`: tells the mixers of a model apart."""
        self.number = number
        self._module = module
        self._cache = next(name for name in CACHES if name in inspect.signature(type(module).forward).parameters)

    @property
    def name(self) -> str:
        """That of its class."""
        return type(self._module).__name__

    def __call__(self, hidden_BT: Tensor, before: State | None, real_BT: Tensor | None) -> tuple[Tensor, State]:
        """The outputs `[B, T, hidden]` and the states after the last place.

        `hidden_BT` `[B, T, hidden]`; `before` None: rows begin here; else a row of one token may overwrite it.
        `real_BT` bool `[B, T]`: what stands on the left where it is false is no token; only of rows that begin here.
        """
        cache = _OneCall(before, real_BT)
        module: Any = self._module
        output = type(module).forward(module, hidden_BT, attention_mask=real_BT, **{self._cache: cache})
        return output, cache.after


class _OneCall:
    """What a mixer takes for transformers' DynamicCache in one call, and for the layer of it that is its own."""

    record_past = False

    def __init__(self, before: State | None, real_BT: Tensor | None) -> None:
        self._begins = before is None
        self._real_BT = real_BT
        self.conv_states = {} if before is None else {0: before.conv}
        self.recurrent_states = {} if before is None or before.recurrent is None else {0: before.recurrent}

    @property
    def layers(self) -> Self:
        return self

    def __getitem__(self, layer: int) -> Self:
        return self

    @property
    def after(self) -> State:
        return State(self.conv_states[0], self.recurrent_states.get(0))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return not self._begins

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """The inputs of the convolution `[B, channels, T]` behind those before them, at least `conv_kernel_size`.

        What is no token is 0, as if it were not there: a projection with a bias gives something else there.
        """
        _refuse_others(state_idx)
        new = conv_states
        if self._real_BT is not None:
            new = new.masked_fill(~self._real_BT[:, None], 0)
        if self._begins:
            whole = pad(new, (max(0, conv_kernel_size - new.shape[-1]), 0))
        else:
            whole = torch.cat((self.conv_states[0], new), dim=-1)
        self.conv_states[0] = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        _refuse_others(state_idx)
        self.recurrent_states[0] = recurrent_states
        return recurrent_states


def _refuse_others(state_idx: int) -> None:
    if state_idx:
        raise NotImplementedError(f"a mixer with a state number {state_idx}: states of one kind a layer are kept")
