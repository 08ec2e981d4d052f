"""Weights from training shards to serving shards: each receiver gets what it serves, once, in bounded buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import EngineError
from tandem.regions import Region, chunk, common, elements, pieces, shape_of, slices_in, whole
from tandem.weights.transfer_schedule import Held, Layout, Round, all_of, make_schedule, parcels

LAYERS, EXPERTS, HIDDEN, BUCKET = 4, 4, 12, 512
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj", "down_proj")


def model() -> dict[str, Held]:
    """Shapes that four tensor-parallel ranks divide and eight shards do not."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (20, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.{name}": (16, HIDDEN) for name in ("q_proj", "k_proj", "v_proj")}
        shapes |= {f"layers.{layer}.q_proj.bias": (16,), f"layers.{layer}.norm": (HIDDEN,)}
        shapes[f"layers.{layer}.o_proj"] = (HIDDEN, 16)
        for expert in range(EXPERTS):
            block = f"layers.{layer}.experts.{expert}"
            shapes |= {f"{block}.gate_proj": (8, HIDDEN), f"{block}.up_proj": (8, HIDDEN)}
            shapes[f"{block}.down_proj"] = (HIDDEN, 8)
    shapes |= {"norm": (HIDDEN,), "lm_head": (20, HIDDEN)}
    return {
        name: Held(shape, "float32" if "norm" in name else "bfloat16", whole(shape)) for name, shape in shapes.items()
    }


def tensor_parallel(name: str, held: Held, ranks: int, rank: int) -> Held:
    kind = name.removesuffix(".bias").rsplit(".", 1)[-1]
    dim = 0 if kind in COLUMNS else 1 if kind in ROWS else None
    return held if dim is None else held._replace(region=chunk(held.region, dim, ranks, rank))


def training(fsdp: int, tensor: int, stages: int, experts: int) -> list[Layout]:
    """FSDP shards (along the first dimension) of tensor-parallel ones; experts over groups of the sharded ranks."""
    return [
        {
            name: sharded(tensor_parallel(name, held, tensor, part), name, fsdp, shard, experts)
            for name, held in model().items()
            if stage_of(name, stages) == stage and expert_is_here(name, experts, shard)
        }
        for stage, shard, part in product(range(stages), range(fsdp), range(tensor))
    ]


def stage_of(name: str, stages: int) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) * stages // LAYERS
    return 0 if name == "embed_tokens" else stages - 1


def expert_is_here(name: str, groups: int, shard: int) -> bool:
    return ".experts." not in name or int(name.split(".")[3]) * groups // EXPERTS == shard % groups


def sharded(held: Held, name: str, ranks: int, rank: int, groups: int) -> Held:
    if ".experts." in name:
        ranks, rank = ranks // groups, rank // groups
    return held._replace(region=chunk(held.region, 0, ranks, rank))


def serving(ranks: int) -> list[Layout]:
    return [{name: tensor_parallel(name, held, ranks, rank) for name, held in model().items()} for rank in range(ranks)]


def values(name: str, held: Held) -> np.ndarray:
    first = sum(name.encode()) * 1000
    kind = np.float32 if held.itemsize == 4 else np.float16
    return (np.arange(first, first + prod(held.shape)) % 1999).astype(kind).reshape(held.shape)


def apply(rounds: Sequence[Round], senders: list[Layout], receivers: list[Layout]) -> list[int]:
    """Do what the schedule says, checking it; returns the bytes that each receiver got."""
    all_values = {name: values(name, held) for layout in senders for name, held in layout.items()}
    held = [{n: all_values[n][slices_in(whole(h.shape), h.region)].copy() for n, h in one.items()} for one in senders]
    targets = [{n: np.zeros(shape_of(h.region), all_values[n].dtype) for n, h in one.items()} for one in receivers]
    writes = [{n: np.zeros(shape_of(h.region), int) for n, h in one.items()} for one in receivers]
    received = [0] * len(receivers)
    for transfers in rounds:
        sent, got = Counter[int](), Counter[int]()
        for (sender, receiver), parcel in parcels(transfers).items():
            wire = b"".join(
                held[sender][t.name][slices_in(senders[sender][t.name].region, t.region)].tobytes() for t in parcel
            )
            sent[sender] += len(wire)
            got[receiver] += len(wire)
            for part in parcel:
                place = slices_in(receivers[receiver][part.name].region, part.region)
                mine, wire = wire[: part.nbytes], wire[part.nbytes :]
                dtype = targets[receiver][part.name].dtype
                targets[receiver][part.name][place] = np.frombuffer(mine, dtype).reshape(shape_of(part.region))
                writes[receiver][part.name][place] += 1
            assert wire == b""
        assert max([*sent.values(), *got.values()]) <= BUCKET
        received = [total + got[rank] for rank, total in enumerate(received)]
    for target, counts, layout in zip(targets, writes, receivers, strict=True):
        for name, wanted in layout.items():
            np.testing.assert_array_equal(target[name], all_values[name][slices_in(whole(wanted.shape), wanted.region)])
            assert (counts[name] == 1).all(), "each element once"
    return received


