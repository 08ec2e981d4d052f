"""A replayed decoding step reads no memory that has been freed: shown on a CPU, by a recorder instead of CUDA's.

Like a graph it reads, at each replay, the memory that its kernels read while they were recorded, and keeps what they
made. Unlike a graph it tells whether somebody still keeps what is read; it computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.generation import recorded
from tandem.generation.native import NativeEngine
from tests.unit.test_generation_recorded import answers, policy, requests


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.read: dict[int, tuple[StorageWeakRef, tuple[int, ...]]] = {}
        """By storage, what keeps it from being taken for another, and the shape of a tensor in it."""

    def replay(self) -> None:
        freed = [shape for storage, shape in self.read.values() if storage.expired()]
        assert not freed, f"a recorded step reads freed tensors of shapes {freed}"


class Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage.cdata not in self.own:
                self.graph.read.setdefault(storage.cdata, (storage, tuple(tensor.shape)))
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if (cdata := tensor.untyped_storage()._cdata) not in self.graph.read:
                self.own.add(cdata)
                self.graph.made.append(tensor)
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


@contextmanager
def record(graph: Graph, pool: object) -> Iterator[None]:
    with Recorder(graph):
        yield


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_can_record", lambda device: True)
    for name, stand_in in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": object,
        "CUDAGraph": Graph,
        "graph": record,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


def engine(family: str, slots: int) -> NativeEngine:
    engine = NativeEngine(policy(family, "cpu"), max_running=slots, record=True)
    engine.load_weights(0, None)
    return engine


def go_up_and_down(engine: NativeEngine) -> None:
    for lengths in ([500], [3], [500], [300], [500], [3], [3, 500, 20], [500]):
        answers(engine, requests(lengths, 12))


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_lengths_that_rise_fall_and_rise_again(family: str, recorder: None) -> None:
    go_up_and_down(engine(family, slots=4))


def test_sleep_publishes_and_moved_weights(recorder: None) -> None:
    asked = engine("qwen3", slots=4)
    go_up_and_down(asked)
    asked.sleep()
    asked.wake()
    go_up_and_down(asked)
    moved = asked._model.get_parameter("model.layers.1.mlp.up_proj.weight")
    moved.data = moved.detach().clone()  # not the first parameter
    go_up_and_down(asked)
    asked.load_weights(1, [(name, weight.clone()) for name, weight in asked._model.named_parameters()])
    go_up_and_down(asked)


def test_weights_that_move_under_way_and_are_published(recorder: None) -> None:
    asked = engine("qwen3", slots=4)
    answers(asked, requests([300], 12))
    for parameter in asked._model.parameters():
        parameter.data = parameter.detach().clone()
    asked.load_weights(1, None)
    answers(asked, requests([300], 12))


def test_the_recorder_notices_what_nobody_keeps() -> None:
    graph, kept, dropped = Graph(), torch.ones(3), torch.ones(4)
    with Recorder(graph):
        made = kept[1:] + 1
        made.mul_(dropped.sum())
    del made
    graph.replay()
    del dropped
    with pytest.raises(AssertionError, match=r"reads freed tensors of shapes \[\(4,\)\]"):
        graph.replay()
