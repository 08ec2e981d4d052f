"""Tandem: reinforcement-learning post-training for language models.

What a program imports from here; everything else may change without notice.

    import tandem

    config = tandem.load_config(tandem.TrainConfig, "recipe.yaml", ["trainer.steps=10"])
    run = tandem.train(config)
    print(run.best, run.model)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.algorithms import PolicyGradient as PolicyGradient
    from tandem.algorithms.base import Advantages as Advantages
    from tandem.algorithms.base import Algorithm as Algorithm
    from tandem.algorithms.base import Need as Need
    from tandem.algorithms.base import Rollouts as Rollouts
    from tandem.algorithms.supervised import NextTokenLoss as NextTokenLoss
    from tandem.batching.packing import demonstrations_to_batch as demonstrations_to_batch
    from tandem.batching.packing import to_batch as to_batch
    from tandem.batching.packing import token_shares as token_shares
    from tandem.config.load import load_config as load_config
    from tandem.config.tree import DpoConfig as DpoConfig
    from tandem.config.tree import EvalConfig as EvalConfig
    from tandem.config.tree import RewardModelConfig as RewardModelConfig
    from tandem.config.tree import SftConfig as SftConfig
    from tandem.config.tree import TrainConfig as TrainConfig
    from tandem.controller.pools import ResourcePool as ResourcePool
    from tandem.controller.pools import ResourcePoolManager as ResourcePoolManager
    from tandem.controller.pools import Role as Role
    from tandem.controller.roles import Actor as Actor
    from tandem.controller.roles import Critic as Critic
    from tandem.controller.roles import Policy as Policy
    from tandem.controller.roles import ValueModel as ValueModel
    from tandem.controller.worker_groups import Future as Future
    from tandem.controller.worker_groups import WorkerGroup as WorkerGroup
    from tandem.data.dataset import RLHFDataset as RLHFDataset
    from tandem.data.learning_sampler import Outcome as Outcome
    from tandem.data.learning_sampler import RowSampler as RowSampler
    from tandem.data.own_rows import RowSource as RowSource
    from tandem.errors import CallbackFailed as CallbackFailed
    from tandem.errors import EngineError as EngineError
    from tandem.errors import NoRoomToAnswer as NoRoomToAnswer
    from tandem.errors import RewardShareExceeded as RewardShareExceeded
    from tandem.errors import TandemError as TandemError
    from tandem.errors import UserError as UserError
    from tandem.errors import WorkerError as WorkerError
    from tandem.errors import WorkerLost as WorkerLost
    from tandem.jobs.callbacks import Callback as Callback
    from tandem.jobs.callbacks import RunControl as RunControl
    from tandem.jobs.own_dataflow import Dataflow as Dataflow
    from tandem.jobs.program import run_program as run_program
    from tandem.jobs.ray_trainer import RayPPOTrainer as RayPPOTrainer
    from tandem.jobs.ray_trainer import RayWorkerGroup as RayWorkerGroup
    from tandem.jobs.result import Best as Best
    from tandem.jobs.result import Run as Run
    from tandem.jobs.trainer import Trainer as Trainer
    from tandem.jobs.trainer import train as train
    from tandem.models.loading import load_tokenizer as load_tokenizer
    from tandem.reward.manager import RewardManager as RewardManager
    from tandem.rollout.environment import Answer as Answer
    from tandem.rollout.environment import Environment as Environment
    from tandem.rollout.environment import EnvironmentFailed as EnvironmentFailed
    from tandem.rollout.environment import Reply as Reply
    from tandem.rollout.environment import ToolCall as ToolCall
    from tandem.rollout.formats.for_tokenizer import make_format as make_format
    from tandem.rollout.transcript import Transcript as Transcript
    from tandem.tracking.base import Sample as Sample
    from tandem.tracking.base import TrackedRun as TrackedRun
    from tandem.tracking.base import Tracker as Tracker
    from tandem.types import Batch as Batch
    from tandem.types import Branch as Branch
    from tandem.types import Completion as Completion
    from tandem.types import Demonstration as Demonstration
    from tandem.types import Group as Group
    from tandem.types import Message as Message
    from tandem.types import MicroBatch as MicroBatch
    from tandem.types import Outputs as Outputs
    from tandem.types import Preference as Preference
    from tandem.types import Prompt as Prompt
    from tandem.types import Request as Request
    from tandem.types import SamplingParams as SamplingParams
    from tandem.types import Score as Score
    from tandem.types import Status as Status
    from tandem.types import StepMetrics as StepMetrics
    from tandem.types import TokenColumns as TokenColumns
    from tandem.types import TokenLoss as TokenLoss
    from tandem.types import Trajectory as Trajectory
    from tandem.types import Turn as Turn
    from tandem.workers.host import Worker as Worker
    from tandem.workers.host import WorkerContext as WorkerContext
    from tandem.workers.registration import Arguments as Arguments
    from tandem.workers.registration import Calls as Calls
    from tandem.workers.registration import Dispatch as Dispatch
    from tandem.workers.registration import Mesh as Mesh
    from tandem.workers.registration import OwnDispatch as OwnDispatch
    from tandem.workers.registration import Returns as Returns
    from tandem.workers.registration import register as register
    from tandem.workers.rollout import RolloutRequest as RolloutRequest
    from tandem.workers.rollout import RolloutWorker as RolloutWorker
    from tandem.workers.rollout import seeded_requests as seeded_requests
    from tandem.workers.training import TrainSpec as TrainSpec
    from tandem.workers.training import TrainWorker as TrainWorker

__version__ = "0.1.0"
__all__ = [
    "Actor",
    "Advantages",
    "Algorithm",
    "Answer",
    "Arguments",
    "Batch",
    "Best",
    "Branch",
    "Callback",
    "CallbackFailed",
    "Calls",
    "Completion",
    "Critic",
    "Dataflow",
    "Demonstration",
    "Dispatch",
    "DpoConfig",
    "EngineError",
    "Environment",
    "EnvironmentFailed",
    "EvalConfig",
    "Future",
    "Group",
    "Mesh",
    "Message",
    "MicroBatch",
    "Need",
    "NextTokenLoss",
    "NoRoomToAnswer",
    "Outcome",
    "Outputs",
    "OwnDispatch",
    "Policy",
    "PolicyGradient",
    "Preference",
    "Prompt",
    "RLHFDataset",
    "RayPPOTrainer",
    "RayWorkerGroup",
    "Reply",
    "Request",
    "ResourcePool",
    "ResourcePoolManager",
    "Returns",
    "RewardManager",
    "RewardModelConfig",
    "RewardShareExceeded",
    "Role",
    "RolloutRequest",
    "RolloutWorker",
    "Rollouts",
    "RowSampler",
    "RowSource",
    "Run",
    "RunControl",
    "Sample",
    "SamplingParams",
    "Score",
    "SftConfig",
    "Status",
    "StepMetrics",
    "TandemError",
    "TokenColumns",
    "TokenLoss",
    "ToolCall",
    "TrackedRun",
    "Tracker",
    "TrainConfig",
    "TrainSpec",
    "TrainWorker",
    "Trainer",
    "Trajectory",
    "Transcript",
    "Turn",
    "UserError",
    "ValueModel",
    "Worker",
    "WorkerContext",
    "WorkerError",
    "WorkerGroup",
    "WorkerLost",
    "demonstrations_to_batch",
    "load_config",
    "load_tokenizer",
    "make_format",
    "register",
    "run_program",
    "seeded_requests",
    "to_batch",
    "token_shares",
    "train",
]
_EXPORTS = {
    "algorithms": ("PolicyGradient",),
    "algorithms.base": ("Advantages", "Algorithm", "Need", "Rollouts"),
    "algorithms.supervised": ("NextTokenLoss",),
    "batching.packing": ("demonstrations_to_batch", "to_batch", "token_shares"),
    "config.load": ("load_config",),
    "config.tree": ("DpoConfig", "EvalConfig", "RewardModelConfig", "SftConfig", "TrainConfig"),
    "controller.worker_groups": ("Future", "WorkerGroup"),
    "controller.pools": ("ResourcePool", "ResourcePoolManager", "Role"),
    "controller.roles": ("Actor", "Critic", "Policy", "ValueModel"),
    "data.dataset": ("RLHFDataset",),
    "data.learning_sampler": ("Outcome", "RowSampler"),
    "data.own_rows": ("RowSource",),
    "errors": (
        "CallbackFailed",
        "EngineError",
        "NoRoomToAnswer",
        "RewardShareExceeded",
        "TandemError",
        "UserError",
        "WorkerError",
        "WorkerLost",
    ),
    "jobs.callbacks": ("Callback", "RunControl"),
    "jobs.own_dataflow": ("Dataflow",),
    "jobs.program": ("run_program",),
    "jobs.ray_trainer": ("RayPPOTrainer", "RayWorkerGroup"),
    "jobs.result": ("Best", "Run"),
    "jobs.trainer": ("Trainer", "train"),
    "models.loading": ("load_tokenizer",),
    "reward.manager": ("RewardManager",),
    "rollout.environment": ("Answer", "Environment", "EnvironmentFailed", "Reply", "ToolCall"),
    "rollout.formats.for_tokenizer": ("make_format",),
    "rollout.transcript": ("Transcript",),
    "tracking.base": ("Sample", "TrackedRun", "Tracker"),
    "types": (
        "Batch",
        "Branch",
        "Completion",
        "Demonstration",
        "Group",
        "Message",
        "MicroBatch",
        "Outputs",
        "Preference",
        "Prompt",
        "Request",
        "SamplingParams",
        "Score",
        "Status",
        "StepMetrics",
        "TokenColumns",
        "TokenLoss",
        "Trajectory",
        "Turn",
    ),
    "workers.host": ("Worker", "WorkerContext"),
    "workers.registration": ("Arguments", "Calls", "Dispatch", "Mesh", "OwnDispatch", "Returns", "register"),
    "workers.rollout": ("RolloutRequest", "RolloutWorker", "seeded_requests"),
    "workers.training": ("TrainSpec", "TrainWorker"),
}
"""Public names by the module that defines them."""
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for: the command line answers before torch is loaded."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(import_module(f"tandem.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
