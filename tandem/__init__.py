"""Tandem: reinforcement-learning post-training for language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.controller.groups import WorkerGroup as WorkerGroup
    from tandem.controller.pools import ResourcePool as ResourcePool
    from tandem.controller.pools import ResourcePoolManager as ResourcePoolManager
    from tandem.controller.pools import Role as Role
    from tandem.data.dataset import RLHFDataset as RLHFDataset
    from tandem.jobs.ray_trainer import RayPPOTrainer as RayPPOTrainer
    from tandem.jobs.ray_trainer import RayWorkerGroup as RayWorkerGroup
    from tandem.reward.manager import RewardManager as RewardManager
    from tandem.workers.host import Worker as Worker
    from tandem.workers.registration import Dispatch as Dispatch
    from tandem.workers.registration import register as register
    from tandem.workers.rollout import RolloutWorker as RolloutWorker
    from tandem.workers.training import TrainWorker as TrainWorker

__version__ = "0.1.0"
_MODULES = {
    "Dispatch": "workers.registration",
    "RLHFDataset": "data.dataset",
    "RayPPOTrainer": "jobs.ray_trainer",
    "RayWorkerGroup": "jobs.ray_trainer",
    "ResourcePool": "controller.pools",
    "ResourcePoolManager": "controller.pools",
    "RewardManager": "reward.manager",
    "Role": "controller.pools",
    "RolloutWorker": "workers.rollout",
    "TrainWorker": "workers.training",
    "Worker": "workers.host",
    "WorkerGroup": "controller.groups",
    "register": "workers.registration",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for: the command line answers before torch is loaded."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(import_module(f"tandem.{_MODULES[name]}"), name)
