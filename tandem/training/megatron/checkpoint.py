"""Megatron's distributed checkpoint of the optimizer, which loads at other degrees, and the Hugging Face directory."""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from tandem.errors import UserError
from tandem.training.megatron.model import Bridged, Stage
from tandem.training.megatron.optimizer import ShardedAdamW


def save_model(bridged: Bridged, stages: Sequence[Stage], directory: Path) -> None:
    """Rank 0 collects in host memory what all ranks gather tensor by tensor, and writes it."""
    writes = dist.get_rank() == 0
    weights = {name: tensor.cpu().clone() if writes else None for name, tensor in bridged.export(stages)}
    if writes:
        directory.mkdir(exist_ok=True)
        bridged.save_config(directory)
        save_torch_state_dict(weights, directory)  # pyright: ignore[reportArgumentType]
    dist.barrier()


def save_state(optimizer: ShardedAdamW, stages: Sequence[Stage], directory: Path) -> None:
    """Masters and moments, each rank its own part."""
    directory.mkdir(exist_ok=True)
    dist_checkpointing.save(_state(optimizer, stages), str(directory))


def load_state(optimizer: ShardedAdamW, stages: Sequence[Stage], directory: Path) -> None:
    """What `save_state` wrote, at these or other degrees; UserError, and nothing changed, when it does not fit."""
    try:
        state: Any = dist_checkpointing.load(_state(optimizer, stages, loading=True), str(directory))
    except (CheckpointException, CheckpointingException, OSError) as error:
        raise UserError(
            f"{directory} is not a training state of this model ({str(error).splitlines()[-1]}); "
            "resume from another checkpoint, or with the model that the run was started with"
        ) from error
    if state["optimizers"] != len(optimizer.optimizer.chained_optimizers):
        raise UserError(
            f"{directory} was saved {'with' if state['optimizers'] > 1 else 'without'} training.expert_parallel, "
            "and the optimizer's part of spread experts cannot be put together; resume so, too"
        )
    optimizer.load(state["optimizer"], state["steps"])


def _state(optimizer: ShardedAdamW, stages: Sequence[Stage], loading: bool = False) -> dict[str, Any]:
    metadata: Any = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    names = ["model"] if len(stages) == 1 else [f"model{number}" for number in range(len(stages))]
    model = {name: stage.sharded_state_dict(metadata=metadata) for name, stage in zip(names, stages, strict=True)}
    if len(stages) == 1:
        model = model["model"]
    return {
        "optimizer": optimizer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata),
        "optimizers": len(optimizer.optimizer.chained_optimizers),
        "steps": optimizer.steps,
    }