def served_bytes(layout: Layout) -> int:
    return sum(elements(held.region) * held.itemsize for held in layout.values())


GRID = [
    (fsdp, tensor, stages, experts)
    for fsdp, tensor, stages, experts in product((1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2))
    if fsdp % experts == 0
]


@pytest.mark.parametrize("ranks", [1, 2, 4], ids=lambda ranks: f"into TP{ranks}")
@pytest.mark.parametrize("degrees", GRID, ids=lambda d: "FSDP{} TP{} PP{} EP{}".format(*d))
def test_every_receiver_gets_what_it_serves_and_nothing_else(degrees: tuple[int, int, int, int], ranks: int) -> None:
    senders, receivers = training(*degrees), serving(ranks)
    rounds = make_schedule(senders, receivers, BUCKET)
    assert apply(rounds, senders, receivers) == [served_bytes(layout) for layout in receivers]


def test_replicas_that_serve_everything_get_everything_from_shards() -> None:
    senders = training(4, 1, 1, 1)
    receivers = [all_of(senders)] * 3
    rounds = make_schedule(senders, receivers, BUCKET)
    assert apply(rounds, senders, receivers) == [served_bytes(model())] * 3


def test_ranks_that_serve_nothing_get_nothing() -> None:
    senders = training(2, 1, 1, 1)
    rounds = make_schedule(senders, [all_of(senders), {}], BUCKET)
    assert {transfer.receiver for transfers in rounds for transfer in transfers} == {0}


def test_replicas_share_the_sending() -> None:
    """Hybrid sharding: groups of two shards, four times; each of the eight sends an eighth."""
    senders = training(2, 1, 1, 1) * 4
    rounds = make_schedule(senders, [all_of(senders)] * 2, BUCKET)
    sent = Counter[int]()
    for transfer in (transfer for transfers in rounds for transfer in transfers):
        sent[transfer.sender] += transfer.nbytes
    assert set(sent) == set(range(8))
    assert max(sent.values()) <= 1.05 * sum(sent.values()) / 8


def test_stages_send_at_the_same_time() -> None:
    senders = training(1, 1, 2, 1)
    rounds = make_schedule(senders, [all_of(senders)], 8 * BUCKET)
    assert len(rounds) > 3
    assert all({transfer.sender for transfer in transfers} == {0, 1} for transfers in rounds[:-1])


def test_parts_that_are_missing_or_there_twice_are_refused() -> None:
    senders = training(2, 2, 1, 1)
    with pytest.raises(EngineError, match=r"do not hold once what receiver 0 serves: .*embed_tokens \(-"):
        make_schedule(senders[1:], serving(1), BUCKET)
    name, held = "lm_head", model()["lm_head"]
    with pytest.raises(EngineError, match=r"receiver 0 serves: .*lm_head \(\+"):
        make_schedule([{name: held}, {name: held._replace(region=chunk(held.region, 0, 2, 0))}], [{name: held}], BUCKET)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_cut_of_a_tensor_goes_into_any_other(data: st.DataObject) -> None:
    """Up to three dimensions, cut along any of them into any numbers of parts, empty ones included."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3), label="shape"))

    def cuts(label: str) -> list[Region]:
        regions = [whole(shape)]
        for dim in range(len(shape)):
            parts = data.draw(st.integers(1, 4), label=f"{label} {dim}")
            regions = [chunk(region, dim, parts, part) for region in regions for part in range(parts)]
        return regions

    def layouts(label: str) -> list[Layout]:
        return [{"w": Held(shape, "float32", region)} for region in cuts(label)]

    senders, receivers = layouts("senders"), layouts("receivers")
    rounds = make_schedule(senders, receivers, data.draw(st.integers(1, 40), label="elements of a bucket") * 4)
    assert apply(rounds, senders, receivers) == [served_bytes(layout) for layout in receivers]


@settings(deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(0, 5), max_size=3).map(tuple), most=st.integers(1, 50))
def test_pieces_are_bounded_and_make_up_the_whole(shape: tuple[int, ...], most: int) -> None:
    found = list(pieces(whole(shape), most))
    assert sum(map(elements, found)) == prod(shape)
    assert all(elements(piece) <= most for piece in found)
    assert not any(common(one, other) for place, one in enumerate(found) for other in found[:place])


def test_a_chunk_is_that_of_torch() -> None:
    import torch

    for size, parts in product(range(12), range(1, 6)):
        theirs = [len(part) for part in torch.zeros(size).chunk(parts)] if size else []
        ours = [shape_of(chunk(whole((size,)), 0, parts, part))[0] for part in range(parts)]
        assert ours == [*theirs, *[0] * (parts - len(theirs))]
