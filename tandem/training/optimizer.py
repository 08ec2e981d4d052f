"""AdamW on float32 master weights: gradients in, parameters moved."""

import math
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tandem.config.algorithms import OptimizerConfig
from tandem.errors import EngineError, UserError
from tandem.models.storage import read_shards, write_shards


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (0 is the first) of `total_steps`.

    Warm-up over W steps: lr * (step + 1) / W, so that step W - 1 is the first at full rate. From there to the last
    step, the share p of the way: linear 1 - p, cosine (1 + cos(pi p)) / 2, both scaled to end at min_lr_ratio.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    peak = max(config.warmup_steps - 1, 0)
    share = min(1.0, (step - peak) / max(1, total_steps - 1 - peak))
    height = 1 - share if config.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


class MasterAdamW:
    """A float32 parameter is its own master; any other has a float32 copy. Gradients are float32 throughout.

    Weight decay is for matrices (two dimensions or more), not for biases and norms. A parameter that got no gradient
    counts as one with gradient zero, so a step means the same however its rows were cut or left out.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int, cpu_offload: bool = False) -> None:
        self._config = config
        self._total_steps = total_steps
        self._schedule_step = torch.zeros((), dtype=torch.int64)
        """Steps since the schedule began: those of AdamW, but for a run that took over another one's optimizer."""
        self._stays_on_cpu = cpu_offload
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: _master(parameter, cpu_offload) for name, parameter in self._parameters.items()}
        matrices = [master for master in self.masters.values() if master.ndim >= 2]
        others = [master for master in self.masters.values() if master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        # Of torch's three CPU implementations the fused one is three times faster than the next on a small model.
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        for master in self.masters.values():
            moments = {name: torch.zeros_like(master.detach()) for name in ("exp_avg", "exp_avg_sq")}
            self._adamw.state[master] = {"step": torch.zeros((), device=master.device), **moments}

    def step(self) -> dict[str, float]:
        """Clip by the global norm, step, forget the gradients; see TrainEngine.optimizer_step."""
        step = int(self._schedule_step)
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            master = self.masters[name]
            gradient = torch.zeros_like(master) if parameter.grad is None else parameter.grad
            master.grad = gradients[name] = gradient.to(master.device)
        norm = _whole(nn.utils.get_total_norm(gradients.values()))
        if not norm.isfinite():
            bad = next(
                (name for name, gradient in gradients.items() if not _whole(gradient.isfinite().all())), "their sum"
            )
            raise EngineError(f"optimizer step {step}: gradient norm is {norm.item()}; not finite first in {bad}")
        nn.utils.clip_grads_with_norm_(self.masters.values(), self._config.max_grad_norm, norm)
        lr = learning_rate(self._config, step, self._total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._schedule_step += 1
        self._publish()
        return {"grad_norm": norm.item(), "lr": lr}

    def move(self, device: torch.device) -> None:
        """Masters and moments to `device`, unless their place is the CPU; the masters stay the same objects."""
        if self._stays_on_cpu:
            return
        for master, state in self._adamw.state.items():
            master.data = master.data.to(device)
            state.update({name: tensor.to(device) for name, tensor in state.items()})

    def save(self, directory: Path) -> None:
        write_shards(self._state(), directory)

    def load(self, directory: Path, new_schedule: bool = False) -> None:
        """Restore what `save` wrote, into the same tensors; UserError, and nothing changed, when it does not fit.

        With `new_schedule` the learning rate's schedule begins anew.
        """
        try:
            read_shards(self._state(), directory)
        except (OSError, EOFError, RuntimeError, UnpicklingError, ValueError) as error:
            raise UserError(
                f"{directory} is not a training state of this model ({error}); "
                "resume from another checkpoint, or with the model that the run was started with"
            ) from error
        if new_schedule:
            self._schedule_step.zero_()
        self._publish()

    def _state(self) -> dict[str, torch.Tensor]:
        """Masters, moments and numbers of steps by parameter name, and the place in the schedule; not copies."""
        tensors = {"schedule_step": self._schedule_step}
        for name, master in self.masters.items():
            kinds = {"master": master.detach(), **self._adamw.state[master]}
            tensors |= {f"{kind}.{name}": tensor for kind, tensor in kinds.items()}
        return tensors

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters into the parameters that are copies of them, and forget the gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self.masters[name].grad = None
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])


def _master(parameter: nn.Parameter, on_cpu: bool) -> nn.Parameter:
    if parameter.dtype == torch.float32 and (parameter.device.type == "cpu" or not on_cpu):
        return parameter
    parameter.grad_dtype = torch.float32
    return nn.Parameter(parameter.detach().float().to("cpu" if on_cpu else parameter.device))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
