"""Weights from one pool of processes to another: from the ranks that hold parts of them to those that serve them.

    shards() --pack--> one half of a bucket ~~wire~~> one half of a bucket --(name, region, part)--> what is served
                       while the other half travels                        while the other half arrives

The pools are worlds of their own; a bridge is a third one, of senders (0 …) and receivers (after them). Ranks say what
they hold or serve when they join; the schedule of every publish follows from that. No rank gathers a weight to send it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tandem.errors import EngineError
from tandem.regions import Region, Shard, elements, shape_of, slices_in
from tandem.weights.delta import DeltaCache
from tandem.weights.transfer_schedule import Held, Layout, Parcel, Round, all_of, layout_of, make_schedule, parcels
from tandem.weights.transport import TIMEOUT, Operation, Wire, name_of, own_device, wait

BUCKET_BYTES = 32 * 2**20
"""What a rank sends or receives at most in a round; it has memory for two."""
_ALIGNMENT = 8
_PAYLOAD, _SIZE = 0, 1
"""Tags; with `delta` the size of each parcel goes before it."""


@dataclass(frozen=True, slots=True)
class Address:
    """What every rank needs to join a bridge."""

    host: str
    port: int
    senders: int
    receivers: int
    delta: bool
    """From the second publish on only what changed travels."""


def open_bridge(senders: int, receivers: int, host: str = "127.0.0.1", delta: bool = False) -> tuple[Address, TCPStore]:
    """The place where ranks meet, on a free port of `host`; it lasts as long as the store."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return Address(host, store.port, senders, receivers, delta), store


class _Bundle(NamedTuple):
    """What lies in one piece of a bucket."""

    parcel: Parcel
    peers: tuple[int, ...]
    """Ranks of the bridge: a sender's receivers of the same content; a receiver's sender."""

    @property
    def nbytes(self) -> int:
        return sum(transfer.nbytes for transfer in self.parcel)

    @property
    def room(self) -> int:
        """Bytes of the bucket that it takes, so that the next one begins aligned."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def itemsize(self) -> int:
        """The narrowest, in which all are a whole number of words."""
        return self.parcel[-1].itemsize


class _End:
    """What both ends have: the wire, and the bundles of this rank, round by round."""

    def __init__(self, address: Address, rank: int, layout: Layout | None) -> None:
        """`rank` in the bridge. Returns when every rank has joined."""
        store = TCPStore(address.host, address.port, is_master=False, timeout=TIMEOUT)
        everyone = _everyone(store, rank, address, layout)
        devices = [device for device, _ in everyone]
        nccl = all(devices) and len(set(devices)) == len(devices) and not address.delta
        self._wire = Wire(
            PrefixStore("wire", store), rank, len(everyone), own_device() if nccl else torch.device("cpu")
        )
        layouts = [layout for _, layout in everyone]
        senders = [layout or {} for layout in layouts[: address.senders]]
        receivers = [all_of(senders) if layout is None else layout for layout in layouts[address.senders :]]
        self._layout = (senders + receivers)[rank]
        self._delta = DeltaCache() if address.delta else None
        rounds = [_bundles(part, rank, address.senders) for part in make_schedule(senders, receivers, BUCKET_BYTES)]
        self._rounds = [bundles for bundles in rounds if bundles]
        self.bucket_bytes = max((sum(bundle.room for bundle in bundles) for bundles in self._rounds), default=0)
        """The larger half of what a publish takes beside the weights themselves; the other is no larger."""

    @property
    def publish_bytes(self) -> int:
        """What this rank sends in one publish (what is the same for several receivers counts once), or receives."""
        return sum(bundle.nbytes for bundles in self._rounds for bundle in bundles)

    def _bucket(self) -> list[Tensor]:
        return [torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self._wire.device) for _ in range(2)]


class Sender(_End):
    """A training rank's end."""

    def __init__(self, address: Address, rank: int, shards: Sequence[Shard[Tensor]]) -> None:
        """`shards`: parts of the weights as each publish is going to have them."""
        super().__init__(address, rank, layout_of(shards))

    def send(self, shards: Sequence[Shard[Tensor]]) -> None:
        """Every rank of both sides takes part. Raises EngineError where a receiver is gone."""
        if layout_of(shards) != self._layout:
            raise EngineError("this rank holds other parts of the weights than when it joined the bridge")
        reader, bucket = _Reader(shards), self._bucket()
        travelling: list[Any] = []
        for number, bundles in enumerate(self._rounds):
            operations: list[Operation] = []
            for place, (bundle, memory) in enumerate(zip(bundles, _cut(bucket[number % 2], bundles), strict=True)):
                reader.pack(bundle.parcel, memory)
                operations += self._operations((number, place), bundle, memory)
            wait(travelling)
            travelling = self._wire.post(operations)
        wait(travelling)

    def _operations(self, key: Any, bundle: _Bundle, memory: Tensor) -> Iterator[Operation]:
        tensors = [(memory, _PAYLOAD)]
        if self._delta is not None:
            encoded = self._delta.encode(key, memory, bundle.itemsize)
            tensors = [(torch.tensor([len(encoded)]), _SIZE), (encoded, _PAYLOAD)]
        for tensor, tag in tensors:
            yield from (Operation(True, tensor, peer, tag) for peer in bundle.peers)


