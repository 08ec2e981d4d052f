"""Weights over a bridge: threads stand for the ranks of both pools, and gloo carries the bytes as between machines."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.regions import Region, Shard, chunk, slices_in, whole
from tandem.weights import bridge
from tandem.weights.bridge import Address, Receiver, Sender, open_bridge
from tandem.weights.transfer_schedule import Held, Layout

BUCKET = 4096
TYPES = {"c": torch.bfloat16, "odd": torch.bfloat16}
SHAPES = {"a": (3, 5), "b": (40, 40), "c": (7,), "odd": (5, 3), "large": (300, 100), "d": ()}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "BUCKET_BYTES", BUCKET)


def weights(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape).to(TYPES.get(name, torch.float32)) for name, shape in SHAPES.items()}


def cut(shape: tuple[int, ...], ranks: int, rank: int, dim: int = 0) -> Region:
    return chunk(whole(shape), dim, ranks, rank) if len(shape) > dim else whole(shape)


def shards(seed: int, ranks: int, rank: int) -> list[Shard[Tensor]]:
    """In float64, as masters are wider than what is served."""

    def shard(name: str, tensor: Tensor) -> Shard[Tensor]:
        shape = tuple(tensor.shape)
        region = cut(shape, ranks, rank)
        own = tensor[slices_in(whole(shape), region)].double()
        return Shard(name, shape, str(tensor.dtype).removeprefix("torch."), region, lambda: own)

    return [shard(*named) for named in weights(seed).items()]


def columns(ranks: int, rank: int) -> Layout:
    """What a tensor-parallel rank serves: other cuts than training has."""
    held = {name: Held(shape, "float32", cut(shape, ranks, rank, 1)) for name, shape in SHAPES.items()}
    return {
        name: one._replace(dtype=str(TYPES.get(name, "torch.float32")).removeprefix("torch."))
        for name, one in held.items()
    }


@contextmanager
def joined(
    senders: int, serves: Sequence[Layout | None], delta: bool = False
) -> Iterator[tuple[ThreadPoolExecutor, list[Sender], list[Receiver]]]:
    address, store = open_bridge(senders, len(serves), delta=delta)
    with ThreadPoolExecutor(senders + len(serves)) as pool:
        sending = [pool.submit(Sender, address, rank, shards(0, senders, rank)) for rank in range(senders)]
        receiving = [pool.submit(Receiver, address, rank, layout) for rank, layout in enumerate(serves)]
        yield pool, [end.result() for end in sending], [end.result() for end in receiving]
    del store


def publish(
    pool: ThreadPoolExecutor, senders: list[Sender], receivers: list[Receiver], seed: int
) -> list[dict[str, Tensor]]:
    sending = [pool.submit(end.send, shards(seed, len(senders), rank)) for rank, end in enumerate(senders)]
    receiving = [
        pool.submit(lambda end=end: {name: tensor.clone() for name, tensor in end.receive()}) for end in receivers
    ]
    for sent in sending:
        sent.result()
    return [received.result() for received in receiving]


@pytest.mark.parametrize("delta", [False, True], ids=["all", "what changed"])
@pytest.mark.parametrize("senders", [1, 2, 3])
def test_each_receiver_has_what_it_serves_bit_by_bit_publish_after_publish(senders: int, delta: bool) -> None:
    serves = [None, columns(2, 0), columns(2, 1), {}]
    with joined(senders, serves, delta) as (pool, sending, receiving):
        for seed in (0, 0, 1, 2):
            found = publish(pool, sending, receiving, seed)
            check(found, serves, seed)
        served = [sum(tensor.nbytes for tensor in one.values()) for one in found]
        assert [end.publish_bytes for end in receiving] == served
        assert max(end.bucket_bytes for end in (*sending, *receiving)) <= BUCKET + 8 * senders


def check(found: list[dict[str, Tensor]], serves: Sequence[Layout | None], seed: int) -> None:
    for received, layout in zip(found, serves, strict=True):
        everything = weights(seed)
        expected = (
            everything
            if layout is None
            else {name: everything[name][slices_in(whole(SHAPES[name]), held.region)] for name, held in layout.items()}
        )
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)


def test_an_engines_own_parameters_are_filled_in_place() -> None:
    with joined(2, [None]) as (pool, senders, (receiver,)):
        targets = {name: torch.zeros(shape, dtype=TYPES.get(name)) for name, shape in SHAPES.items()}
        filling = pool.submit(receiver.receive_into, targets.__getitem__)
        for sent in [pool.submit(end.send, shards(3, 2, rank)) for rank, end in enumerate(senders)]:
            sent.result()
        filling.result()
        assert all(torch.equal(tensor, weights(3)[name]) for name, tensor in targets.items())


def test_one_shard_at_a_time_is_read() -> None:
    """What a read makes (adapters added, fused parameters apart) is gone before the next one makes something."""
    alive: list[str] = []

    def counting(shard: Shard[Tensor]) -> Shard[Tensor]:
        def read() -> Tensor:
            made = shard.read().clone()
            alive.append(shard.name)
            weakref.finalize(made, alive.remove, shard.name)
            assert len(alive) == 1
            return made

        return replace(shard, read=read)

    with joined(1, [None]) as (pool, (sender,), (receiver,)):
        received = pool.submit(lambda: dict.fromkeys(name for name, _ in receiver.receive()))
        sender.send([counting(shard) for shard in shards(0, 1, 0)])
        assert received.result().keys() == SHAPES.keys()


def test_other_parts_than_agreed_are_refused() -> None:
    refused = pytest.raises(EngineError, match="other parts of the weights than when it joined")
    with joined(1, [None]) as (_, (sender,), _receivers), refused:
        sender.send(shards(0, 2, 0))


def test_what_nobody_holds_is_missed_when_ranks_join() -> None:
    address, _store = open_bridge(1, 1)
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(Sender, address, 0, shards(0, 2, 0))
        receiving = pool.submit(Receiver, address, 0, columns(1, 0))
        for end in (sending, receiving):
            with pytest.raises(EngineError, match="do not hold once what receiver 0 serves: elements of"):
                end.result()


def send_and_die(address: Address) -> None:
    """A training rank's process, which ends when half of its shards are read."""
    bridge.BUCKET_BYTES = BUCKET

    def reading(number: int, shard: Shard[Tensor]) -> Shard[Tensor]:
        return replace(shard, read=lambda: os._exit(9) if number == 4 else shard.read())

    held = [reading(number, shard) for number, shard in enumerate(shards(0, 1, 0))]
    Sender(address, 0, held).send(held)


