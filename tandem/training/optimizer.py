"""Optimizers on float32 master weights: gradients in, parameters moved."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from tandem.config.optimizer import OptimizerConfig
from tandem.errors import EngineError, UserError
from tandem.models.storage import TensorFile, own_pieces, read_shards, shard_file
from tandem.training.copies import HostCopies
from tandem.training.dtensor_parts import full_tensor, local_shard, shards_of

_NUMBERS_AT_ONCE = 2**26
"""Of parameters whose state visits the device together: at most 768 MiB, where no single parameter has more."""


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (0 is the first) of `total_steps`.

    Warm-up over W steps: lr * (step + 1) / W, so that step W - 1 is the first at full rate. From there the share p of
    the way to the step after the last one: linear 1 - p, cosine (1 + cos(pi p)) / 2, both scaled to end at
    min_lr_ratio. So the last step still learns, as with the schedules of transformers.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    peak = max(config.warmup_steps - 1, 0)
    share = min(1.0, (step - peak) / max(1, total_steps - peak))
    height = 1 - share if config.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


class MasterOptimizer:
    """A float32 parameter is its own master; any other has a float32 copy. Gradients are float32 throughout.

    Weight decay is for matrices (two dimensions or more), not for biases and norms. A parameter that got no gradient
    counts as one with gradient zero, so a step means the same however its rows were cut or left out.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        cpu_offload: bool = False,
        state_offload: bool = False,
    ) -> None:
        """`cpu_offload`: masters and moments are in host memory, and so is the step. `state_offload`: moments, and
        masters that are copies, are in host memory, and visit the parameters' device for the step, some at a time."""
        self._config = config
        self._total_steps = total_steps
        self._schedule_step = torch.zeros((), dtype=torch.int64)
        """Steps since the schedule began: those of AdamW, but for a run that took over another one's optimizer."""
        self._visits = state_offload
        self._stays_on_cpu = cpu_offload or state_offload
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: _master(parameter, cpu_offload) for name, parameter in self._parameters.items()}
        chosen = config.moves(model)
        moved = [master for name, master in self.masters.items() if self._parameters[name] in chosen]
        self._optimizers = [*([config.make(moved)] if moved else []), self._adamw(moved)]
        self._kept = {p: optimizer.state[p] for optimizer in self._optimizers for p in optimizer.state}
        """What the optimizers keep of each master."""
        if state_offload:
            for name in self.masters:
                self._put(name, {kind: tensor.to("cpu") for kind, tensor in self._state_of(name).items()})
        self._together = list(_cut(self._parameters, _NUMBERS_AT_ONCE)) if state_offload else [list(self._parameters)]

    def _adamw(self, others: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Of the masters that the optimizer of the chosen type does not move."""
        config, elsewhere = self._config, set(others)
        mine = [master for master in self.masters.values() if master not in elsewhere]
        groups = [
            {"params": [master for master in mine if master.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [master for master in mine if master.ndim < 2], "weight_decay": 0.0},
        ]
        # Of torch's three CPU implementations the fused one is three times faster than the next on a small model.
        adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        for master in mine:
            moments = {kind: torch.zeros_like(master.detach()) for kind in ("exp_avg", "exp_avg_sq")}
            adamw.state[master] = {"step": torch.zeros((), device=master.device), **moments}
        return adamw

    def _set_rates(self, lr: float) -> None:
        for optimizer in self._optimizers:
            own = self._config.lr_of_others if optimizer is self._optimizers[-1] else None
            for group in optimizer.param_groups:
                group["lr"] = lr if own is None else lr * own / self._config.lr

    def step(self) -> dict[str, float]:
        """Clip by the global norm, step, forget the gradients; see TrainEngine.optimizer_step."""
        step = int(self._schedule_step)
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=self.masters[name].dtype)
        gradients = {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}
        norm = full_tensor(nn.utils.get_total_norm(gradients.values()))
        if not norm.isfinite():
            bad = (name for name, gradient in gradients.items() if not full_tensor(gradient.isfinite().all()))
            first = next(bad, "their sum")
            raise EngineError(
                f"optimizer step {step}: gradient norm is {norm.item()}; not finite first in {first}. The loss or the "
                f"weights are no finite numbers: mostly the learning rate is too high ({self._config.lr:g})"
            )
        nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.max_grad_norm, norm)
        lr = learning_rate(self._config, step, self._total_steps)
        self._set_rates(lr)
        for parameter in self._parameters.values():  # which may be a master
            parameter.grad = None
        for names in self._together:
            with self._visit(names) if self._visits else nullcontext():
                for name in names:
                    self.masters[name].grad = gradients.pop(name).to(self.masters[name].device)
                for optimizer in self._optimizers:
                    optimizer.step()  # passes masters without gradient by
                self._round_into_parameters(names)
        self._schedule_step += 1
        return {"grad_norm": norm.item(), "lr": lr}

    def check_finite(self) -> None:
        """Raises EngineError where one of this rank's weights is not finite: a checkpoint of it would be of no use."""
        for name, master in self.masters.items():
            if not local_shard(master.detach()).isfinite().all():
                raise EngineError(
                    f"after optimizer step {int(self._schedule_step) - 1}: weights of {name} are no finite numbers, "
                    f"and are not saved: mostly the learning rate is too high ({self._config.lr:g}). The last "
                    "checkpoint is one of before"
                )

    @contextmanager
    def _visit(self, names: Sequence[str]) -> Iterator[None]:
        """The state of these parameters is where they are; afterwards it is in its place in host memory again."""
        homes = {name: self._state_of(name) for name in names}
        for name, home in homes.items():
            device = self._parameters[name].device
            self._put(name, {kind: tensor.to(device, copy=True) for kind, tensor in home.items()})
        yield
        for name, home in homes.items():
            for kind, tensor in self._state_of(name).items():
                home[kind].copy_(tensor)
            self._put(name, home)

    def _state_of(self, name: str) -> dict[str, Tensor]:
        """What a parameter has besides itself."""
        master = self.masters[name]
        copied = {} if master is self._parameters[name] else {"master": master.data}
        return {**self._kept[master], **copied}

    def _put(self, name: str, state: dict[str, Tensor]) -> None:
        """Let these tensors be the parameter's state; the master stays the same object."""
        master = self.masters[name]
        if "master" in state:
            master.data = state["master"]
        self._kept[master].update({kind: tensor for kind, tensor in state.items() if kind != "master"})

    def move(self, device: torch.device) -> None:
        """Masters and moments to `device`, unless their place is host memory; the masters stay the same objects. On the
        way to a host nothing is there before the device has been waited for."""
        if self._stays_on_cpu:
            return
        for master, state in self._kept.items():
            master.data = master.data.to(device, non_blocking=True)
            state.update({name: tensor.to(device, non_blocking=True) for name, tensor in state.items()})

    def save(self, directory: Path, copies: HostCopies) -> TensorFile:
        """This rank's file of the state, from copies."""
        directory.mkdir(exist_ok=True)
        own = own_pieces(self._state()).items()
        copied = {name: (copies.copy(f"state.{name}", tensor), piece) for name, (tensor, piece) in own}
        return shard_file(copied, directory)

    def load(self, directory: Path, new_schedule: bool = False) -> None:
        """Restore what `save` wrote, into the same tensors; UserError, and nothing changed, when it does not fit.

        With `new_schedule` the learning rate's schedule begins anew.
        """
        read_whole_state(self._state(), directory)
        if new_schedule:
            self._schedule_step.zero_()
        self._round_into_parameters(list(self._parameters))

    def _state(self) -> dict[str, Tensor]:
        """Masters and what is kept of each by parameter name, and the place in the schedule; not copies."""
        tensors = {"schedule_step": self._schedule_step}
        for name, master in self.masters.items():
            kinds = {"master": master.detach(), **self._kept[master]}
            tensors |= {f"{kind}.{name}": tensor for kind, tensor in kinds.items()}
        return tensors

    @torch.no_grad()
    def _round_into_parameters(self, names: Sequence[str]) -> None:
        """Round the masters into the parameters that they are copies of, and forget their gradients."""
        for name in names:
            parameter = self._parameters[name]
            parameter.grad = self.masters[name].grad = None
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])


