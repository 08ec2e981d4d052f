"""The step time and the placements of a configuration."""

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem.config import yaml12
from tandem.config.load import load_config
from tandem.config.training import MegatronTrainingConfig
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.calibration import read_run
from tandem.planning.fsdp_memory import FsdpSizes
from tandem.planning.hardware import parse_machines
from tandem.planning.mends import fullest
from tandem.planning.offload import host_traffic
from tandem.planning.passes import HostTraffic, Passes
from tandem.planning.phases import fsdp_sizes, phase_peaks, resident
from tandem.planning.placement_search import Plan, Way
from tandem.planning.placements import as_it_is, costs_of, models_of, roles_of, scales_of, time_report, workload_of
from tandem.planning.settings import as_overrides, changes_for, dealt, fits, sets_of, trainings_of
from tandem.planning.time import ParallelDims
from tests.conftest import ROOT, load_file
from tests.unit.test_planning_tower import config as tower_config

plan_time: Any = load_file(ROOT / "benchmarks/plan_time.py")
MACHINES = parse_machines("2x8xH100")
READS_LOGPROBS = """
from tandem.algorithms.base import Need
from tandem.algorithms.policy_gradient import PolicyGradient

class Mine(PolicyGradient):
    def __init__(self, config, max_response_tokens):
        super().__init__(config, max_response_tokens)
        self.needs |= {Need.OLD_LOGPROBS}

    def estimate(self, rollouts, rewards_T):
        raise AssertionError("planning computes nothing")
"""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(plan_time.CONFIGS["L8"]))
    return {
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"},
        "data": {"train_files": ["rows.jsonl"]},
        "generation": {"type": "vllm", "max_response_tokens": 4096, "sleep": "weights"},
        "training": {"type": "fsdp", "activation_checkpointing": True},
        "cluster": {"type": "ray", "ranks": 16},
        "trainer": {"run_dir": str(tmp_path / "run"), "steps": 1},
    }


def config_from(settings: dict[str, Any]) -> TrainConfig:
    return load_config(TrainConfig, settings)


def test_the_report_has_the_configuration_and_a_ranking(settings: dict[str, Any]) -> None:
    lines = list(time_report(config_from(settings), MACHINES))
    assert "as it is: " in lines[1]
    assert "s: generation" in lines[1]
    *listed, last = lines[2:]
    assert re.match(r"the first is \d+\.\d s ahead of the next, the most by \w+, which takes", last)
    seconds = [float(line.split(". ")[1].split(" s:")[0]) for line in listed[::2]]
    assert seconds == sorted(seconds)
    assert all(re.fullmatch(r" {5}(as it is|[\w.]+=.+)", line) for line in listed[1::2])


def test_pools_are_the_sets_and_stale_generation_runs_beside(settings: dict[str, Any]) -> None:
    settings["cluster"] = {"type": "ray"}
    settings["placement"] = {"pools": {"train": [8], "serve": [8]}, "roles": {"rollout": "serve"}}
    settings["trainer"]["max_staleness"] = 1
    config = config_from(settings)
    assert sets_of(config, roles_of(config)) == {"train": ("actor",), "serve": ("rollout",)}
    here = as_it_is(config, MACHINES, workload_of(config, None))
    assert here is not None and [way.gpus for way in here.sets] == [8, 8]
    assert "beside the rest" in list(time_report(config, MACHINES))[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training": {"optimizer_offload": True}},
        {"training": {"shard_size": 8}},
        {"training": {"activation_checkpointing": "selective"}},
        {"model": {"lora": {"rank": 16}}},
    ],
    ids=str,
)
def test_the_search_asks_for_the_memory_that_the_plan_prints(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    settings["algorithm"] = {"type": "grpo", "kl": {"place": "loss"}}
    settings["generation"]["sleep"] = "cache"
    for section, values in changes.items():
        settings[section] |= values
    config = config_from(settings)
    costs = costs_of(config, MACHINES, workload_of(config, None), config.training)
    (layout,) = costs.layouts(costs.models["actor"].shape, 16)
    held, working = costs.memory_of("actor", costs.models["actor"], layout)
    learning = [peak.memory for peak in phase_peaks(config, 2**37) if peak.role == "actor" and peak.phase != "publish"]
    without = [replace(memory, context=0, slack=0, cache=0).total for memory in learning]
    model = costs.models["reference"]
    beside = resident(fsdp_sizes(config, config.training, "reference", model.shape, 16)).total  # type: ignore[arg-type]
    beside = 0 if config.model.lora else beside  # adapters are all that tells policy and reference apart
    assert costs.memory_of("reference", model, layout)[0] == 0, "it waits in host memory while the actor learns"
    asleep = 2 * costs.models["actor"].shape.parameters  # the engine keeps its weights
    assert held + working == max(without[0] - beside, *without[1:]) - asleep


def test_no_placement_has_more_ranks_a_row_than_its_heads_divide_into(settings: dict[str, Any]) -> None:
    path = Path(settings["model"]["path"]) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": 36, "num_key_value_heads": 4}))
    config = config_from(settings)
    costs = [costs_of(config, MACHINES, workload_of(config, None), training) for training in trainings_of(config)]
    layouts = [layout for one in costs for layout in one.layouts(one.models["actor"].shape, 16)]
    assert [layout.context for layout in layouts] == [1, 2, 4], "36 heads"


def measured(run: Path, settings: dict[str, Any], response_tokens: float | None = None, **factors: float) -> None:
    """Write a run whose steps took these factors of what is predicted for it, in the middle: the first is slow, others
    vary, and two are lost, for it has begun again before them."""
    config = config_from(settings)
    here = as_it_is(config, MACHINES, workload_of(config, response_tokens))
    assert here is not None
    predicted = dict(
        zip(("generation", "preparation", "update", "publish"), (*here.times, here.publish_s), strict=True)
    )
    taken = {f"time/{stage}_s": factors.get(stage, 1.0) * seconds for stage, seconds in predicted.items()}
    length = {"response_length/mean": response_tokens} if response_tokens else {}
    lines = [(1, 50.0), (2, 0.5), (3, 1000.0), (4, 1000.0), (3, 1.0), (4, 4.0)]
    records = [
        {"step": step, "time/step_s": 1.0, **{name: times * seconds for name, seconds in taken.items()}, **length}
        for step, times in lines
    ]
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(settings))
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))


