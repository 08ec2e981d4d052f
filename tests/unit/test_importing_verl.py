"""`tandem import verl`: every key of published scripts is accounted for, and what comes out is a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main
from tandem.config import yaml12
from tandem.config.load import read_config
from tandem.config.tree import TrainConfig
from tandem.importing.outcome import written
from tandem.importing.shell import read_flags
from tandem.importing.verl import convert, read
from tests.conftest import ROOT
from tests.imported import with_local_paths

PUBLISHED: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/unit/verl_flags.json").read_text())
"""What 25 of verl's example scripts set, by their names."""
SCRIPT = r"""
set -x
prompts=512
lengths=$((1024 * 2))
MODEL=${MODEL:-"${ROOT_DIR:-"${HOME}/verl"}/models/Qwen2.5-32B"}   # a comment; with prompts=1
files="['$HOME/a b.parquet', 'c.parquet']"
DATA=(
    data.train_files="$files"
    data.max_prompt_length=$((lengths + 1))
)
if [ "$1" = small ]; then
    prompts=1
fi
ray job submit -- python3 -m verl.trainer.main_ppo "${DATA[@]}" \
    +actor_rollout_ref.model.override_config.attention_dropout=0. \
    actor_rollout_ref.model.path="${MODEL}" data.train_batch_size=${prompts} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$TP \
    trainer.logger=['console','tensorboard'] trainer.experiment_name='an experiment' $@
"""


def test_a_script_is_read_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    assert read(tmp_path / "run.sh") == {
        "data.train_files": ["~/a b.parquet", "c.parquet"],
        "data.max_prompt_length": 2049,
        "actor_rollout_ref.model.override_config.attention_dropout": 0.0,
        "actor_rollout_ref.model.path": "~/verl/models/Qwen2.5-32B",
        "data.train_batch_size": 512,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "<TP>",
        "trainer.logger": ["console", "tensorboard"],
        "trainer.experiment_name": "an experiment",
    }
    made = convert(read(tmp_path / "run.sh"))
    assert any("tensor_model_parallel_size=<TP>" in line for line in made.unsupported)
    assert made.tree["tracking"] == {"tensorboard": True} and made.tree["trainer"]["run_dir"] == "runs/an experiment"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_script_becomes_a_configuration(name: str, tmp_path: Path) -> None:
    made = convert(PUBLISHED[name])
    told = [*made.mapped, *made.without_effect, *made.unsupported]
    assert sorted(line.partition("=")[0] for line in told) == sorted(PUBLISHED[name])
    with_local_paths(made.tree)
    (tmp_path / "config.yaml").write_text(written(made, "verl", name))
    assert read_config(TrainConfig, tmp_path / "config.yaml", []).problems == []


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "vl-7b" not in name and "multiturn" not in name])
def test_it_passes_a_dry_run_once_it_has_files(name: str, grpo_config: Path, tmp_path: Path) -> None:
    """On one process, with engines that are there and the letters of a tiny tokenizer."""
    tree, ours = convert(PUBLISHED[name]).tree, yaml12.read(grpo_config.read_text())
    tree["model"] = {"path": ours["model"]["path"]}
    tree["data"] |= {key: ours["data"][key] for key in ("train_files", "val_files")}
    tree["reward"], tree["cluster"] = ours["reward"], {"type": "local"}
    tree.pop("placement", None)
    tree.pop("tracking", None)
    tree["generation"] |= {"type": "native"}
    for key in ("tensor_parallel", "memory_share", "engine_args", "sleep"):
        tree["generation"].pop(key, None)
    tree["training"] = {"type": "fsdp", "optimizer": tree["training"]["optimizer"]}
    tree["trainer"]["run_dir"] = str(tmp_path / "run")
    tree["data"]["max_prompt_tokens"], tree["generation"]["max_response_tokens"] = 32, 16
    (tmp_path / "imported.yaml").write_text(yaml12.write(tree))
    assert main(["train", str(tmp_path / "imported.yaml"), "--dry-run"]) == 0


