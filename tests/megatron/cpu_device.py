"""Stands in for CUDA while Megatron-Core runs on CPUs; `scripts/megatron-env` loads it in its environment only.

Megatron-Core asks for the CUDA device, its streams and its random states wherever it allocates. Once `megatron.core`
is imported on a machine without CUDA, these questions are answered with the CPU. Numbers are not touched.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


class Stream:
    """A stream or an event on which everything is done already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., "Stream"]:
        return lambda *_, **__: self


def on_cpu(device: Any) -> Any:
    import torch

    if device is None or isinstance(device, int):
        return device if device is None else torch.device("cpu")
    return torch.device("cpu") if torch.device(device).type == "cuda" else device


def answer_for_cuda() -> None:
    import torch

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, lambda *_: None)  # torch.compile wants no function under two names
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = lambda *_: Stream()
    cuda.default_stream = lambda *_: Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    for module in (torch.Tensor, torch.nn.Module):
        module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_, **__: self.clone()  # type: ignore[method-assign]
    with torch.device("cpu"):
        torch.zeros(0)  # the device context collects the factories at its first use
    for name in FACTORIES:
        setattr(torch, name, without_cuda(getattr(torch, name)))
    tensor_type = torch.Tensor.type
    # the optimizers look for 'torch.cuda.FloatTensor'
    torch.Tensor.type = lambda self, *kind, **how: (  # type: ignore[method-assign]
        tensor_type(self, *kind, **how) if kind else tensor_type(self).replace("torch.", "torch.cuda.", 1)
    )


def without_cuda(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def gather_uneven(parts: list[Any], own: Any, group: Any) -> None:
    """`all_gather`, which gloo has for tensors of one size only."""
    import torch.distributed as dist

    for rank, part in zip(dist.get_process_group_ranks(group), parts, strict=True):
        dist.broadcast(part.copy_(own) if rank == dist.get_rank() else part, rank, group)


def answer_for_nccl() -> None:
    import torch.distributed as dist

    gather = dist.all_gather
    dist.all_gather = lambda parts, own, group=None, **how: (
        gather(parts, own, group, **how)
        if len({part.shape for part in parts}) == 1
        else gather_uneven(parts, own, group)
    )


def answer_in_megatron() -> None:
    """What Megatron-Core decides by itself on seeing a CPU tensor or a CUDA generator."""
    import torch
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # the random states are one and the same
    megatron_random: Any = random
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


class Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that neither TransformerEngine nor Apex is there
            if torch.cuda.is_available():
                self._loader.exec_module(module)
            else:
                answer_for_cuda()
                answer_for_nccl()
                self._loader.exec_module(module)
                answer_in_megatron()


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megatron.core":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron-Core compiles small functions
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
sys.meta_path.insert(0, Finder())
