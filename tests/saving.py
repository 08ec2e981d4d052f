"""What an engine saves, written before anything goes on, by all its ranks."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tandem.training.base import TrainEngine


def save(engine: TrainEngine, directory: Path) -> None:
    for file in engine.save(directory):
        file.write()
    if dist.is_initialized():
        dist.barrier()
