"""Weights on their way: buckets in shared memory, directories, and only what changed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.errors import EngineError
from tandem.weights.base import BucketHalf, Directory, Part
from tandem.weights.delta import DeltaCache
from tandem.weights.disk import DiskSync
from tandem.weights.shared_memory import SharedMemorySync, attach, fingerprint


def weights(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = {"a": (3, 5), "b": (40, 40), "c": (7,), "large": (300, 100), "d": (), "last": (299, 100)}
    return {
        name: torch.randn(shape).to(torch.bfloat16 if name == "c" else torch.float32) for name, shape in shapes.items()
    }


class Engine:
    """Takes parts as an engine does: late, and copying."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.version = -1
        self.buckets: list[int] = []
        self._waiting: list[Part] = []

    def deliver(self, part: Part) -> Callable[[], None]:
        self._waiting.append(part)
        return self._take

    def _take(self) -> None:
        for part in self._waiting:
            if isinstance(part, BucketHalf):
                self.held |= {name: tensor.clone() for name, tensor in attach(part)}
                self.buckets.append(sum(tensor.nbytes for _, tensor in attach(part)))
            elif isinstance(part, Directory):
                for file in sorted(part.path.glob("*.safetensors")):
                    self.held |= load_file(file)
            else:
                self.version = part.version
        self._waiting.clear()


def check(held: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype
        torch.testing.assert_close(held[name], tensor, rtol=0, atol=0)


def test_buckets_bring_every_bit_and_are_no_larger_than_they_may_be() -> None:
    sync, engine = SharedMemorySync(16_384, checksum=True), Engine()
    for version in (1, 2):
        sync.publish(version, weights(version).items(), engine.deliver)
        check(engine.held, weights(version))
        assert engine.version == version
        assert all(len(half._bytes) <= 8192 for half in sync._halves), "a large tensor's memory is free again"
    assert sorted(engine.buckets)[-4:] == [119_600, 119_600, 120_000, 120_000]  # the large tensors, alone
    assert max(size for size in engine.buckets if size < 119_600) <= 8192
    sync.close()


def test_memory_that_takes_the_place_of_another_is_not_taken_for_it() -> None:
    for seed in (1, 2):
        sync, engine = SharedMemorySync(1 << 20), Engine()
        sync.publish(seed, weights(seed).items(), engine.deliver)
        check(engine.held, weights(seed))
        sync.close()


def test_a_changed_byte_is_noticed() -> None:
    engine, sync = Engine(), SharedMemorySync(1 << 20, checksum=True)

    def deliver(part: Part) -> Callable[[], None]:
        if isinstance(part, BucketHalf):
            next(iter(attach(part)))[1][0, 0] += 1
        return engine.deliver(part)

    with pytest.raises(EngineError, match="weight a arrived with another checksum"):
        sync.publish(1, weights().items(), deliver)
    sync.close()


def test_a_fingerprint_tells_values_and_places_apart() -> None:
    tensor = torch.randn(1000)
    swapped = tensor.clone()
    swapped[[3, 7]] = swapped[[7, 3]]
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert len({fingerprint(tensor), fingerprint(swapped), fingerprint(tensor + 1e-6)}) == 3


def test_what_is_kept_is_published_again() -> None:
    for sync in (SharedMemorySync(4096, source=lambda: weights(5).items()), DiskSync(4096)):
        sync.publish(5, weights(5).items(), Engine().deliver)
        late = Engine()
        assert sync.repeat(5, late.deliver) is not False
        check(late.held, weights(5))
        sync.close()
    assert SharedMemorySync(4096).repeat(5, Engine().deliver) is False


def test_a_directory_holds_the_last_publish_alone() -> None:
    sync, engine = DiskSync(4096), Engine()
    homes: list[Path] = []

    def deliver(part: Part) -> Callable[[], None]:
        homes.extend([part.path] if isinstance(part, Directory) else [])
        return engine.deliver(part)

    for version in (1, 2):
        sync.publish(version, weights(version).items(), deliver)
        check(engine.held, weights(version))
    assert not homes[0].exists() and homes[1].exists()
    sync.close()
    assert not homes[1].exists()


def test_what_changed_is_enough_and_little() -> None:
    sent, held = DeltaCache(), DeltaCache()
    moved: list[int] = []

    def send(message: Tensor) -> Tensor:
        encoded, arrived = sent.encode("first", message.view(torch.uint8), message.itemsize), torch.empty_like(message)
        moved.append(len(encoded))
        held.decode("first", encoded.clone(), arrived.view(torch.uint8), message.itemsize)
        return arrived

    for dtype in (torch.float32, torch.bfloat16):
        message = torch.randn(30_000).to(dtype)
        assert torch.equal(send(message), message)
        after = message.clone()
        after[torch.randperm(30_000)[:300]] += 1
        after[:2] = torch.tensor([-0.0, torch.nan])
        torch.testing.assert_close(send(after), after, rtol=0, atol=0, equal_nan=True)
        assert moved[-1] <= 0.04 * moved[-2]
        assert torch.equal(send(message * 2), message * 2)
        assert moved[-1] == message.nbytes, "all of it where that is shorter"
        sent, held = DeltaCache(), DeltaCache()


def test_a_copy_that_differs_from_the_other_ends_is_noticed() -> None:
    sent, held, arrived = DeltaCache(), DeltaCache(), torch.zeros(4000, dtype=torch.uint8)
    held.decode(0, sent.encode(0, torch.zeros(4000, dtype=torch.uint8), 4).clone(), arrived, 4)
    changed = torch.zeros(4000, dtype=torch.uint8)
    changed[7] = 1
    encoded = sent.encode(0, changed, 4)
    encoded[-1] ^= 1
    with pytest.raises(EngineError, match="patched with what changed"):
        held.decode(0, encoded, arrived, 4)
