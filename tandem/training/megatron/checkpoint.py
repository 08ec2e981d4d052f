"""Megatron's distributed checkpoint of the optimizer, which loads at other degrees, and the Hugging Face directory."""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tandem.errors import UserError
from tandem.models.directory import by_layer, model_file, write_index
from tandem.models.storage import TensorFile
from tandem.training.megatron.bridge_model import Bridged, Stage
from tandem.training.megatron.optimizer import ShardedAdamW


def save_model(bridged: Bridged, stages: Sequence[Stage], directory: Path) -> list[TensorFile]:
    """Begin a Hugging Face directory: the file of the weights that this rank writes, if any. Every rank calls it.

    All ranks gather one weight at a time; the copy of a layer is kept by one of them, in turn.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own: dict[str, Tensor] = {}
    for number, layer in enumerate(by_layer(bridged.export(stages))):
        if number % ranks == rank:
            own |= {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in layer.items()}
    if rank == 0:
        directory.mkdir(exist_ok=True)
        bridged.save_config(directory)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, ([*own], sum(weight.nbytes for weight in own.values())))
    names = [theirs for theirs, _ in everyone if theirs]
    if rank == 0:
        write_index(directory, names, sum(size for _, size in everyone))
    return [TensorFile(model_file(directory, rank, len(names)), own)] if own else []


def save_state(optimizer: ShardedAdamW, stages: Sequence[Stage], directory: Path) -> None:
    """Masters and moments, each rank its own part, at once: Megatron-Core reads them where they are."""
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