def test_values_are_what_they_were() -> None:
    """DAPO's settings, as its script has them."""
    made = convert({
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 16, "data.train_batch_size": 512,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32, "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28, "actor_rollout_ref.actor.clip_ratio_c": 10.0,
        "algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 10,
        "data.max_response_length": 20480, "data.max_prompt_length": 2048,
        "reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 4096,
        "actor_rollout_ref.actor.use_dynamic_bsz": True, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 22528,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 8, "trainer.nnodes": 16, "trainer.n_gpus_per_node": 8,
        "actor_rollout_ref.actor.optim.lr": 1e-6, "actor_rollout_ref.actor.optim.weight_decay": 0.1,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 10, "actor_rollout_ref.rollout.top_k": -1,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True, "actor_rollout_ref.rollout.val_kwargs.n": 32,
    })  # fmt: skip
    tree = made.tree
    assert tree["algorithm"] == {
        "type": "grpo", "group_size": 16, "minibatches": 16, "resample_rounds": 10, "overlong_buffer": 0.2,
        "loss": {"type": "clip", "clip_ratio_high": 0.28, "dual_clip": 10.0},
    }  # fmt: skip
    assert tree["training"]["tokens_per_micro_batch"] == 22528 * 8 and tree["training"]["context_parallel"] == 8
    assert tree["training"]["optimizer"] == {"lr": 1e-6, "weight_decay": 0.1, "warmup_steps": 10}
    assert tree["generation"]["eval"] == {"temperature": 1.0, "samples": 32} and "top_k" not in tree["generation"]
    assert tree["placement"] == {"pools": {"main": [8] * 16}} and made.unsupported == []


@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (1, 0), (20, 19)])
def test_the_critic_is_warmed_as_many_steps(theirs: int, ours: int) -> None:
    """There the policy learns from the step of that number on, the first of which is 1."""
    made = convert({"algorithm.adv_estimator": "gae", "trainer.critic_warmup": theirs})
    assert made.tree["algorithm"].get("critic_warmup_steps", 0) == ours
    assert not [line for line in made.unsupported if "critic_warmup" in line]
    alone = convert({"algorithm.adv_estimator": "grpo", "trainer.critic_warmup": 20})
    assert "critic_warmup_steps" not in alone.tree["algorithm"]


def test_values_that_change_something_are_told() -> None:
    given = {"actor_rollout_ref.rollout.ignore_eos": True, "actor_rollout_ref.actor.use_token_level_loss": False}
    rollout = "actor_rollout_ref.rollout."
    made = convert({**given, f"{rollout}free_cache_engine": False, f"{rollout}val_kwargs.top_k": -1})
    assert sorted(line.partition("=")[0] for line in made.unsupported) == sorted(given)
    assert made.tree["generation"]["sleep"] == "never"
    assert made.without_effect == [f"{rollout}val_kwargs.top_k=-1: as here"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(
        SCRIPT + "    algorithm.use_pf_ppo=True actor_rollout_ref.actor.entropy_coeff=0.1\n"
    )
    (tmp_path / "verl.yaml").write_text("data: {train_batch_size: 8}\nalgorithm: {adv_estimator: rloo}\n")
    assert main(["import", "verl", str(tmp_path / "run.sh"), "--out", str(tmp_path / "ours.yaml")]) == 0
    told = capsys.readouterr().out
    assert "not supported: 2" in told and "algorithm.use_pf_ppo=True: there is no counterpart here" in told
    assert "attention_dropout=0.0: every dropout is 0" in told
    assert "entropy_coefficient: 0.1" in (tmp_path / "ours.yaml").read_text()
    assert main(["import", "verl", str(tmp_path / "verl.yaml"), "--out", str(tmp_path / "second.yaml")]) == 0
    assert yaml12.read((tmp_path / "second.yaml").read_text())["algorithm"]["group_size"] == 8
    for source, out, message in (
        ("run.sh", "ours.yaml", "ours.yaml: it is there already"),
        ("none.sh", "new.yaml", "none.sh: it cannot be read"),
        ("ours.yaml.txt", "new.yaml", "no key=value of another framework"),
    ):
        (tmp_path / "ours.yaml.txt").write_text("echo nothing\n")
        capsys.readouterr()
        assert main(["import", "verl", str(tmp_path / source), "--out", str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err


def test_flags_of_a_script_that_closes_its_quotes_in_its_own_way(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text('python3 -m verl.trainer.main_ppo data.seed=1 trainer.nnodes=2"\n')
    assert read_flags(tmp_path / "run.sh") == {"data.seed": "1", "trainer.nnodes": "2"}
