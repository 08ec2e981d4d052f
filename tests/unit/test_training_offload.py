"""What FSDP2 does with a shard that is smaller than others while its copy to host memory is still under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem.training.layout import Sharded, Whole


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    """Rank 1 of two: of three rows it has one, of four two."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    yield model
    dist.destroy_process_group()


@pytest.fixture
def arrive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it for `torch.cuda.synchronize`: until then what is copied without blocking is not there."""
    under_way: list[tuple[Tensor, Tensor]] = []

    def late(tensor: Any) -> Any:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        copy = torch.full_like(local, float("nan"))
        under_way.append((copy, local.clone()))
        return DTensor(copy, tensor._spec, requires_grad=tensor.requires_grad) if isinstance(tensor, DTensor) else copy

    def move(model: nn.Module, device: Any, non_blocking: bool = False) -> None:
        with torch.no_grad():
            model._apply(late if non_blocking else torch.Tensor.clone)

    monkeypatch.setattr(nn.Module, "to", move)
    return lambda: [copy.copy_(source) for copy, source in under_way] and None


@pytest.mark.parametrize("layout", [Sharded, pytest.param(Whole, marks=pytest.mark.xfail(strict=True))])
def test_every_shard_is_in_host_memory(layout: Any, sharded: nn.Module, arrive: Callable[[], None]) -> None:
    """The control moves shards as a model in one piece is moved."""
    layout.offload(SimpleNamespace(model=sharded))
    arrive()
    assert all((parameter._local_tensor == 1).all() for parameter in sharded.parameters())


def test_a_model_in_one_piece_is_there_once_the_device_has_been_waited_for(arrive: Callable[[], None]) -> None:
    model = nn.Linear(4, 3, bias=False)
    nn.init.ones_(model.weight)
    Whole.offload(SimpleNamespace(model=model))
    assert model.weight.isnan().all()
    arrive()
    assert (model.weight == 1).all()
