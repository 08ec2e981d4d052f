"""The order in which engine and models leave the devices and return to them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tandem.cluster.inline import InlineCluster
from tandem.config.generation import (
    GenerationConfig,
    NativeGenerationConfig,
    VllmGenerationConfig,
    default_memory_share,
)
from tandem.controller.assembly import turns_of
from tandem.controller.pools import ResourcePool, Role
from tandem.controller.timesharing import DeviceTurns, SleepPhase, TimeSharing
from tandem.controller.worker_groups import WorkerGroup
from tandem.planning.phases import _ELSEWHERE, LoopPhase
from tandem.workers.host import Worker
from tandem.workers.registration import Dispatch, register


class Diary(Worker[list[str]]):
    """Writes down what it is told."""

    def _note(self, what: str) -> None:
        self.spec.append(f"{self.context.name} {what}")

    @register(Dispatch.REPLICATED)
    def sleep(self) -> None:
        self._note("sleeps")

    @register(Dispatch.REPLICATED)
    def wake(self) -> None:
        self._note("wakes")

    @register(Dispatch.REPLICATED)
    def offload(self) -> None:
        self._note("leaves")

    @register(Dispatch.REPLICATED)
    def onload(self) -> None:
        self._note("returns")


BOTH: frozenset[SleepPhase] = frozenset(("scoring", "training"))


def shared_devices(written: list[str], *models: str, engine: frozenset[SleepPhase] = BOTH) -> TimeSharing:
    """`models`: those that take turns; `engine`: the phases in which it sleeps."""
    ranks = InlineCluster().spawn(ResourcePool("main", (1,)))
    rollout = WorkerGroup(ranks, "rollout", Diary, written)
    turns = DeviceTurns(engine, **{name: WorkerGroup(ranks, name, Diary, written) for name in models})
    turns.make_room()
    assert written == [f"{name} leaves" for name in ORDER if name in models]
    devices = TimeSharing(rollout, lambda version: written.append(f"weights {version}"), turns)
    written.clear()
    devices.publish(0)
    assert written == ["weights 0"], "the engine was made beside models that had left"
    written.clear()
    return devices


ORDER = ("critic", "actor", "reference", "teacher", "reward_model")


def phases(written: list[str], devices: TimeSharing, *names: str) -> list[list[str]]:
    """What moves in each phase, which is announced twice."""
    moved: list[list[str]] = []
    for name in names:
        for _ in range(1 if name == "publish" else 2):
            devices.publish(3) if name == "publish" else getattr(devices, f"to_{name}")()
        moved.append(list(written))
        written.clear()
    return moved


STEP = ("generation", "scoring", "preparation", "update", "publish", "generation")
TABLE = {
    "all share": (
        ORDER,
        [
            [],
            ["rollout sleeps", "reward_model returns"],
            ["reward_model leaves", "actor returns", "critic returns", "reference returns",
             "teacher returns"],
            ["reference leaves", "teacher leaves"],
            ["critic leaves", "weights 3", "actor leaves", "rollout wakes"],
            [],
        ],
    ),
    "actor and critic": (
        ("actor", "critic"),
        [[], [], ["rollout sleeps", "actor returns", "critic returns"], [],
         ["critic leaves", "weights 3", "actor leaves", "rollout wakes"], []],
    ),
    "the engine has the actor's parameters": (
        ("reference",),
        [[], [], ["rollout sleeps", "reference returns"], ["reference leaves"], ["weights 3", "rollout wakes"], []],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_room_is_made_before_it_is_taken_and_each_is_there_when_it_computes(case: str) -> None:
    models, moved = TABLE[case]
    written: list[str] = []
    assert phases(written, shared_devices(written, *models), *STEP) == moved


def test_planning_counts_a_model_in_host_memory_in_the_stages_in_which_it_is_there() -> None:
    written: list[str] = []
    devices = shared_devices(written, *ORDER)
    away, in_stage = set[str](ORDER), dict[str, set[str]]()
    for stage, moves in zip(get_args(LoopPhase), phases(written, devices, *STEP[:-1]), strict=True):
        for name, moved in map(str.split, moves):
            if name == "weights":  # the engine is filled: what leaves afterwards was there in the stage
                in_stage[stage] = set(away)
            elif name != "rollout":
                (away.add if moved == "leaves" else away.remove)(name)
        in_stage.setdefault(stage, set(away))
    assert away == in_stage["generation"]
    for name, stages in _ELSEWHERE.items():
        assert stages == tuple(stage for stage, names in in_stage.items() if name in names), name
    assert set(_ELSEWHERE) == set(ORDER)


def test_engines_with_devices_of_their_own_stay_awake_while_models_share_the_others() -> None:
    written: list[str] = []
    devices = shared_devices(written, "reference", "reward_model", engine=frozenset())
    assert phases(written, devices, *STEP) == [
        [],
        ["reward_model returns"],
        ["reward_model leaves", "reference returns"],
        ["reference leaves"],
        ["weights 3"],
        [],
    ]


def test_engines_sleep_in_the_phases_alone_in_which_models_share_their_devices() -> None:
    """A reward model's devices are theirs, or those of a critic; the actor has others, or theirs."""
    written: list[str] = []
    beside_judge = shared_devices(written, "reward_model", engine=frozenset({"scoring"}))
    assert phases(written, beside_judge, *STEP) == [
        [],
        ["rollout sleeps", "reward_model returns"],
        ["reward_model leaves", "rollout wakes"],
        [],
        ["weights 3"],
        [],
    ]
    beside_actor = shared_devices(written, "actor", "reward_model", engine=frozenset({"training"}))
    assert phases(written, beside_actor, "scoring", "generation", "scoring", "preparation") == [
        ["reward_model returns"],
        ["reward_model leaves"],
        ["reward_model returns"],
        ["rollout sleeps", "reward_model leaves", "actor returns"],
    ]


