"""Step times: the published ones, and what must hold of any."""

from dataclasses import fields, replace
from typing import Any

import pytest

from tandem.planning.decode_cost import DecodeCost, generation_s, steady_generation_s
from tandem.planning.hardware import CARDS, parse_machines
from tandem.planning.passes import Passes
from tandem.planning.time import CONSTANTS, Constants, ParallelDims, StepTime, Workload, response_lengths
from tests.conftest import ROOT, load_file

plan_time: Any = load_file(ROOT / "benchmarks/plan_time.py")
WORK = Workload(2048, 900, 3946, 150, optimizer_steps=4)


def test_published_steps_are_predicted_within_15_percent_by_constants_that_never_saw_the_model() -> None:
    assert len(fields(Constants)) <= 12
    left_out = plan_time.leave_one_model_out()
    assert len(left_out) == 29
    assert plan_time.mean_error(left_out) <= 0.15


def test_the_shipped_constants_are_the_fitted_ones() -> None:
    h100 = [row for row in plan_time.rows() if row.card == "H100"]
    fitted = plan_time.fit(h100, plan_time.stage_rows())
    for name in plan_time.BOUNDS:
        assert getattr(CONSTANTS, name) == pytest.approx(getattr(fitted, name), rel=0.02), name


@pytest.mark.parametrize(("mean", "longest"), [(900, 3946), (5, 4000), (3900, 3946), (1, 1)])
def test_lengths_have_their_mean_and_their_limit(mean: float, longest: int) -> None:
    lengths = response_lengths(Workload(2048, mean, longest, 0))
    assert lengths.mean == pytest.approx(mean, rel=1e-3)
    assert max(lengths.tokens) <= longest
    assert sum(lengths.shares) == pytest.approx(1)
    assert list(lengths.tokens) == sorted(lengths.tokens)
    assert min(lengths.shares) >= 0.5 / 2048


def test_an_iteration_of_one_row_reads_the_weights_once() -> None:
    """8.03 billion parameters, the embedding's not read: 7.5 billion of two bytes, at 0.843 of 3.35 TB/s."""
    decoder = DecodeCost(plan_time.shape("L8"), CARDS["H100"])
    still = replace(CONSTANTS, layer_s=0, row_s=0)
    assert decoder.iteration_s(1, 0, still) == pytest.approx(2 * 7.504e9 / (0.843 * 3.35e12), rel=1e-3)
    a_token = 32 * 2 * 8 * 128 * 2  # layers, keys and values, heads, their size, bytes
    more = decoder.iteration_s(1, 1000, still) - decoder.iteration_s(1, 0, still)
    assert more == pytest.approx(1000 * a_token / (0.843 * 3.35e12), rel=1e-6)


def test_the_passes_take_their_operations_at_the_share_of_the_peak() -> None:
    shape, card = plan_time.shape("L8"), CARDS["H100"]
    work = Workload(rows=64, response_tokens=1024, max_response_tokens=1024, prompt_tokens=0, micro_batch_tokens=16_384)
    tokens = 64 * 1024
    attention = 2 * 2 * 32 * 4096 * 1024 / 2  # two products, twice their size, over half the square
    flops = tokens * (2 * shape.active_parameters + attention)
    passes = Passes(shape, card, ParallelDims(1), work)
    assert passes.forward_s() == pytest.approx(flops / (CONSTANTS.matmul_share * 989e12), rel=1e-3)
    assert passes.update_s() == pytest.approx(3 * passes.forward_s())
    recomputing = Passes(shape, card, ParallelDims(1), replace(work, recompute=True))
    assert recomputing.update_s() == pytest.approx(4 * passes.forward_s())


def test_a_prompt_passes_once_for_its_siblings() -> None:
    work = Workload(64, 1, 1, 1000, siblings=1)
    alone, shared = (
        Passes(plan_time.shape("L8"), CARDS["H100"], ParallelDims(1), each)
        for each in (work, replace(work, siblings=8))
    )
    assert alone.tokens_of(64) == 64 * 1001
    assert shared.tokens_of(64) == 64 * 126


