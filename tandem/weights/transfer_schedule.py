"""Who sends which part of which weight to whom, and when: worked out once, from what ranks hold and what they serve.

    layouts of senders and receivers --make_schedule--> rounds of transfers --bridge.py--> bytes

A receiver gets each element that it serves once, and no other. Where several senders hold the same part (replicas of
hybrid sharding, norms under tensor parallelism, data-parallel ranks), the one with the least to send so far sends it.
In each round a rank sends and receives at most a bucket; rounds follow one another on every rank in the same order.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tandem.errors import EngineError
from tandem.regions import Region, Shard, common, elements, pieces, whole

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}


class Held(NamedTuple):
    """What one rank has, or wants, of a weight."""

    shape: tuple[int, ...]
    """Of the whole weight."""
    dtype: str
    region: Region

    @property
    def itemsize(self) -> int:
        return _BYTES[self.dtype]


Layout = Mapping[str, Held]
"""What one rank has, or wants, by Hugging Face names."""


class Transfer(NamedTuple):
    """A box of a weight, from one rank to another; senders and receivers are each counted from 0."""

    name: str
    region: Region
    sender: int
    receiver: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return elements(self.region) * self.itemsize


Round = Sequence[Transfer]
Parcel = tuple[Transfer, ...]
"""Transfers of a round between two ranks, head to tail in one piece of memory. Wide types come first, so that all are
aligned."""


def layout_of(shards: Iterable[Shard]) -> Layout:
    return {shard.name: Held(shard.shape, shard.dtype, shard.region) for shard in shards}


def all_of(senders: Iterable[Layout]) -> Layout:
    """What a receiver wants that serves every weight whole."""
    return {name: held._replace(region=whole(held.shape)) for layout in senders for name, held in layout.items()}


def make_schedule(senders: Sequence[Layout], receivers: Sequence[Layout], bucket_bytes: int) -> Sequence[Round]:
    """Rounds in which nobody sends or receives more than `bucket_bytes`.

    Raises EngineError unless the senders' different parts of a weight make up what each receiver serves of it.
    """
    rounds = _Rounds(bucket_bytes)
    sent_by = [0] * len(senders)
    missing = [{name: elements(held.region) for name, held in layout.items()} for layout in receivers]
    for name in _in_turns(senders):
        for source, ranks in _holders(name, senders).items():
            held = senders[ranks[0]][name]
            for region, receiver in _wanted(name, source, receivers, bucket_bytes // held.itemsize):
                transfer = Transfer(name, region, min(ranks, key=sent_by.__getitem__), receiver, held.itemsize)
                sent_by[transfer.sender] += transfer.nbytes
                missing[receiver][name] -= elements(region)
                rounds.add(transfer)
    for rank, layout in enumerate(missing):
        if wrong := [f"{name} ({-count:+})" for name, count in layout.items() if count]:
            raise EngineError(f"training ranks do not hold once what receiver {rank} serves: elements of {wrong[:3]}")
    return rounds.made


def parcels(transfers: Iterable[Transfer]) -> dict[tuple[int, int], Parcel]:
    """The transfers of a round by (sender, receiver)."""
    found: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        found[transfer.sender, transfer.receiver].append(transfer)
    return {pair: tuple(sorted(parts, key=lambda part: -part.itemsize)) for pair, parts in found.items()}


class _Rounds:
    """Puts each transfer into the first round, not before earlier ones of its two ranks, in which both have room."""

    def __init__(self, bucket_bytes: int) -> None:
        self.made: list[list[Transfer]] = []
        self._bucket_bytes = bucket_bytes
        self._current: dict[tuple[str, int], int] = defaultdict(int)
        self._used: dict[tuple[str, int], int] = defaultdict(int)
        """Bytes of each rank in its current round."""

    def add(self, transfer: Transfer) -> None:
        ends = ("sender", transfer.sender), ("receiver", transfer.receiver)
        place = max(self._current[end] for end in ends)
        if any(self._used_in(place, end) + transfer.nbytes > self._bucket_bytes for end in ends):
            place += 1
        for end in ends:
            self._used[end] = self._used_in(place, end) + transfer.nbytes
            self._current[end] = place
        while len(self.made) <= place:
            self.made.append([])
        self.made[place].append(transfer)

    def _used_in(self, place: int, end: tuple[str, int]) -> int:
        return self._used[end] if self._current[end] == place else 0


def _in_turns(senders: Sequence[Layout]) -> list[str]:
    """All names, each rank's in its own order, so that stages and holders of other experts send at the same time."""
    places: dict[str, int] = {}
    for layout in senders:
        for place, name in enumerate(layout):
            places[name] = min(place, places.get(name, place))
    return sorted(places, key=places.__getitem__)


def _holders(name: str, senders: Sequence[Layout]) -> dict[Region, list[int]]:
    """The senders that hold each part of a weight."""
    holders: dict[Region, list[int]] = defaultdict(list)
    for rank, layout in enumerate(senders):
        if name in layout and elements(layout[name].region):
            holders[layout[name].region].append(rank)
    return holders


def _wanted(name: str, source: Region, receivers: Sequence[Layout], most: int) -> list[tuple[Region, int]]:
    """(box, receiver): what receivers want of one part, in boxes of `most` elements, one box to all at a time."""
    return sorted(
        (box, receiver)
        for receiver, layout in enumerate(receivers)
        if name in layout and (both := common(source, layout[name].region)) is not None
        for box in pieces(both, most)
    )