def read_whole_state(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Fill the tensors from a directory's `shard_file`s. UserError, and nothing changed, when they do not fit."""
    try:
        read_shards(tensors, directory)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory} is not a training state of this model ({error}); "
            "resume from another checkpoint, or with the model and optimizer that the run was started with"
        ) from error


def _master(parameter: nn.Parameter, on_cpu: bool) -> nn.Parameter:
    if parameter.dtype == torch.float32 and (parameter.device.type == "cpu" or not on_cpu):
        return parameter
    parameter.grad_dtype = torch.float32
    return nn.Parameter(parameter.detach().float().to("cpu" if on_cpu else parameter.device))


def _cut(parameters: Mapping[str, nn.Parameter], numbers: int) -> Iterator[list[str]]:
    """Names side by side whose parameters have at most so many numbers on a rank, and the same names on every rank, for
    ranks step together; at least one name each."""
    names: list[str] = []
    total = 0
    for name, parameter in parameters.items():
        size = _largest_part(parameter)
        if names and total + size > numbers:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


def _largest_part(parameter: nn.Parameter) -> int:
    """Numbers of it on the rank that holds the most of its rows: the first ranks have as many, the last ones fewer."""
    return -(-parameter.shape[0] // shards_of(parameter)) * parameter.shape[1:].numel() if parameter.ndim else 1
