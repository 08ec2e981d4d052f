"""The step time and the placements of a configuration."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.hardware import parse_machines
from tandem.planning.placements import costs_of, measured_scales, sets_of, time_report, workload_of
from tandem.planning.roles import moments
from tandem.planning.search import evaluate
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
    seconds = [float(line.split(". ")[1].split(" s:")[0]) for line in lines[2:-1]]
    assert seconds == sorted(seconds)
    assert "the first wins" in lines[-1]


def test_pools_are_the_sets_and_stale_generation_runs_beside(settings: dict[str, Any]) -> None:
    settings["cluster"] = {"type": "ray"}
    settings["placement"] = {"pools": {"train": [8], "serve": [8]}, "roles": {"rollout": "serve"}}
    settings["trainer"]["max_staleness"] = 1
    config = config_from(settings)
    assert list(sets_of(config).values()) == [8, 8]
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
    costs = costs_of(config, MACHINES, workload_of(config, None), as_it_is=True)
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
    costs = costs_of(config, MACHINES, workload_of(config, None))
    layouts = costs.layouts(costs.models["actor"].shape, 16)
    assert [layout.context for layout in layouts] == [1, 2, 4], "36 heads"


def test_a_run_scales_each_stage_by_what_it_measured(settings: dict[str, Any], tmp_path: Path) -> None:
    config = config_from(settings)
    work = workload_of(config, None)
    here = evaluate(costs_of(config, MACHINES, work, as_it_is=True), sets_of(config))
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
    scaled = evaluate(costs_of(config, MACHINES, work, as_it_is=True, scales=scales), sets_of(config))
    assert scaled is not None
    assert scaled.times == pytest.approx((2 * generation, 3 * preparation, update))
    assert list(time_report(config, MACHINES, run=tmp_path))


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
    assert list(sets_of(config_from(settings)).values()) == [1]
