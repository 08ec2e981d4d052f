"""Roles and resource pools: which roles share processes, and where these run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a worker does in the dataflow; fused names are roles that share their processes."""

    Actor = "actor"
    Rollout = "rollout"
    Critic = "critic"
    RefPolicy = "reference"
    Teacher = "teacher"
    RewardModel = "reward_model"
    Judge = "judge"
    ActorRollout = "actor+rollout"
    ActorRolloutRef = "actor+rollout+reference"

    @property
    def parts(self) -> list["Role"]:
        """The roles that are fused in this one."""
        return [Role(part) for part in self.value.split("+")]


@dataclass(frozen=True)
class ResourcePool:
    """Processes that are placed together: one world of torch.distributed."""

    name: str
    processes_on_nodes: tuple[int, ...]
    """Processes on each node; every one has a GPU of its own where there are any."""

    @property
    def size(self) -> int:
        return sum(self.processes_on_nodes)


class ResourcePoolManager:
    """Pools by role: `ResourcePoolManager({"main": [8, 8]}, {Role.Actor: "main", …})`."""

    def __init__(self, resource_pool_spec: Mapping[str, Sequence[int]], mapping: Mapping[Role, str]) -> None:
        self.pools = {name: ResourcePool(name, tuple(nodes)) for name, nodes in resource_pool_spec.items()}
        self._mapping = {part: pool for role, pool in mapping.items() for part in role.parts}

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """KeyError for a role without a pool."""
        return self.pools[self._mapping[role]]
