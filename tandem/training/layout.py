"""How one model lies over the ranks of torch.distributed: whole on one, or in shards (FSDP2).

    body      one group of parameters a layer and one for the rest: gathered around its use, gradient reduce-scattered
    outside   the output layer, and the input embedding where the two are one weight: gathered for a whole pass, for
              the output layer computes its float32 gradient by hand, chunk by chunk
    replicas  a vision tower that is frozen: whole on every rank, which runs it whenever it meets a picture

Zhao et al. 2023 (PyTorch FSDP, arXiv:2304.11277); a gradient is the sum over all ranks, never their mean.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, empty
from transformers import PreTrainedModel

from tandem.config.training import FsdpTrainingConfig
from tandem.errors import UserError
from tandem.models.classes import is_picture_model
from tandem.models.loading import quiet_transformers
from tandem.models.tower import is_frozen, tower_of
from tandem.regions import Region, chunk, whole
from tandem.training.dtensor_parts import full_tensor, local_shard

T = TypeVar("T")


class Whole:
    """All of the model on the one rank that there is."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = self.home = model.device
        """Where the model computes, and where its parameters are when they are not offloaded."""
        self.dtype = model.dtype
        """Of forward passes."""
        self.rank, self.ranks = 0, 1
        """This rank, and how many there are."""

    def gathered(self) -> AbstractContextManager[None]:
        """For the length of a pass: the output layer is usable. On leaving, its gradient goes to the parameters."""
        return nullcontext()

    def largest(self, own: int) -> int:
        """The largest number that a rank calls this with; every rank calls it."""
        return own

    def starts(self, last: bool) -> None:
        """Called before each micro-batch's backward pass."""

    def of_all_ranks(self, own: T) -> list[T]:
        """What each rank calls this with; every rank calls it."""
        return [own]

    def full(self, parameter: Tensor) -> Tensor:
        """Whole, on `device`, in `dtype`; every rank calls it."""
        return parameter.detach()

    def local(self, parameter: Tensor) -> Tensor:
        """What this rank holds of it, where and as it is."""
        return parameter.detach()

    def region(self, parameter: Tensor) -> Region:
        """Which part `local` is."""
        return whole(tuple(parameter.shape))

    def served_dtype(self, parameter: Tensor) -> torch.dtype:
        """That of `full`."""
        return parameter.dtype

    def offload(self) -> None:
        """Move the model to host memory, pinned, where it is once the device has been waited for."""
        nn.Module.to(self.model, "cpu", non_blocking=True)

    def onload(self) -> None:
        """Bring the model back to where it is when it is not offloaded."""
        nn.Module.to(self.model, self.home, non_blocking=True)

    def describe(self, directory: Path) -> None:
        """Write all of a Hugging Face directory but its weights."""
        with quiet_transformers():
            self.model.save_pretrained(directory, state_dict={})


