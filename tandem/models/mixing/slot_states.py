"""The states of the rows that are being generated: a row has one a mixer, in its slot, whatever its length.

Suffixes: `_N` rows of one forward pass, `_B` rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from tandem.models.mixing.mixer import State, StateMixer, joined

States = Mapping[int, State]
"""By the number of the mixer, the state of one row."""


class SlotStates:
    """By mixer, states `[slots, ...]`, made at its first use and kept."""

    def __init__(self) -> None:
        self._of: dict[int, State] = {}

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._of.values())

    @property
    def row_bytes(self) -> int:
        """Of one row, which has them all."""
        return sum(state.first(1).nbytes for state in self._of.values())

    def write(self, mixer: StateMixer, first: int, state_B: State, slots: int) -> None:
        """Into slot `first` and on; there is room for `slots` rows at least then."""
        end = first + len(state_B.conv)
        held = self._of.get(mixer.number)
        if held is None or len(held.conv) < max(slots, end):
            held = self._of[mixer.number] = _grown(held, state_B, max(slots, end))
        for whole, new in held.pairs(state_B):
            whole[first:end] = new

    def decode(self, mixer: StateMixer, hidden_N: Tensor, shared: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """One token in each of the first slots, or as in `Decode.share`; outputs `[N, hidden]`."""
        held = self._of[mixer.number]
        if shared is not None:
            slot_N, like_B = shared
            output_N1, after = mixer(hidden_N[:, None], held.take(slot_N), None)
            self.write(mixer, 0, after.take(like_B), len(held.conv))
            return output_N1[:, 0]
        before = held.first(len(hidden_N))
        output_N1, after = mixer(hidden_N[:, None], before, None)
        for old, new in before.pairs(after):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
        return output_N1[:, 0]

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the states of the slots `source` to the slots `target`, of which none is a source."""
        if source:
            for state in self._of.values():
                for whole, _ in state.pairs(state):
                    whole[list(target)] = whole[list(source)]

    def read(self, slot: int) -> States:
        """A copy of a slot's."""
        return {number: state.map(lambda x: x[slot : slot + 1].clone()) for number, state in self._of.items()}

    @contextmanager
    def unchanged(self, rows: int) -> Iterator[None]:
        """What a pass does within it to the states of the first slots is undone: decoding a token twice would be
        another state, where keys and values would be the same."""
        held = [state.first(rows) for state in self._of.values()]
        copies = [state.map(Tensor.clone) for state in held]
        yield
        for state, copy in zip(held, copies, strict=True):
            for whole, kept in state.pairs(copy):
                whole.copy_(kept)


def stacked(rows: Sequence[States], mixer: StateMixer) -> State:
    """A mixer's states of several rows."""
    return joined([states[mixer.number] for states in rows])


def _grown(held: State | None, like: State, slots: int) -> State:
    grown = like.map(lambda x: x.new_zeros(slots, *x.shape[1:]))
    for whole, old in () if held is None else grown.pairs(held):
        whole[: len(old)] = old
    return grown