class Receiver(_End):
    """A serving rank's end."""

    def __init__(self, address: Address, rank: int, serves: Layout | None = None) -> None:
        """`serves` None: every weight, whole."""
        super().__init__(address, address.senders + rank, serves)

    def receive_into(self, target: Callable[[str], Tensor]) -> None:
        """Fill the tensors that `target` names: each is what is served of that weight. Raises EngineError where a
        sender is gone."""
        for name, region, part in self._parts():
            target(name)[slices_in(self._layout[name].region, region)].copy_(part)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """(name, what is served of the weight), each when it is complete, to be used before the next one is asked for.

        Raises EngineError where a sender is gone."""
        missing = {name: elements(held.region) for name, held in self._layout.items()}
        begun: dict[str, Tensor] = {}
        for name, region, part in self._parts():
            held = self._layout[name]
            missing[name] -= part.numel()
            if region == held.region:
                yield name, part
                continue
            if name not in begun:
                begun[name] = torch.empty(shape_of(held.region), dtype=part.dtype, device=part.device)
            begun[name][slices_in(held.region, region)].copy_(part)
            if not missing[name]:
                yield name, begun.pop(name)

    def _parts(self) -> Iterator[tuple[str, Region, Tensor]]:
        bucket = self._bucket()
        arrived = self._begin(0, bucket)
        for number, bundles in enumerate(self._rounds):
            following = self._begin(number + 1, bucket)
            arrived()
            for bundle, memory in zip(bundles, _cut(bucket[number % 2], bundles), strict=True):
                for transfer, part in _views(bundle.parcel, memory, self._layout):
                    yield transfer.name, transfer.region, part
            arrived = following

    def _begin(self, number: int, bucket: Sequence[Tensor]) -> Callable[[], None]:
        """Ask for a round's parcels; the function that is returned waits for them."""
        if number >= len(self._rounds):
            return lambda: None
        bundles = self._rounds[number]
        memories = _cut(bucket[number % 2], bundles)
        if self._delta is not None:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in bundles]
            return partial(self._patch, self._delta, number, memories, sizes, self._ask(bundles, sizes, _SIZE))
        return partial(wait, self._ask(bundles, memories, _PAYLOAD))

    def _ask(self, bundles: Sequence[_Bundle], tensors: Sequence[Tensor], tag: int) -> list[Any]:
        pairs = zip(bundles, tensors, strict=True)
        return self._wire.post([Operation(False, tensor, bundle.peers[0], tag) for bundle, tensor in pairs])

    def _patch(
        self, delta: DeltaCache, number: int, memories: Sequence[Tensor], sizes: Sequence[Tensor], sized: Sequence[Any]
    ) -> None:
        wait(sized)
        bundles, encoded = self._rounds[number], [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        wait(self._ask(bundles, encoded, _PAYLOAD))
        for place, (bundle, memory) in enumerate(zip(bundles, memories, strict=True)):
            delta.decode((number, place), encoded[place], memory, bundle.itemsize)


class _Reader:
    """Shards into parcels. It keeps the values of one shard, as the next box is likely to be of the same."""

    def __init__(self, shards: Sequence[Shard[Tensor]]) -> None:
        self._shards = {shard.name: shard for shard in shards}
        self._layout = layout_of(shards)
        self._name = ""
        self._values = torch.empty(0)

    def pack(self, parcel: Parcel, memory: Tensor) -> None:
        for transfer, box in _views(parcel, memory, self._layout):
            shard = self._shards[transfer.name]
            if self._name != shard.name:
                self._values = torch.empty(0)  # before the next are made
                self._name, self._values = shard.name, shard.read()
            box.copy_(self._values[slices_in(shard.region, transfer.region)])


def _views(parcel: Parcel, memory: Tensor, layout: Layout) -> Iterator[tuple[Any, Tensor]]:
    """Each transfer, and its part of the parcel's bytes as a tensor."""
    parts = memory.split([transfer.nbytes for transfer in parcel])
    for transfer, part in zip(parcel, parts, strict=True):
        dtype = getattr(torch, layout[transfer.name].dtype)
        yield transfer, part.view(dtype).view(shape_of(transfer.region))


def _cut(memory: Tensor, bundles: Sequence[_Bundle]) -> list[Tensor]:
    """Where each bundle lies in a half of the bucket."""
    rooms = [bundle.room for bundle in bundles]
    parts = memory[: sum(rooms)].split(rooms)
    return [part[: bundle.nbytes] for part, bundle in zip(parts, bundles, strict=True)]


def _bundles(transfers: Round, rank: int, senders: int) -> list[_Bundle]:
    """What a rank of the bridge sends, or receives, in a round."""
    found: dict[Any, _Bundle] = {}
    for (sender, receiver), parcel in parcels(transfers).items():
        if rank == senders + receiver:
            found[sender] = _Bundle(parcel, (sender,))
        elif rank == sender:
            content = tuple((transfer.name, transfer.region) for transfer in parcel)
            before = found[content].peers if content in found else ()
            found[content] = _Bundle(parcel, (*before, senders + receiver))
    return list(found.values())


def _everyone(store: TCPStore, rank: int, address: Address, layout: Layout | None) -> list[tuple[str, Layout | None]]:
    """The device and the layout of each rank; waits for them."""
    store.set(f"rank {rank}", json.dumps([name_of(own_device()), layout]))
    found: list[tuple[str, Layout | None]] = []
    for other in range(address.senders + address.receivers):
        device, said = json.loads(store.get(f"rank {other}"))
        found.append((device, None if said is None else {name: _held(*held) for name, held in said.items()}))
    return found


def _held(shape: list[int], dtype: str, region: list[list[int]]) -> Held:
    return Held(tuple(shape), dtype, tuple((start, stop) for start, stop in region))