def test_rows_are_whole() -> None:
    """Of 64 rows of an optimizer step one of twelve replicas has six: with eleven it would take as long."""
    work = Workload(128, 1024, 1024, 0, optimizer_steps=2, micro_batch_tokens=1024)
    still = replace(CARDS["H100"], network_gb_s=1e9, peers_gb_s=1e9)
    times = {
        gpus: Passes(plan_time.shape("L8"), still, ParallelDims(gpus), work).update_s()
        for gpus in (8, 11, 12, 13, 64, 128)
    }
    assert times[11] == pytest.approx(times[12]) == pytest.approx(times[8] * 6 / 8)
    assert times[13] == pytest.approx(times[8] * 5 / 8)
    assert times[128] == pytest.approx(times[64]) == pytest.approx(times[8] / 8)


def test_stages_hand_on_what_they_make() -> None:
    """4,096 tokens of 4,096 numbers of two bytes to the next stage, of each of two tensor ranks half of them."""
    shape = plan_time.shape("L8")
    work = Workload(64, 4096, 4096, 0, micro_batch_tokens=4096)
    slow = replace(CARDS["H100"], network_gb_s=1)
    for tensor in (1, 2):
        layout = ParallelDims(16, tensor=tensor, pipeline=2)
        fast = Passes(shape, replace(slow, network_gb_s=1e9), layout, work).forward_s()
        micro_batches = 64 / layout.replicas + 1
        message_s = 4096 * 4096 * 2 / tensor / 1e9
        assert Passes(shape, slow, layout, work).forward_s() - fast == pytest.approx(micro_batches * message_s)
    inside = ParallelDims(8, pipeline=2)
    assert Passes(shape, slow, inside, work).forward_s() == Passes(shape, CARDS["H100"], inside, work).forward_s()


def test_replicas_of_a_stage_are_neighbours() -> None:
    """Two stages on two nodes: each node holds one, and no gradient leaves it."""
    shape, card = plan_time.shape("L8"), CARDS["H100"]
    work = Workload(1, 1, 1, 0, micro_batch_tokens=1)
    one, two = (
        Passes(shape, replace(card, network_gb_s=speed), ParallelDims(16, pipeline=2), work) for speed in (50, 1)
    )
    assert two.update_s() - one.update_s() < 1e-3  # messages of one token
    whole = Passes(shape, replace(card, network_gb_s=1), ParallelDims(16), work)
    assert whole.update_s() > two.update_s() + 1


def test_sharded_weights_travel_while_others_compute() -> None:
    machines = parse_machines("2x8xH100")
    shape = plan_time.shape("L8")
    plain, sharded = (Passes(shape, machines.card, ParallelDims(16, sharded=each), WORK) for each in (False, True))
    assert sharded.forward_s() >= plain.forward_s()
    slow = replace(machines.card, network_gb_s=0.1)
    assert Passes(shape, slow, ParallelDims(16, sharded=True), WORK).forward_s() > 5 * sharded.forward_s()


@pytest.mark.parametrize("model", ["L8", "Q32", "Q30", "DSV3"])
def test_more_work_takes_longer_and_more_devices_less(model: str) -> None:
    shape, card = plan_time.shape(model), CARDS["H100"]
    cache = 40e9
    decoder = DecodeCost(shape, card, 8)
    base = generation_s(decoder, WORK, 16, cache)
    assert generation_s(decoder, replace(WORK, rows=4096), 16, cache) > base
    assert generation_s(decoder, replace(WORK, response_tokens=1800), 16, cache) > base
    assert generation_s(decoder, WORK, 32, cache) < base
    assert generation_s(decoder, WORK, 16, cache / 100) > base
    assert steady_generation_s(decoder, WORK, 16, cache) < base
    one, two = (Passes(shape, card, ParallelDims(gpus), WORK) for gpus in (16, 32))
    assert two.forward_s() < one.forward_s()
    assert two.update_s() < one.update_s()


def test_a_step_is_the_sum_of_its_stages_or_the_slower_side() -> None:
    step = StepTime(generation=10, log_probs=1, reference=2, critic=3, update=5, publish=4, switch=6)
    assert step.total == 31
    assert step.beside == 15  # max(10, 1 + 2 + 3 + 5) + 4