def test_a_run_scales_each_stage_by_what_it_measured(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["algorithm"] = {"type": "grpo", "minibatches": 2}
    config = config_from(settings)
    measured(tmp_path / "run", settings, generation=2, preparation=3)
    run = read_run(tmp_path / "run", config, "H100")
    scales = scales_of(run, MACHINES)
    assert scales == pytest.approx({"generation": 2, "preparation": 3, "update": 1, "publish beside the actor": 1})
    work = workload_of(config, None)
    here, scaled = as_it_is(config, MACHINES, work), as_it_is(config, MACHINES, work, scales)
    assert here is not None and scaled is not None
    generation, preparation, update = here.times
    assert scaled.times == pytest.approx((2 * generation, 3 * preparation, update))
    told = list(time_report(config, MACHINES, run=run))[1]
    assert told.endswith(
        ": generation 2 times as long, preparation 3 times as long, update 1 times as long, "
        "publish beside the actor 1 times as long"
    )


def test_a_run_of_another_size_scales_by_what_is_predicted_for_it(settings: dict[str, Any], tmp_path: Path) -> None:
    """With other rows, ranks and lengths it says how fast the machine is, not how long a step of these takes."""
    settings["algorithm"] = {"type": "grpo", "minibatches": 2}
    theirs = {**settings, "data": {**settings["data"], "prompts_per_step": 8}, "cluster": {"type": "ray", "ranks": 8}}
    measured(tmp_path / "run", theirs, response_tokens=300, generation=2, update=0.5)
    run = read_run(tmp_path / "run", config_from(settings), "H100")
    assert scales_of(run, MACHINES) == pytest.approx(
        {"generation": 2, "preparation": 1, "update": 0.5, "publish beside the actor": 1}
    )
    lines = list(time_report(config_from(settings), MACHINES, run=run))
    assert lines[0].startswith("step time, answers of 300 tokens")
    assert next(time_report(config_from(settings), MACHINES, 2048, run)).startswith("step time, answers of 2048")


def test_the_wait_for_generation_beside_the_rest_scales_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["cluster"], settings["trainer"]["max_staleness"] = {"type": "ray"}, 1
    settings["placement"] = {"pools": {"train": [8], "serve": [8]}, "roles": {"rollout": "serve"}}
    measured(tmp_path / "run", settings, update=2)
    scales = scales_of(read_run(tmp_path / "run", config_from(settings), "H100"), MACHINES)
    assert scales == pytest.approx({"update": 2, "publish to other GPUs": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"type": "megatron"}}, "that run had training.type: megatron, this configuration has fsdp"),
        ({"generation": {"type": "native"}}, "that run had generation.type: native, this configuration has vllm"),
    ],
    ids=str,
)
def test_a_run_with_other_engines_is_refused(
    settings: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    measured(tmp_path / "run", {**settings, **changes})
    with pytest.raises(UserError, match=message):
        read_run(tmp_path / "run", config_from(settings), "H100")


def test_a_run_that_measured_nothing_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    config = config_from(settings)
    for name, text, message in (
        ("config.yaml", json.dumps(settings), r"it has no config\.yaml"),
        ("metrics.jsonl", "", r"it has no metrics\.jsonl"),
        ("nothing", "", r"its metrics\.jsonl has no step"),
    ):
        with pytest.raises(UserError, match=message):
            read_run(tmp_path, config, "H100")
        (tmp_path / name).write_text(text)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/st')
    with pytest.raises(UserError, match="has no step"):
        read_run(tmp_path, config, "H100")


def test_what_a_crash_has_torn_and_what_is_no_number_is_left_out(settings: dict[str, Any], tmp_path: Path) -> None:
    measured(tmp_path / "run", settings, generation=2)
    metrics = tmp_path / "run/metrics.jsonl"
    nothing = {"step": 5, "time/step_s": None, "time/generation_s": None, "response_length/mean": None}
    metrics.write_text(f'{metrics.read_text()}\n{json.dumps(nothing)}\n{{"step": 6, "time/gen')
    run = read_run(tmp_path / "run", config_from(settings), "H100")
    assert run.response_tokens is None and scales_of(run, MACHINES)["generation"] == pytest.approx(2)


def test_a_change_over_that_was_measured_is_that_of_shared_gpus_alone(settings: dict[str, Any], tmp_path: Path) -> None:
    apart = {**settings, "cluster": {"type": "ray"}}
    apart["placement"] = {"pools": {"train": [8], "serve": [8]}, "roles": {"rollout": "serve"}}
    measured(tmp_path / "apart", apart, publish=7)
    measured(tmp_path / "shared", settings, publish=0.1)
    config = config_from(settings)
    runs = {name: read_run(tmp_path / name, config, "H100") for name in ("apart", "shared")}
    as_before, of_apart, of_shared = (list(time_report(config, MACHINES, run=run)) for run in (None, *runs.values()))
    assert of_apart[2].rpartition("publish")[2] == as_before[1].rpartition("publish")[2], "7 times of the change-over"
    assert float(of_shared[2].rpartition("publish ")[2].split(";")[0]) < 3
    assert not any("change-over" in line for line in of_shared)


def test_a_run_whose_models_are_gone_is_told(settings: dict[str, Any], tmp_path: Path) -> None:
    gone = {**settings, "model": {**settings["model"], "path": "/nowhere/model"}}
    measured(tmp_path / "run", settings)
    (tmp_path / "run/config.yaml").write_text(json.dumps(gone))
    run = read_run(tmp_path / "run", config_from(settings), "H100")
    assert "its model /nowhere/model is not here" in list(time_report(config_from(settings), MACHINES, run=run))[1]
    gone["model"]["critic_path"], gone["algorithm"] = "/nowhere/critic", {"type": "ppo"}
    (tmp_path / "run/config.yaml").write_text(json.dumps(gone))
    with pytest.raises(UserError, match=r"what that run had cannot be read: .*/nowhere/critic"):
        scales_of(read_run(tmp_path / "run", config_from(settings), "H100"), MACHINES)


@pytest.mark.parametrize(
    ("card", "named"),
    [
        ("H20", "NVIDIA H200, 143771 MiB"),
        ("B200", "NVIDIA GB200, 189471 MiB"),
        ("A100", "NVIDIA A100-PCIE-40GB, 40960 MiB"),
    ],
)
def test_cards_of_like_names_are_others(settings: dict[str, Any], tmp_path: Path, card: str, named: str) -> None:
    measured(tmp_path / "run", settings)
    (tmp_path / "run/environment.json").write_text(json.dumps({"gpus": f"{named}, 580.1"}))
    with pytest.raises(UserError, match=f"this is planned for {card}"):
        read_run(tmp_path / "run", config_from(settings), card)


def test_generation_waits_for_the_rows_and_the_memory_that_an_engine_is_given(settings: dict[str, Any]) -> None:
    def seconds(**generation: Any) -> float:
        own = {**settings, "generation": {**settings["generation"], **generation}}
        return float(list(time_report(config_from(own), MACHINES))[1].split("generation ")[1].split()[0])

    least = {"gpu_memory_utilization": 0.3}
    assert seconds() < seconds(memory_share=0.3) == seconds(engine_args=least)
    few = seconds(engine_args={"max_num_seqs": 8})
    assert seconds() < few < seconds(engine_args={"max_num_seqs": 1})
    settings["generation"]["type"] = "sglang"
    assert seconds(engine_args={"max_running_requests": 8}) == pytest.approx(few, rel=0.05)
    settings["generation"] = {"type": "native", "max_response_tokens": 4096}
    assert seconds(max_running=256) < seconds(max_running=8) < seconds(max_running=1)


def test_what_fits_nowhere_is_refused(settings: dict[str, Any]) -> None:
    settings["generation"] = {"type": "native", "max_response_tokens": 4096}
    settings["cluster"] = {"type": "local", "ranks": 1}
    with pytest.raises(UserError, match="fits 1 GPU;"):
        list(time_report(config_from(settings), parse_machines("1x4090")))


def test_changes_that_a_run_would_refuse_fit_nowhere(settings: dict[str, Any]) -> None:
    config = config_from(settings)
    assert fits(config, {"algorithm.minibatches": 2}, 2**50)
    assert not fits(config, {"algorithm.minibatches": config.data.prompts_per_step + 1}, 2**50)


def seeing(settings: dict[str, Any], tmp_path: Path, **training: Any) -> TrainConfig:
    """A Qwen2.5-VL on four ranks."""
    (tmp_path / "seeing").mkdir()
    (tmp_path / "seeing" / "config.json").write_text(json.dumps(tower_config("qwen2_5_vl")))
    settings["model"] = {"path": str(tmp_path / "seeing"), "vision_tower": "frozen"}
    settings["data"]["images"] = {"max_image_tokens": 324}
    settings["generation"] = {**settings["generation"], "sleep": "cache"}
    settings["cluster"] = {"type": "ray", "ranks": 4}
    settings["training"] |= training
    return config_from(settings)


@pytest.mark.parametrize("training", [{"context_parallel": 2}, {"compile": True}])
def test_a_plan_refuses_what_a_run_with_pictures_does(
    settings: dict[str, Any], tmp_path: Path, training: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=f"training.{next(iter(training))}: a model that sees pictures"):
        seeing(settings, tmp_path, **training)


def test_engines_keep_the_weights_of_a_frozen_tower(settings: dict[str, Any], tmp_path: Path) -> None:
    seeing(settings, tmp_path)
    dropping = {**settings, "generation": {**settings["generation"], "sleep": "weights"}}
    with pytest.raises(UserError, match=r"with model\.vision_tower: frozen no publish fills them again; use cache"):
        config_from(dropping)


def test_no_placement_of_a_model_that_sees_pictures_shares_rows(settings: dict[str, Any], tmp_path: Path) -> None:
    rows = {**settings, "generation": {**settings["generation"], "max_response_tokens": 120_000}}
    assert " CP" in "\n".join(time_report(config_from(rows), MACHINES)), "rows that one GPU has no room for"
    assert " CP" not in "\n".join(time_report(config_from(settings), MACHINES)), "sharing rows takes time"
    assert " CP" not in "\n".join(time_report(seeing(settings, tmp_path), MACHINES))


def test_without_a_number_of_ranks_the_configuration_has_one(settings: dict[str, Any]) -> None:
    settings["cluster"] = {"type": "local"}
    here = as_it_is(config_from(settings), MACHINES, workload_of(config_from(settings), None))
    assert here is not None and [way.gpus for way in here.sets] == [1]


def run_as(settings: dict[str, Any], overrides: str) -> TrainConfig:
    """The configuration behind which a shell has these words."""
    path = Path(settings["trainer"]["run_dir"]).parent / "config.yaml"
    path.write_text(json.dumps(settings))
    return load_config(TrainConfig, path, shlex.split(overrides))


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"type": "ppo", "kl": {"place": "loss"}}},
        {"algorithm": {"type": "grpo", "kl": {"place": "loss"}}, "trainer": {"max_staleness": 2}},
        {"training": {"type": "megatron", "activation_checkpointing": True}, "algorithm": {"type": "ppo"}},
        {"generation": {"sleep": "cache"}, "training": {"shard_size": 8, "activation_checkpointing": True}},
        {"generation": {"type": "native", "max_response_tokens": 4096}, "data": {"prompts_per_step": 16}},
    ],
    ids=str,
)
def test_the_list_says_how_a_configuration_becomes_each_placement(
    settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Its words behind the configuration give one that fits, and that takes as long as they say."""
    for section, values in changes.items():
        kept = {} if "type" in values else settings.get(section, {})
        settings[section] = {**kept, **values}
    config = run_as(settings, "")
    lines = list(time_report(config, MACHINES))
    listed = [(line, after) for line, after in pairwise(lines) if re.match(r"  \d\. ", line)]
    assert len(listed) > 1
    for line, overrides in listed:
        placed = config if overrides == "     as it is" else run_as(settings, overrides)
        assert fullest(phase_peaks(placed, MACHINES.card.memory_bytes)).memory.total <= MACHINES.card.memory_bytes
        here = list(time_report(placed, MACHINES))[1]
        assert here.split(": ", 1)[1].split(";")[0] == line.split(". ", 1)[1].split(";")[0]
        assert sum(sum(placed.nodes_of(roles[0])) for roles in sets_of(placed, roles_of(placed)).values()) == 16


def test_pools_of_a_list_keep_their_names_and_lie_on_whole_nodes(settings: dict[str, Any]) -> None:
    settings["cluster"] = {"type": "ray"}
    settings["placement"] = {"pools": {"learn": [4], "answer": [8, 4]}, "roles": {"rollout": "answer"}}
    lines = list(time_report(config_from(settings), MACHINES))
    apart = next(after for line, after in pairwise(lines) if " | " in line and re.match(r"  \d", line))
    assert re.fullmatch(r" {5}.*'placement.pools=\{learn: \[\d(, \d)?\], answer: \[\d(, \d)?\]\}'", apart)
    together = next(after for line, after in pairwise(lines) if " | " not in line and re.match(r"  \d", line))
    assert together.endswith("'placement.pools={train: [8, 8]}' 'placement.roles={}'")


@pytest.mark.parametrize(
    "placement",
    [
        {"pools": {"serve": [8], "train": [8]}, "roles": {"actor": "train", "reference": "train"}},
        {"pools": {"serve": [4, 4], "train": [4, 4]}, "roles": {"actor": "train"}},
        {"pools": {"train": [8], "serve": [8]}, "roles": {"rollout": "serve", "reference": "serve"}},
    ],
    ids=str,
)
def test_names_that_the_configuration_has_do_not_mislead(settings: dict[str, Any], placement: dict[str, Any]) -> None:
    """Its first pool may not be the actor's, and its pools may be called as those of the list are."""
    settings["algorithm"] = {"type": "grpo", "kl": {"place": "loss"}}
    settings["cluster"], settings["placement"] = {"type": "ray"}, placement
    lines = list(time_report(config_from(settings), MACHINES))
    listed = [(line, after) for line, after in pairwise(lines) if re.match(r"  \d\. ", line)]
    assert len(listed) == 5
    for line, overrides in listed:
        placed = run_as(settings, "" if overrides == "     as it is" else overrides)
        sets = {tuple(sorted(roles)) for roles in sets_of(placed, roles_of(placed)).values()}
        told = line.split("; ")[-1].split(" | ")
        assert sets == {tuple(sorted(role.split(" on ")[0] for role in one.split(", "))) for one in told}


def test_what_does_not_fit_is_told_as_the_table_tells_it(settings: dict[str, Any]) -> None:
    assert re.search(r"as it is: \d", list(time_report(config_from(settings), MACHINES))[1])
    settings["cluster"]["ranks"] = 1
    assert "as it is: does not fit; if it did: " in list(time_report(config_from(settings), MACHINES))[1]


@pytest.mark.parametrize("offload", ["cpu_offload", "optimizer_offload"])
def test_what_is_in_host_memory_takes_time_to_come_and_go(settings: dict[str, Any], offload: str) -> None:
    def updated(ranks: int, **training: Any) -> float:
        config = config_from(
            {**settings, "training": {**settings["training"], **training}, "cluster": {"ranks": ranks}}
        )
        here = as_it_is(config, MACHINES, workload_of(config, None))
        assert here is not None
        return here.times[2]

    for ranks in (1, 8):
        assert updated(ranks, **{offload: True}) > updated(ranks)
    moved = 2 * 8 * 8_030_261_248 / 8 / MACHINES.card.host_bytes_per_s
    if offload == "optimizer_offload":
        steps = config_from(settings).algorithm.minibatches
        assert updated(8, optimizer_offload=True) - updated(8) == pytest.approx(steps * moved, rel=1e-3)


def test_times_that_stand_on_less_are_told(settings: dict[str, Any], tmp_path: Path) -> None:
    def told() -> str:
        return "\n".join(time_report(config_from(settings), MACHINES))

    assert "change-over" not in told() and "native" not in told() and "cpu_offload" not in told()
    settings["training"]["cpu_offload"] = True
    assert "cpu_offload: the optimizer's time" in told()
    small = {**plan_time.CONFIGS["L8"], "num_hidden_layers": 2}
    (tmp_path / "model/config.json").write_text(json.dumps(small))
    assert "publish has 25 s of change-over" in told() and "this one of 1.5B takes less" in told()
    settings["generation"] = {"type": "native", "max_response_tokens": 4096}
    assert "the native engine is timed as vLLM is" in told()


def test_a_run_without_such_a_gpu_scales_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    config, environment = config_from(settings), tmp_path / "run/environment.json"
    measured(tmp_path / "run", settings)
    read_run(tmp_path / "run", config, "H100")
    environment.write_text(json.dumps({"gpus": "NVIDIA GeForce RTX 4090, 24564 MiB, 580.1"}))
    read_run(tmp_path / "run", config, "RTX4090")
    with pytest.raises(UserError, match="that run had NVIDIA GeForce RTX 4090, this is planned for H100"):
        read_run(tmp_path / "run", config, "H100")
    environment.write_text(json.dumps({"gpus": None}))
    with pytest.raises(UserError, match="that run had no GPU"):
        read_run(tmp_path / "run", config, "H100")


def test_a_step_has_no_pass_that_the_run_does_not_make(settings: dict[str, Any], tmp_path: Path) -> None:
    def prepared(**algorithm: Any) -> float:
        config = config_from({**settings, "algorithm": {"type": "grpo", **algorithm}})
        here = as_it_is(config, MACHINES, workload_of(config, None))
        assert here is not None
        return here.times[1]

    assert prepared() == 0, "one optimizer step on answers of the same weights"
    assert prepared(minibatches=2) > 0
    assert prepared(minibatches=2, kl={"place": "loss"}) == pytest.approx(2 * prepared(kl={"place": "loss"}))
    (tmp_path / "mine.py").write_text(READS_LOGPROBS)
    assert prepared(type=f"{tmp_path}/mine.py:Mine") == prepared(minibatches=2), "an algorithm of one's own says so"


def test_adapters_learn_in_less_time(settings: dict[str, Any]) -> None:
    def updated(recompute: bool, **model: Any) -> float:
        own = {**settings, "model": {**settings["model"], **model}, "cluster": {"ranks": 1}}
        own["training"] = {"type": "fsdp", "activation_checkpointing": recompute}
        own["generation"] = {**settings["generation"], "sleep": "cache"}
        config = config_from(own)
        here = as_it_is(config, MACHINES, workload_of(config, None))
        assert here is not None
        return here.times[2]

    lora = {"lora": {"rank": 8}}
    assert updated(True, **lora) / updated(True) == pytest.approx(3 / 4, rel=1e-3)
    assert updated(False, **lora) / updated(False) == pytest.approx(2 / 3, rel=1e-3)
    settings["algorithm"] = {"type": "ppo"}
    critic = {"critic_lora": {"rank": 8}}
    assert updated(True) - updated(True, **critic) == pytest.approx(updated(True) - updated(True, **lora), rel=1e-3)


def way(*roles: str, gpus: int, **degrees: int) -> Way:
    layout = ParallelDims(gpus, **degrees)
    return Way(roles, gpus, tuple(layout for _ in roles), 1.0, 1.0, 1.0, 0)


def test_sets_lie_on_whole_nodes_and_else_on_one(settings: dict[str, Any]) -> None:
    three = parse_machines("3x8xH100")
    sizes = dealt([way("rollout", gpus=12), way("actor", gpus=8), way("reference", gpus=4)], three)
    assert sizes == {("rollout",): [8, 4], ("actor",): [8], ("reference",): [4]}
    sizes = dealt([way("actor", gpus=6), way("critic", gpus=4), way("a", gpus=4), way("b", gpus=2)], MACHINES)
    assert sorted(sizes.values()) == [[2], [4], [4], [6]]
    assert dealt([way("actor", gpus=5), way("critic", gpus=5), way("a", gpus=6)], MACHINES)["a",] == [6]
    fives = [way(name, gpus=5) for name in ("actor", "critic", "rollout")]
    assert sorted(dealt(fives, parse_machines("3x5xH100")).values()) == [[5], [5], [5]]


def test_one_pool_over_nodes_is_a_pool_with_nodes(settings: dict[str, Any]) -> None:
    """`cluster.ranks` are processes of one machine."""
    settings["cluster"] = {"type": "local", "ranks": 8}
    changes = changes_for(config_from(settings), Plan((way("actor", "rollout", gpus=16),), 0.0, False), MACHINES)
    assert changes == {"cluster.type": "ray", "cluster.ranks": None, "placement.pools": {"main": [8, 8]}}
    one = Plan((way("actor", "rollout", gpus=8),), 0.0, False)
    assert changes_for(config_from(settings), one, parse_machines("8xH100")) == {}
    del settings["cluster"]["ranks"]
    assert changes_for(config_from(settings), one, parse_machines("8xH100")) == {"cluster.ranks": 8}


def test_degrees_change_all_that_hangs_on_them(settings: dict[str, Any]) -> None:
    settings["training"] = {"type": "fsdp", "shard_size": 8}
    apart = (way("actor", gpus=12, context=2), way("rollout", gpus=4, tensor=2))
    changes = changes_for(config_from(settings), Plan(apart, 0.0, False), MACHINES)
    assert changes["training.context_parallel"] == 2 and changes["training.shard_size"] is None
    assert changes["generation.tensor_parallel"] == 2
    settings["training"] = {"type": "megatron", "pipeline_parallel": 2, "virtual_pipeline": 2}
    settings["cluster"]["ranks"] = 8
    together = Plan((way("actor", "rollout", gpus=8, tensor=4),), 0.0, False)
    changes = changes_for(config_from(settings), together, parse_machines("8xH100"))
    assert changes == {
        "training.tensor_parallel": 4, "training.sequence_parallel": True, "training.pipeline_parallel": 1,
        "training.virtual_pipeline": 1, "generation.tensor_parallel": 4,
    }  # fmt: skip


def test_names_are_read_as_they_are_meant() -> None:
    pools = {"a, b": [1], "c: d": [2], "1": [3], "null": [4], "plain": [5], "yes": [6]}
    (word,) = shlex.split(as_overrides({"placement.pools": pools}))
    assert word.endswith("plain: [5], yes: [6]}")
    assert yaml12.read(word.partition("=")[2]) == pools


@pytest.mark.parametrize(
    ("generation", "held"),
    [
        ({"sleep": "weights"}, 0),
        ({"sleep": "cache"}, 2 * 8_030_261_248),
        ({"sleep": "never", "memory_share": 0.4}, int(0.4 * MACHINES.card.memory_bytes)),
    ],
    ids=str,
)
def test_what_a_sleeping_engine_holds(settings: dict[str, Any], generation: dict[str, Any], held: float) -> None:
    settings["generation"] |= generation
    config = config_from(settings)
    costs = costs_of(config, MACHINES, workload_of(config, None), config.training)
    (engine,) = costs.generation(8, 2**30, ["actor"])
    assert 0.9 * held <= engine.held_bytes <= held


def test_an_engine_has_its_share_beside_models_and_alone(settings: dict[str, Any]) -> None:
    settings["data"]["prompts_per_step"] = 512
    config = config_from(settings)
    costs = costs_of(config, MACHINES, workload_of(config, None), config.training)
    (shared,), (alone,) = (costs.generation(8, 2**33, models) for models in (["actor"], []))
    assert shared.seconds > alone.seconds, "0.8 of each GPU, and 0.9"
    settings["generation"]["sleep"] = "never"
    stays = costs_of(config_from(settings), MACHINES, workload_of(config, None), config.training)
    (always,) = stays.generation(8, 2**33, ["actor"])
    assert always.seconds > shared.seconds, "0.4, and the models stay"
    assert not stays.generation(8, 74 * 2**30, ["actor"])


def test_weights_of_other_sizes_are_read_in_other_times(settings: dict[str, Any]) -> None:
    def generated(dtype: str = "bfloat16", **generation: Any) -> float:
        own = {**settings, "model": {**settings["model"], "dtype": dtype}}
        config = config_from({**own, "generation": {**settings["generation"], **generation}})
        here = as_it_is(config, MACHINES, workload_of(config, None))
        assert here is not None
        return here.times[0]

    assert generated(quantization="fp8_per_channel") < generated() < generated("float32")


def test_only_an_engine_that_reads_the_trainers_weights_publishes_in_no_time(settings: dict[str, Any]) -> None:
    settings["generation"] = {"type": "native", "max_response_tokens": 64}

    def published(ranks: int, **training: Any) -> float:
        config = config_from({**settings, "cluster": {"type": "ray", "ranks": ranks}, "training": training})
        here = as_it_is(config, MACHINES, workload_of(config, None))
        assert here is not None
        return here.publish_s

    assert published(1, type="fsdp") == 0
    assert 0 < published(8, type="fsdp") < 1 and 0 < published(1, type="megatron") < 1, "no change-over, but a copy"


def test_what_travels_to_and_from_host_memory() -> None:
    """A parameter: 4 bytes of master, 8 of moments; weights 2 in a pass, gradients 4."""
    shape = plan_time.shape("L8")

    def traffic(**how: Any) -> HostTraffic:
        return host_traffic(FsdpSizes(shape, ranks=how.pop("ranks", 8), learns=how.pop("learns", True), **how))

    each = FsdpSizes(shape, ranks=8).learning / 8
    moved = traffic(cpu_offload=True)
    numbers = (moved.a_pass, moved.a_backward, moved.a_step, moved.computed)
    assert numbers == pytest.approx((4 * each, 4 * each, 0, (2 * 12 + 4) * each), rel=1e-3)
    assert traffic(optimizer_offload=True) == HostTraffic(a_step=pytest.approx(2 * 8 * each, rel=1e-6))
    alone = traffic(ranks=1, cpu_offload=True)
    assert (alone.a_pass, alone.a_step) == (0, pytest.approx((4 + 2) * 8 * each, rel=1e-3))
    frozen = traffic(learns=False, cpu_offload=True)
    assert (frozen.a_pass, frozen.a_backward, frozen.computed) == (pytest.approx(2 * each, rel=1e-2), 0, 0)
    assert traffic() == HostTraffic()


def test_a_reference_beside_a_native_engine_gives_it_no_weights(settings: dict[str, Any]) -> None:
    settings["algorithm"] = {"type": "grpo", "kl": {"place": "loss"}}
    settings["generation"] = {"type": "native", "max_response_tokens": 64, "sleep": "never"}
    config = config_from(settings)
    costs = costs_of(config, MACHINES, workload_of(config, None), config.training)
    ((beside,), (alone,)) = (costs.generation(1, 0, models) for models in (["reference"], []))
    assert beside.held_bytes == alone.held_bytes > 2 * 8_030_261_248


def test_degrees_that_stay_keep_what_hangs_on_them(settings: dict[str, Any]) -> None:
    own = {"type": "megatron", "pipeline_parallel": 2, "virtual_pipeline": 2, "context_parallel": 2}
    settings["training"], settings["cluster"]["ranks"] = own, 8
    config = config_from(settings)
    wider = Plan((way("actor", "rollout", gpus=8, tensor=2, pipeline=2, context=2),), 0.0, False)
    assert set(changes_for(config, wider, parse_machines("8xH100"))) == {
        "training.tensor_parallel", "training.sequence_parallel", "generation.tensor_parallel",
    }  # fmt: skip
    tried = [training for training in trainings_of(config) if isinstance(training, MegatronTrainingConfig)]
    assert {1, 2} == {training.context_parallel for training in tried if training.tensor_parallel == 4}


def test_a_native_engine_has_room_for_all_rows_that_it_runs(settings: dict[str, Any]) -> None:
    settings["generation"] = {"type": "native", "max_response_tokens": 4096, "sleep": "idle"}
    settings["data"]["prompts_per_step"] = 1024

    def ways(**generation: Any) -> Any:
        config = config_from({**settings, "generation": {**settings["generation"], **generation}})
        costs = costs_of(config, MACHINES, workload_of(config, None), config.training)
        return costs.generation(8, 0, ["actor"])

    assert ways(max_running=64) and not ways(max_running=256)


def test_adapters_are_the_actors(settings: dict[str, Any]) -> None:
    settings["model"]["lora"], settings["generation"]["sleep"] = {"rank": 8}, "cache"
    settings["algorithm"] = {"type": "ppo", "kl": {"place": "loss"}}
    models = models_of(config_from(settings))
    assert {role: (model.learns, model.adapters) for role, model in models.items()} == {
        "actor": (True, True), "critic": (True, False), "reference": (False, False),
    }  # fmt: skip


def test_passes_wait_for_what_comes_from_host_memory(settings: dict[str, Any]) -> None:
    work = workload_of(config_from(settings), None)
    each = Passes(plan_time.shape("L8"), MACHINES.card, ParallelDims(8, sharded=True), work)
    slow = replace(each, host=HostTraffic(a_pass=1e15, a_backward=4e15))
    bandwidth, passes = MACHINES.card.host_bytes_per_s, each.tokens_of(work.rows) / work.micro_batch_tokens
    assert slow.forward_s() == pytest.approx(passes * 1e15 / bandwidth, rel=1e-2)
    assert slow.update_s() == pytest.approx(passes * (2 + 4) * 1e15 / bandwidth, rel=1e-2)
