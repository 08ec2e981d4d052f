"""A replayed decoding step reads no memory that has been freed, and says what a plain one says: shown on a CPU, by a
recorder instead of CUDA's.

Like a graph it computes, at each replay, what was computed while it was recorded, of the same memory into the same
memory, and knows nothing else: no Python runs again. Unlike a graph it tells whether somebody still keeps what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.errors import EngineError
from tandem.generation import recorded
from tandem.generation.native import NativeEngine
from tandem.models.kv_cache import KVCache
from tandem.models.pages import PagedDecode
from tandem.types import Completion, Request, SamplingParams
from tests.unit.test_generation_recorded import VOCABULARY, answers, policy, requests


class Outside:
    """A tensor that a graph reads or writes, but has not made: its place in memory, which it does not keep."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.shape = tuple(tensor.shape)
        self._dtype, self._layout = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # type: ignore[attr-defined]
        assert storage is not None, f"a recorded step reads freed tensors of shapes {[self.shape]}"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor | None]]] = []
        """Operators, what they take, and what they return; None: memory that the graph does not keep."""
        self.made: dict[int, Tensor] = {}
        """By storage, a tensor that the graph keeps."""

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            args, kwargs = pytree.tree_map_only(Outside, Outside.tensor, (args, kwargs))
            for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                if old is not None and new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                    old.copy_(new)


class Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted = pytree.tree_map_only(Tensor, self._noted, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        taken = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if (cdata := tensor.untyped_storage()._cdata) not in taken:
                self.graph.made[cdata] = tensor
        kept = [tensor if tensor.untyped_storage()._cdata in self.graph.made else None for tensor in _tensors(out)]
        self.graph.calls.append((func, *noted, kept))
        return out

    def _noted(self, tensor: Tensor) -> Tensor | Outside:
        return tensor if tensor.untyped_storage()._cdata in self.graph.made else Outside(tensor)


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


def some_requests(random: np.random.Generator) -> list[Request]:
    """Short and long prompts, of which rows end early and late, chosen in every way."""
    asked: list[Request] = []
    for number in range(int(random.integers(1, 5))):
        longest = 300 if random.random() < 0.2 else 20
        row = random.integers(1, VOCABULARY, random.integers(1, longest)).astype(np.int32)
        sampling = SamplingParams(
            temperature=float(random.choice([0, 0.7, 1])), top_p=float(random.choice([1, 0.9])),
            top_k=int(random.choice([0, 5])), max_tokens=int(random.integers(1, 13)), stop_token_ids=(0,),
        )  # fmt: skip
        asked.append(Request(row, sampling, tuple(range(10 * number, 10 * number + int(random.integers(1, 6))))))
    return asked


def happens(event: str, version: int, engines: list[NativeEngine], random: np.random.Generator) -> None:
    factor = float(random.uniform(0.9, 1.1))
    for engine in engines:
        if event in {"moved", "moved and published"}:
            for parameter in engine._model.parameters():
                parameter.data = parameter.detach().clone()
        if event in {"published", "moved and published"}:
            with torch.no_grad():
                engine._model.get_parameter("model.layers.0.mlp.up_proj.weight").mul_(factor)
            engine.load_weights(version, None)
        if event == "asleep":
            engine.sleep()
            engine.wake()


EVENTS = ("nothing", "published", "moved", "moved and published", "asleep")


def run_schedule(seed: int) -> None:
    """What a recorded engine answers is what a plain one answers, whatever happens between."""
    random = np.random.default_rng(seed)
    family, slots = str(random.choice(["qwen3", "mistral"])), int(random.integers(1, 13))
    plain = NativeEngine(policy(family, "cpu"), max_running=slots, record=False)
    engines = [engine(family, slots), plain]
    plain.load_weights(0, None)
    parted = 0
    for turn in range(1, int(random.integers(3, 7))):
        asked = some_requests(random)
        found, wanted = (answers(one, asked) for one in engines)
        parted += sum(not same(one, other) for one, other in zip(found, wanted, strict=True))
        happens(str(random.choice(EVENTS)), turn, engines, random)
    assert parted <= 1, "float32 puts one draw of 250,000 on the other side of a border"


def same(one: Completion, other: Completion) -> bool:
    if one.token_ids.tolist() != other.token_ids.tolist() or one.status != other.status:
        return False
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=5e-5)
    return True


@pytest.mark.parametrize("seed", range(1000, 1024))
def test_random_schedules(seed: int, recorder: None) -> None:
    run_schedule(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_random_schedules(hundred: int, recorder: None) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        run_schedule(seed)


def test_a_mask_that_is_replaced_while_a_recording_reads_it_is_found(
    recorder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the cache of a CPU keeps one: it is as long as the longest row."""
    cache, attend_to = KVCache(), PagedDecode.attend_to

    def masked(plan: PagedDecode, both: list[Tensor], query_N: Tensor, scoring: Any) -> Tensor:
        end = -(-int(plan.position_N.max() + 1) // 64) * 64
        mask = cache.mask(end, scoring.window, query_N.dtype, query_N.device)
        return attend_to(plan, both, query_N, scoring) + mask[end - 1]

    monkeypatch.setattr(PagedDecode, "attend_to", masked)
    asked = engine("qwen3", slots=4)
    answers(asked, requests([260], 6))
    (alone,) = requests([3], 6)
    answers(asked, [replace(alone, seeds=(0,))])
    with pytest.raises(EngineError, match="a recorded step reads freed tensors"):
        answers(asked, requests([260], 6))


def test_a_hundred_steps_of_a_skewed_run_are_recorded_for_15_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    prepare = recorded.RecordedSteps._prepare

    def counted(steps: recorded.RecordedSteps, rows: int) -> Callable[[], Tensor]:
        prepared.append(rows)
        return prepare(steps, rows)

    monkeypatch.setattr(recorded.RecordedSteps, "_prepare", counted)
    random = np.random.default_rng(0)
    lengths = np.minimum(100, random.lognormal(2.5, 1, 255)).astype(int).clip(1).tolist()
    row = np.arange(1, 5, dtype=np.int32)
    asked = [Request(row, SamplingParams(max_tokens=tokens), (seed,)) for seed, tokens in enumerate([*lengths, 101])]
    answers(engine("qwen3", slots=256), asked)
    assert len(prepared) == len(set(prepared)) <= 15 and {1, 256} < set(prepared)


def test_the_recorder_computes_again_what_it_has_seen() -> None:
    graph, given, kept = Graph(), torch.ones(3), torch.zeros(3)
    with Recorder(graph):
        twice = 2 * given[1:]
        twice.add_(1)
        kept[1:] = twice
        kept[0] += twice.sum()
    given.fill_(5)
    graph.replay()
    assert kept.tolist() == [28, 11, 11]


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
