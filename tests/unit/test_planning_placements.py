"""The step time and the placements of a configuration."""

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.calibration import check_same_model, measured_scales
from tandem.planning.hardware import parse_machines
from tandem.planning.mends import fullest
from tandem.planning.placements import as_it_is, costs_of, roles_of, time_report, workload_of
from tandem.planning.roles import moments
from tandem.planning.settings import sets_of, trainings_of
from tests.conftest import ROOT, load_file
from tests.unit.test_planning_tower import config as tower_config

plan_time: Any = load_file(ROOT / "benchmarks/plan_time.py")
MACHINES = parse_machines("2x8xH100")


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
    return TrainConfig.model_validate(settings)


def test_the_report_has_the_configuration_and_a_ranking(settings: dict[str, Any]) -> None:
    lines = list(time_report(config_from(settings), MACHINES))
    assert "as it is: " in lines[1]
    assert "s: generation" in lines[1]
    *listed, last = lines[2:]
    assert last.startswith("the first wins")
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
    learning = [
        moment.memory for moment in moments(config, 2**37) if moment.role == "actor" and moment.phase != "publish"
    ]
    without = [replace(memory, context=0, slack=0, cache=0).total for memory in learning]
    beside = costs.memory_of("reference", costs.models["reference"], layout)[0]
    asleep = 2 * costs.models["actor"].shape.parameters  # the engine keeps its weights
    assert held + working == max(without[0] - beside, *without[1:]) - asleep
    assert (beside == 0) == ("model" in changes), "adapters are all that tells policy and reference apart"


def test_no_placement_has_more_ranks_a_row_than_its_heads_divide_into(settings: dict[str, Any]) -> None:
    path = Path(settings["model"]["path"]) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": 36, "num_key_value_heads": 4}))
    config = config_from(settings)
    costs = [costs_of(config, MACHINES, workload_of(config, None), training) for training in trainings_of(config)]
    layouts = [layout for one in costs for layout in one.layouts(one.models["actor"].shape, 16)]
    assert [layout.context for layout in layouts] == [1, 2, 4], "36 heads"


def test_a_run_scales_each_stage_by_what_it_measured(settings: dict[str, Any], tmp_path: Path) -> None:
    config = config_from(settings)
    work = workload_of(config, None)
    here = as_it_is(config, MACHINES, work)
    assert here is not None
    generation, preparation, update = here.times
    steps = [
        {"time/step_s": 1.0, "time/generation_s": first * generation, "time/preparation_s": 3 * preparation,
         "time/update_s": update, "time/publish_s": here.publish_s}
        for first in (50, 2, 2)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    scales = measured_scales(tmp_path, here)
    assert scales == pytest.approx({"generation": 2, "preparation": 3, "update": 1, "publish": 1})
    scaled = as_it_is(config, MACHINES, work, scales)
    assert scaled is not None
    assert scaled.times == pytest.approx((2 * generation, 3 * preparation, update))
    told = list(time_report(config, MACHINES, run=tmp_path))[1]
    assert told.endswith(
        ": generation 2 times as long, preparation 3 times as long, update 1 times as long, publish 1 times as long"
    )


def test_a_run_that_measured_nothing_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        list(time_report(config_from(settings), MACHINES, run=tmp_path))


def test_generation_waits_for_the_rows_and_the_memory_that_an_engine_is_given(settings: dict[str, Any]) -> None:
    def seconds(**generation: Any) -> float:
        own = {**settings, "generation": {**settings["generation"], **generation}}
        return float(list(time_report(config_from(own), MACHINES))[1].split("generation ")[1].split()[0])

    least = {"gpu_memory_utilization": 0.3}
    assert seconds() < seconds(memory_share=0.3) == seconds(engine_args=least)
    few = seconds(engine_args={"max_num_seqs": 8})
    assert seconds() < few < seconds(engine_args={"max_num_seqs": 1})
    settings["generation"] = {"type": "native", "max_response_tokens": 4096}
    assert seconds(max_running=256) < seconds(max_running=8) < seconds(max_running=1)


def test_what_fits_nowhere_is_refused(settings: dict[str, Any]) -> None:
    settings["generation"] = {"type": "native", "max_response_tokens": 4096}
    settings["cluster"] = {"type": "local", "ranks": 1}
    with pytest.raises(UserError, match="fits 1 GPU;"):
        list(time_report(config_from(settings), parse_machines("1x4090")))


def seeing(settings: dict[str, Any], tmp_path: Path, **training: Any) -> TrainConfig:
    """A Qwen2.5-VL on four ranks."""
    (tmp_path / "seeing").mkdir()
    (tmp_path / "seeing" / "config.json").write_text(json.dumps(tower_config("qwen2_5_vl")))
    settings["model"] = {"path": str(tmp_path / "seeing"), "vision_tower": "frozen"}
    settings["data"]["images"] = {"max_image_tokens": 324}
    settings["cluster"] = {"type": "ray", "ranks": 4}
    settings["training"] |= training
    return config_from(settings)


@pytest.mark.parametrize("training", [{"context_parallel": 2}, {"compile": True}])
def test_a_plan_refuses_what_a_run_with_pictures_does(
    settings: dict[str, Any], tmp_path: Path, training: dict[str, Any]
) -> None:
    config = seeing(settings, tmp_path, **training)
    with pytest.raises(UserError, match=f"training.{next(iter(training))}: a model that sees pictures"):
        moments(config, MACHINES.card.memory_bytes)


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
        assert fullest(moments(placed, MACHINES.card.memory_bytes)).memory.total <= MACHINES.card.memory_bytes
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
    assert "as it is: does not fit; with room " in list(time_report(config_from(settings), MACHINES))[1]


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


def test_a_run_without_a_gpu_scales_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    config = config_from(settings)
    (tmp_path / "config.yaml").write_text(json.dumps({"model": {"path": str(config.model.path)}}))
    check_same_model(tmp_path, config)
    (tmp_path / "environment.json").write_text(json.dumps({"gpus": "NVIDIA H100 80GB HBM3, 81559 MiB, 580.1"}))
    check_same_model(tmp_path, config)
    (tmp_path / "environment.json").write_text(json.dumps({"gpus": None}))
    with pytest.raises(UserError, match="that run had no GPU"):
        check_same_model(tmp_path, config)