def test_a_further_round_of_prompts_follows_a_scoring() -> None:
    written: list[str] = []
    devices = shared_devices(written, "actor", "reward_model")
    assert phases(written, devices, "scoring", "generation", "scoring", "preparation") == [
        ["rollout sleeps", "reward_model returns"],
        ["reward_model leaves", "rollout wakes"],
        ["rollout sleeps", "reward_model returns"],
        ["reward_model leaves", "actor returns"],
    ]
    with pytest.raises(AssertionError, match="publish first"):
        devices.to_generation()


class Placed:
    """Roles by the pool that each is in."""

    def __init__(self, **pools: str) -> None:
        self._pools = {role: pool for pool, roles in pools.items() for role in roles.split()}

    def together(self, *roles: Role) -> bool:
        return len({self._pools[role] for role in roles}) == 1


EVERYONE = (Role.Actor, Role.Critic, Role.RefPolicy, Role.RewardModel)
SPLIT = {"training": "actor critic reference reward_model", "generation": "rollout"}
JUDGED = {"training": "actor critic", "generation": "rollout reward_model", "third": "reference"}
CRITICS = {"main": "actor reference rollout", "critics": "critic reward_model"}
VLLM, NATIVE = VllmGenerationConfig(type="vllm"), NativeGenerationConfig()
WHO: list[tuple[GenerationConfig, dict[str, str], bool, str]] = [
    (VLLM, {"main": "actor critic reference reward_model rollout"}, True,
     "scoring training actor critic reference reward_model"),
    (NATIVE, {"main": "actor critic reference reward_model rollout"}, True,
     "scoring training critic reference reward_model"),
    (NATIVE, {"main": "actor critic reference reward_model rollout"}, False,
     "scoring training actor critic reference reward_model"),
    (VLLM, SPLIT, True, "reference reward_model"),
    (NATIVE, SPLIT, True, "reference reward_model"),
    (VLLM, JUDGED, True, "scoring reward_model"),
    (VLLM, CRITICS, True, "training actor reference reward_model"),
    (VLLM.model_copy(update={"sleep": "never"}), {"main": "actor critic reference reward_model rollout"}, True,
     "reference reward_model"),
    (VLLM.model_copy(update={"sleep": "never"}), JUDGED, True, ""),
]  # fmt: skip


@pytest.mark.parametrize(("generation", "pools", "whole", "wanted"), WHO)
def test_who_takes_turns_follows_from_who_shares_devices(
    generation: GenerationConfig, pools: dict[str, str], whole: bool, wanted: str
) -> None:
    models: Any = {role: role.value for role in EVERYONE}
    placed: Any = Placed(**pools)
    turns = turns_of(generation, placed, models, whole)
    found = [getattr(turns, name) for name in ORDER if getattr(turns, name)]
    assert {*turns.engine, *found} == {*wanted.split()}
    assert {turns_of(generation, placed, {}, whole), turns_of(VLLM, placed, {})} == {DeviceTurns()}


def test_a_gpu_is_shared_by_how_long_models_stay_on_it() -> None:
    shares = [default_memory_share(beside, turns) for beside, turns in ((True, False), (True, True), (False, False))]
    assert shares == [0.4, 0.8, 0.9]
    with pytest.raises(ValidationError, match=r"memory_share is what engine_args.gpu_memory_utilization says"):
        VllmGenerationConfig(type="vllm", memory_share=0.5, engine_args={"gpu_memory_utilization": 0.5})
    for share in (0, 1, 1.5):
        with pytest.raises(ValidationError):
            VllmGenerationConfig(type="vllm", memory_share=share)
