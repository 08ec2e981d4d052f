"""How long a step takes by docs/async.md, and by the real producer in virtual time.

The longest of a step's answers takes 10 s, the other ones 1 s, and training 4 s; engines have room for all of them.
"""

from __future__ import annotations

from random import Random

import pytest

from tandem.controller import rollouts
from tandem.simulation.virtual import VirtualCluster
from tests import schedules

LONGEST_S, TRAINING_S, PROMPTS, STEPS = 10.0, 4.0, 4, 60


def step_s(staleness: int, colocated: str, partial: bool = True) -> float:
    """Mean over the steps in the middle of a run."""
    world = schedules.World(
        random=Random(0),
        cluster=VirtualCluster(),
        ranks=1,
        prompts=PROMPTS,
        samples=2,
        staleness=staleness,
        steps=STEPS,
        partial=partial,
        capacity=1000,
        slice_s=None,
        own_process=colocated != "native",
        colocated=colocated,
        uninformative=0.0,
        max_replaced=0,
        by_step=False,
        greedy=False,
        evaluations=0.0,
        kills=0,
        failing=0.0,
        duration=lambda number: 1.0 if number % PROMPTS else LONGEST_S,
    )
    producer, _, actor = schedules.start(world, 0, rollouts)
    ends: list[float] = []
    for step in range(1, STEPS + 1):
        producer.take(step)
        producer.to_preparation()
        actor.learn(TRAINING_S).get()
        producer.publish(step)
        ends.append(world.cluster.now)
    first, last = 12, 48  # a whole number of the rounds of k + 1 steps in which they come
    return (ends[last] - ends[first]) / (last - first)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_on_pools_of_their_own(staleness: int) -> None:
    law = max(TRAINING_S, (LONGEST_S + TRAINING_S) / (staleness + 1))
    assert step_s(staleness, colocated="") == pytest.approx(law, rel=0.02)


@pytest.mark.parametrize("colocated", ["native", "sleep"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_on_shared_devices(staleness: int, colocated: str) -> None:
    law = TRAINING_S + LONGEST_S / (staleness + 1)
    assert step_s(staleness, colocated) == pytest.approx(law, rel=0.02)


@pytest.mark.parametrize(("colocated", "law"), [("", LONGEST_S), ("native", LONGEST_S + TRAINING_S)])
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_without_partial_rollouts_a_larger_staleness_gains_nothing(staleness: int, colocated: str, law: float) -> None:
    assert step_s(staleness, colocated, partial=False) == pytest.approx(law, rel=0.02)
