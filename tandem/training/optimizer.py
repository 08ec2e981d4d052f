"""AdamW on float32 master weights: gradients in, parameters moved."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tandem.config.tree import OptimizerConfig
from tandem.errors import EngineError, UserError

TENSORS, SCALARS = "optimizer.safetensors", "optimizer.json"
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


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
    """A float32 parameter is its own master; any other has a float32 copy, which also gathers its gradients.

    Weight decay is for matrices (two dimensions or more), not for biases and norms. A parameter that got no gradient
    counts as one with gradient zero, so a step means the same however its rows were cut or left out.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: self._master(parameter) for name, parameter in self.parameters.items()}
        self._master_of = {parameter: self.masters[name] for name, parameter in self.parameters.items()}
        decays = {True: config.weight_decay, False: 0.0}
        groups = [
            {"params": [m for m in self.masters.values() if (m.ndim >= 2) == matrices], "weight_decay": decay}
            for matrices, decay in decays.items()
        ]
        # Of torch's three CPU implementations the fused one is three times faster than the next on a small model.
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Where the gradient of `parameter` is gathered, float32; None when it is frozen."""
        master = self._master_of.get(parameter)  # type: ignore[call-overload]
        if master is not None and master.grad is None:
            master.grad = torch.zeros_like(master)
        return None if master is None else master.grad

    def step(self) -> dict[str, float]:
        """Clip by the global norm, step, forget the gradients; see TrainEngine.optimizer_step."""
        gradients = {name: self.gradient_of(parameter) for name, parameter in self.parameters.items()}
        norm = torch.nn.utils.get_total_norm([g for g in gradients.values() if g is not None])
        if not norm.isfinite():
            bad = next((name for name, g in gradients.items() if g is not None and not g.isfinite().all()), "their sum")
            raise EngineError(f"optimizer step {self.steps}: gradient norm is {norm.item()}; not finite first in {bad}")
        masters = list(self.masters.values())
        if norm > self.config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(masters, self.config.max_grad_norm, norm)
        lr = learning_rate(self.config, self.steps, self.total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad()
        self._publish()
        self.steps += 1
        return {"grad_norm": norm.item(), "lr": lr}

    def move(self, device: torch.device) -> None:
        """Masters, gradients and moments to `device`; the masters stay the same objects."""
        for master in self.masters.values():
            gradient, master.grad = master.grad, None
            master.data = master.data.to(device)
            master.grad = None if gradient is None else gradient.to(device)
            state = self._adamw.state[master]
            state.update({name: state[name].to(device) for name in MOMENTS if name in state})

    def save(self, directory: Path) -> None:
        """`optimizer.safetensors` (masters and moments by parameter name) and `optimizer.json`."""
        tensors = {f"{MASTER}.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            state = self._adamw.state[master]
            tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS if moment in state}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / TENSORS)
        (directory / SCALARS).write_text(json.dumps({"optimizer_steps": self.steps}), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, into the same tensors; UserError when it is of another model."""
        path = directory / TENSORS
        try:
            steps = int(json.loads((directory / SCALARS).read_text(encoding="utf-8"))["optimizer_steps"])
            with safe_open(str(path), framework="pt") as file:
                kinds = (MASTER, *MOMENTS) if steps else (MASTER,)
                wanted = {f"{kind}.{n}": list(m.shape) for kind in kinds for n, m in self.masters.items()}
                names: list[str] = file.keys()
                _check_fit(path, wanted, {name: file.get_slice(name).get_shape() for name in names})
                for name, master in self.masters.items():
                    with torch.no_grad():
                        master.copy_(file.get_tensor(f"{MASTER}.{name}"))
                    master.grad = None
                    self._adamw.state[master] = self._moments(file, name, steps, master.device)
        except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
            raise UserError(f"{directory}: not a readable training state ({error}); resume from another one") from error
        self._publish()
        self.steps = steps

    @staticmethod
    def _moments(file: safe_open, name: str, steps: int, device: torch.device) -> dict[str, torch.Tensor]:
        if steps == 0:
            return {}
        moments = {kind: file.get_tensor(f"{kind}.{name}").to(device) for kind in MOMENTS}
        return {"step": torch.tensor(float(steps), device=device), **moments}

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype == torch.float32:
            return parameter
        master = nn.Parameter(parameter.detach().float())

        def gather(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(gather)
        return master

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters into the parameters that are copies of them."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])


def _check_fit(path: Path, wanted: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    for name in sorted(wanted.keys() | found.keys()):
        ours, theirs = wanted.get(name), found.get(name)
        if ours != theirs:
            raise UserError(
                f"{path} is of another model: {name} is {theirs or 'absent'} there and {ours or 'absent'} here; "
                "resume with the model that the run was started with"
            )