class Sharded(Whole):
    """Shards over `training.shard_size` ranks (default: all), replicas beyond. The model comes on the meta device."""

    def __init__(self, model: PreTrainedModel, training: FsdpTrainingConfig) -> None:
        cuda = torch.cuda.is_available()
        self.model = model
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dtype = model.dtype
        learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._once = training.sums_gradients_once(learning)
        ranks, size = dist.get_world_size(), training.shard_size or dist.get_world_size()
        if ranks % size:
            raise UserError(f"training.shard_size: {ranks} ranks cannot be cut into groups of {size}; use a divisor")
        shape = {"shards": size} if ranks == size else {"replicas": ranks // size, "shards": size}
        self._mesh = init_device_mesh(self.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        self._placements = [Replicate()] * (len(shape) - 1) + [Shard(0)]
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()  # the shards are the masters
        self._outside = _places(model)
        self._replicated = _replicated(model)
        self._shard_body(training.cpu_offload)
        self.home = torch.device("cpu") if training.cpu_offload else self.device
        self._shard_outside()
        model.to_empty(device=self.home)
        self._settle()

    @property
    def _body(self) -> Any:
        return self.model.base_model

    def _shard_body(self, cpu_offload: bool) -> None:
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if cpu_offload else OffloadPolicy()
        how: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32),
            "offload_policy": offload,
        }
        layers = self.model._no_split_modules or ()
        for module in self._body.modules():
            if type(module).__name__ in layers and self._replicated.isdisjoint(module.parameters()):
                fully_shard(module, **how)
        fully_shard(self._body, ignored_params={*self._outside, *self._replicated}, **how)
        for module in self._body.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def _shard_outside(self) -> None:
        """Replace each parameter by its shards."""
        for parameter, places in self._outside.items():
            how: dict[str, Any] = {"dtype": parameter.dtype, "device_mesh": self._mesh, "placements": self._placements}
            _register(places, nn.Parameter(empty(*parameter.shape, **how), requires_grad=parameter.requires_grad))
        self._outside = _places(self.model)

    def _settle(self) -> None:
        """What has no shards is where it computes, wherever the shards are."""
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        for parameter in self.model.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(self.device)

    def offload(self) -> None:
        nn.Module.to(self.model, "cpu")  # FSDP2 copies a shard that is smaller than others at once: it has to be there

    def onload(self) -> None:
        super().onload()
        self._settle()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        whole: dict[nn.Parameter, nn.Parameter] = {}
        for shards, places in self._outside.items():
            whole[shards] = nn.Parameter(self.full(shards), requires_grad=shards.requires_grad)
            whole[shards].grad_dtype = torch.float32
            _register(places, whole[shards])
        try:
            yield
        finally:
            self._body.reshard()
            for shards, places in self._outside.items():
                _register(places, shards)
        if torch.is_grad_enabled():
            for shards, parameter in whole.items():
                if shards.requires_grad:
                    self._reduce(shards, parameter)

    def _reduce(self, shards: nn.Parameter, parameter: nn.Parameter) -> None:
        """Add the sum of all ranks' gradients of `parameter` to that of the shards."""
        gradient = torch.zeros_like(parameter, dtype=torch.float32) if parameter.grad is None else parameter.grad
        summed = DTensor.from_local(gradient, self._mesh, [Partial()] * self._mesh.ndim)
        part = summed.redistribute(placements=self._placements).to(shards.device)
        shards.grad = part if shards.grad is None else shards.grad + part

    def largest(self, own: int) -> int:
        largest = torch.tensor(own, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def starts(self, last: bool) -> None:
        self._body.set_requires_gradient_sync(last or not self._once)
        self._body.set_requires_all_reduce(last)

    def of_all_ranks(self, own: T) -> list[T]:
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, own)
        return everyone

    def full(self, parameter: Tensor) -> Tensor:
        return full_tensor(parameter.detach().to(self.device, self.dtype))

    def local(self, parameter: Tensor) -> Tensor:
        return local_shard(parameter.detach())

    def region(self, parameter: Tensor) -> Region:
        everything = whole(tuple(parameter.shape))
        if not isinstance(parameter, DTensor):
            return everything
        return chunk(everything, 0, self._mesh["shards"].size(), self._mesh.get_local_rank("shards"))

    def served_dtype(self, parameter: Tensor) -> torch.dtype:
        return self.dtype

    def describe(self, directory: Path) -> None:
        super().describe(directory)
        self.model.config.dtype = self.dtype  # not that of the shards
        self.model.config.save_pretrained(directory)


Places = list[tuple[nn.Module, str]]


def _places(model: PreTrainedModel) -> dict[nn.Parameter, Places]:
    """The parameters that are not the body's alone, and every module and name under which each stands."""
    outside = [p for child in model.children() if child is not model.base_model for p in child.parameters()]
    places: dict[nn.Parameter, Places] = {parameter: [] for parameter in outside}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in places:
                places[parameter].append((module, name))
    return places


def _replicated(model: PreTrainedModel) -> set[nn.Parameter]:
    """Those of a frozen vision tower: ranks meet other pictures than one another, at other times."""
    if not is_picture_model(model.config) or not is_frozen(tower_of(model)):
        return set()
    return set(tower_of(model).parameters())


def _register(places: Places, parameter: nn.Parameter) -> None:
    for module, name in places:
        setattr(module, name, parameter)