def receive_and_die(address: Address) -> None:
    """A serving rank's process, which ends when it has the first weight."""
    bridge.BUCKET_BYTES = BUCKET
    next(Receiver(address, 0).receive())
    os._exit(9)


@contextmanager
def process(target: Callable[[Address], None]) -> Iterator[Address]:
    """The other end of a bridge; afterwards it has died."""
    address, _store = open_bridge(1, 1)
    other = multiprocessing.get_context("spawn").Process(target=target, args=(address,))
    other.start()
    yield address
    other.join()
    assert other.exitcode == 9


def test_a_sender_that_dies_in_a_publish_is_an_error_at_the_receiver() -> None:
    received: list[str] = []
    with process(send_and_die) as address:
        receiver = Receiver(address, 0)
        with pytest.raises(EngineError, match="a process at the other end is gone or silent"):
            received += [name for name, _ in receiver.receive()]
    assert "large" not in received


def test_a_receiver_that_dies_in_a_publish_is_an_error_at_the_sender() -> None:
    with process(receive_and_die) as address:
        sender = Sender(address, 0, shards(0, 1, 0))
        with pytest.raises(EngineError, match="a process at the other end is gone or silent"):
            for _ in range(100):  # what the system has taken is sent, for this end
                sender.send(shards(0, 1, 0))
