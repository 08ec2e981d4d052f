"""Megatron-Core's distributed optimizer: AdamW on float32 masters, spread over the data-parallel ranks."""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from tandem.config.optimizer import OptimizerConfig
from tandem.errors import EngineError
from tandem.training.optimizer import learning_rate


class ShardedAdamW:
    """The optimizer of all stages of a rank; weight decay is for matrices only."""

    def __init__(
        self, stages: Sequence[DistributedDataParallel], config: OptimizerConfig, total_steps: int, dtype: torch.dtype
    ) -> None:
        self._stages = list(stages)
        self._config = config
        self._total_steps = total_steps
        self.steps = 0
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            use_distributed_optimizer=True,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
        )
        self.optimizer: Any = get_megatron_optimizer(settings, self._stages)
        self._parts: list[Any] = [part for part in self.optimizer.chained_optimizers if part.get_parameters()]
        for part in self._parts:
            part.init_state_fn(part.optimizer)
            if isinstance(part.optimizer, torch.optim.AdamW):  # without TransformerEngine's
                for state in part.optimizer.state.values():
                    state["step"] = torch.zeros(())
        self.forget()

    def step(self) -> dict[str, float]:
        """See TrainEngine.optimizer_step."""
        finalize_model_grads(self._stages)  # pyright: ignore[reportArgumentType]
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not torch.tensor(norm).isfinite():
            raise EngineError(f"optimizer step {self.steps}: gradient norm is {norm}")
        lr = learning_rate(self._config, self.steps, self._total_steps)
        for part in self._parts:
            clip_grad_by_total_norm_fp32(part.get_parameters(), self._config.max_grad_norm, norm)
            for group in part.param_groups:
                group["lr"], group["weight_decay"] = lr, self._config.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self.steps += 1
        self.forget()
        return {"grad_norm": norm, "lr": lr}

    def move(self, device: torch.device) -> None:
        """Moments, and masters that are not the parameters themselves, to `device`."""
        for part in self._parts:
            for state in part.optimizer.state.values():
                state.update({name: state[name].to(device) for name in ("exp_avg", "exp_avg_sq")})
            if self.optimizer.config.bf16:
                for master in part.get_parameters():
                    master.data = master.data.to(device)

    def load(self, state: Any, steps: int) -> None:
        """Continue after `steps` steps; `state`: as `optimizer.state_dict()`, of this rank."""
        self.optimizer.load_state_dict(state)
        self.steps = steps

    def forget(self) -> None:
        """Zero the gradients."""
        for stage in self._stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
