"""`tandem import verl`: every key of published scripts is accounted for, and what comes out is a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main
from tandem.config import yaml12
from tandem.config.load import read_config
from tandem.config.tree import SftConfig, TrainConfig
from tandem.config.verl_keys import COUNTERPARTS
from tandem.errors import UserError
from tandem.importing.outcome import ForeignConfig, Imported, written
from tandem.importing.verl import convert
from tandem.importing.verl_source import read
from tests.conftest import ROOT
from tests.imported import with_local_paths
from tests.sandboxes import sandboxed

PUBLISHED: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/unit/verl_flags.json").read_text())
"""What 25 of verl's example scripts set, by their names."""


def of(values: dict[str, Any], method: str = "ppo") -> Imported:
    return convert(ForeignConfig(method, values))


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


@sandboxed
def test_a_script_is_read_without_running_its_programs(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    found = read(tmp_path / "run.sh")
    assert found.method == "ppo" and found.values == {
        "data.train_files": ["~/a b.parquet", "c.parquet"],
        "data.max_prompt_length": 2049,
        "actor_rollout_ref.model.override_config.attention_dropout": 0.0,
        "actor_rollout_ref.model.path": "~/verl/models/Qwen2.5-32B",
        "data.train_batch_size": 512,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "⟨TP⟩",
        "trainer.logger": ["console", "tensorboard"],
        "trainer.experiment_name": "an experiment",
    }
    made = convert(found)
    assert any("tensor_model_parallel_size=⟨TP⟩" in line for line in made.unsupported)
    assert made.tree["tracking"] == {"tensorboard": True} and made.tree["trainer"]["run_dir"] == "runs/an experiment"


REFUSED = {
    "grpo/run_deepseek671b_math_megatron_96gb": "generation.tensor_parallel:",
    "grpo/run_qwen2-7b_math_megatron_lora": "model.lora:",
}
"""Scripts that ask for what does not run here: an engine on several nodes, adapters on Megatron-Core; the key told."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_script_becomes_a_configuration(name: str, tmp_path: Path) -> None:
    made = of(PUBLISHED[name])
    told = [*made.mapped, *made.without_effect, *made.unsupported]
    assert sorted(line.partition("=")[0] for line in told) == sorted(PUBLISHED[name])
    with_local_paths(made.tree)
    (tmp_path / "config.yaml").write_text(written(made, "verl", name))
    refused = [REFUSED[name]] if name in REFUSED else []
    problems = read_config(TrainConfig, tmp_path / "config.yaml", []).problems
    assert [told.partition(" ")[0] for told in problems] == refused


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "vl-7b" not in name and "multiturn" not in name])
def test_it_passes_a_dry_run_once_it_has_files(name: str, grpo_config: Path, tmp_path: Path) -> None:
    """On one process, with engines that are there and the letters of a tiny tokenizer."""
    tree, ours = of(PUBLISHED[name]).tree, yaml12.read(grpo_config.read_text())
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
    made = of({
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


@pytest.mark.parametrize("critic", ["lora_", "lora."])
def test_a_critic_has_adapters_of_its_own(critic: str) -> None:
    """Whether or not the policy has any; without ppo there is no critic to have them."""
    given = {"rank": 8, "alpha": 32}
    keys = {f"critic.model.{critic}{name}": value for name, value in given.items()}
    keys["critic.model.target_modules"] = ["q_proj"]
    made = of({"algorithm.adv_estimator": "gae", **keys})
    assert made.tree["model"]["critic_lora"] == {**given, "target_modules": ["q_proj"]}
    assert "lora" not in made.tree["model"] and len([line for line in made.mapped if "model.critic_lora." in line]) == 3
    for other in ({"algorithm.adv_estimator": "grpo", **keys}, {**keys, f"critic.model.{critic}rank": 0}):
        made = of(other)
        assert "critic_lora" not in made.tree["model"] and made.unsupported == []
        assert any(line.startswith("critic.model.target_modules=") for line in made.without_effect)


@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (1, 0), (20, 19)])
def test_the_critic_is_warmed_as_many_steps(theirs: int, ours: int) -> None:
    """There the policy learns from the step of that number on, the first of which is 1."""
    made = of({"algorithm.adv_estimator": "gae", "trainer.critic_warmup": theirs})
    assert made.tree["algorithm"].get("critic_warmup_steps", 0) == ours
    assert not [line for line in made.unsupported if "critic_warmup" in line]
    alone = of({"algorithm.adv_estimator": "grpo", "trainer.critic_warmup": 20})
    assert "critic_warmup_steps" not in alone.tree["algorithm"]


def test_values_that_change_something_are_told() -> None:
    given = {"actor_rollout_ref.rollout.ignore_eos": True, "actor_rollout_ref.actor.use_token_level_loss": False}
    rollout = "actor_rollout_ref.rollout."
    made = of({**given, f"{rollout}free_cache_engine": False, f"{rollout}val_kwargs.top_k": -1})
    assert sorted(line.partition("=")[0] for line in made.unsupported) == sorted(given)
    assert made.tree["generation"]["sleep"] == "never"
    assert made.without_effect == [f"{rollout}val_kwargs.top_k=-1: as here"]


@sandboxed
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(
        SCRIPT.rstrip() + " \\\n    algorithm.use_pf_ppo=True actor_rollout_ref.actor.entropy_coeff=0.1\n"
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
        ("ours.yaml.txt", "new.yaml", "no program of verl is started in it"),
    ):
        (tmp_path / "ours.yaml.txt").write_text("echo nothing\n")
        capsys.readouterr()
        assert main(["import", "verl", str(tmp_path / source), "--out", str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err


SFT = """
set -x
if [ "$#" -lt 2 ]; then
    echo "Usage: run.sh <nproc_per_node> <save_path> [other_configs...]"
    exit 1
fi
nproc_per_node=$1
save_path=$2
shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=$HOME/data/train.parquet data.prompt_key=extra_info data.prompt_dict_keys=['question'] \\
    +data.response_dict_keys=['answer'] data.response_key=extra_info data.micro_batch_size_per_gpu=4 \\
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct trainer.default_local_dir=$save_path trainer.logger=console \\
    optim.lr=1e-4 trainer.total_epochs=1 ulysses_sequence_parallel_size=2 use_remove_padding=true $@
"""


@sandboxed
def test_supervised_fine_tuning_is_tandem_sft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SFT)
    command = ["import", "verl", str(tmp_path / "run.sh"), "--out", str(tmp_path / "ours.yaml"), "--"]
    assert main([*command, "4", "there", "model.lora_rank=32"]) == 0
    told = capsys.readouterr().out
    assert "try it: tandem sft" in told and "not supported" not in told
    assert "prompt is its extra_info.question, completion is its extra_info.answer" in told
    tree = yaml12.read((tmp_path / "ours.yaml").read_text())
    assert tree["cluster"] == {"type": "local", "ranks": 4} and tree["trainer"]["run_dir"] == "there"
    assert tree["model"]["lora"] == {"rank": 32, "alpha": 16, "target_modules": "all-linear"}
    assert tree["training"]["optimizer"]["lr"] == 1e-4 and tree["training"]["context_parallel"] == 2
    assert read_config(SftConfig, tmp_path / "ours.yaml", ["model.path=.", "data.train_files=[]"]).problems == []
    without = convert(read(tmp_path / "run.sh"))
    assert [line.split(":")[0] for line in without.unsupported] == [
        "torchrun.nproc_per_node=⟨argument 1⟩", "trainer.default_local_dir=⟨argument 2⟩",
    ]  # fmt: skip


def test_a_rank_that_is_written_out_as_0_beside_the_older_name_keeps_the_adapters() -> None:
    """Whole configurations have both."""
    made = of({"model.lora_rank": 32, "model.lora_alpha": 64, "model.lora.rank": 0, "model.lora.alpha": 32}, "sft")
    assert made.tree["model"]["lora"] == {"rank": 32, "alpha": 64, "target_modules": "all-linear"}


def test_generation_that_runs_ahead_says_how_far() -> None:
    made = of({
        "data.train_batch_size": 0, "data.gen_batch_size": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "async_training.require_batches": 4, "async_training.trigger_parameter_sync_step": 2,
        "async_training.staleness_threshold": 0.5, "async_training.partial_rollout": False,
        "rollout.total_rollout_steps": 51200, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 8,
        "rollout.test_freq": 10,
        "trainer.nnodes": 1, "trainer.n_gpus_per_node": 4, "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 16,
    }, "fully_async")  # fmt: skip
    assert made.tree["data"]["prompts_per_step"] == 256 and made.tree["algorithm"]["minibatches"] == 8
    assert made.tree["trainer"] == {
        "run_dir": "runs/imported", "steps": 200, "max_staleness": 1, "eval_every": 10,
    } and made.tree["generation"]["partial_rollouts"] is False  # fmt: skip
    assert made.tree["placement"]["pools"] == {"training": [4], "generating": [8]} and made.unsupported == []
    assert of({"data.train_batch_size": 64}, "one_step_off").tree["trainer"]["max_staleness"] == 1
    unknown = of({"actor_rollout_ref.actor.ppo_mini_batch_size": "⟨N⟩"}, "fully_async")
    assert unknown.tree["data"]["prompts_per_step"] == 256 * 4 and "only a run" in unknown.unsupported[0]


@pytest.mark.parametrize("method", ["one_step_off", "fully_async"])
def test_log_probs_of_the_old_policy_are_the_trainer_s_where_verl_s_are(method: str) -> None:
    key = "algorithm.rollout_correction.bypass_mode"
    assert of({key: False}, method).tree["algorithm"]["rollout_correction"] == {"skip_old_logprobs": False}
    assert "rollout_correction" not in of({key: True}, method).tree["algorithm"], "which is the default there and here"
    assert of({key: True}).unsupported == [f"{key}=True: not taken over; write {COUNTERPARTS[key]}"]


@sandboxed
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("-m verl.trainer.main_generation", "verl.trainer.main_generation has no counterpart here"),
        ("-m verl.experimental.vla.main_ppo", "verl.experimental.vla.main_ppo has no counterpart here"),
        ("my/own.py", "my.own has no counterpart here; these programs of verl have one: main_ppo"),
    ],
)
def test_programs_without_a_counterpart_are_refused_by_name(program: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python3 {program} data.train_batch_size=8\n")
    with pytest.raises(UserError, match=told):
        read(path)
    if "own" in program:
        assert read(path, "ppo") == ForeignConfig("ppo", {"data.train_batch_size": 8})


@sandboxed
def test_defaults_of_ones_own_are_read_or_told_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        'here=$(cd "$(dirname "$0")" && pwd)\n'
        "python3 -m verl.trainer.main_ppo --config-path=$here/config --config-name=mine data.seed=2\n"
    )
    found = read(path)
    assert found.values == {"data.seed": 2} and "mine.yaml is not there" in found.notes[0]
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text("defaults: [ppo_trainer]\ndata: {seed: 1, train_batch_size: 4}\n")
    assert read(path) == ForeignConfig("ppo", {"data.seed": 2, "data.train_batch_size": 4})
    path.write_text("python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' data.seed=2\n")
    assert convert(read(path)).tree["training"]["type"] == "megatron"


def test_a_teacher_makes_on_policy_distillation() -> None:
    loss, teacher = "distillation.distillation_loss.", "distillation.teacher_models.teacher_model."
    given = {
        "algorithm.adv_estimator": "grpo", "distillation.enabled": True, "distillation.nnodes": 1,
        f"{teacher}model_path": "Qwen/Qwen3-32B", f"{teacher}inference.name": "vllm", f"{loss}loss_mode": "k1",
        f"{loss}use_policy_gradient": True, f"{loss}use_task_rewards": False, f"{loss}topk": 64,
        f"{loss}loss_max_clamp": 10.0,
    }  # fmt: skip
    made = of(given)
    assert made.tree["algorithm"]["type"] == "on_policy_distillation" and "top_k" not in made.tree["algorithm"]
    assert made.tree["model"]["teacher_path"] == "Qwen/Qwen3-32B" and made.notes == []
    assert [line.split("=")[0] for line in made.unsupported] == [f"{loss}loss_max_clamp"]
    by_distribution = of({**given, f"{loss}loss_mode": "forward_kl_topk", f"{loss}use_task_rewards": True,
                          "actor_rollout_ref.rollout.n": 4})  # fmt: skip
    assert by_distribution.tree["algorithm"]["top_k"] == 64 and by_distribution.tree["algorithm"]["reward_weight"] == 1
    several = of({**given, "distillation.teacher_models.other.model_path": "x"})
    assert "there is one teacher here, and 2 are named: Qwen/Qwen3-32B, x: choose" in several.notes


def test_a_reward_model_of_another_tokenizer_needs_no_key() -> None:
    made = of({
        "reward_model.enable": True, "reward_model.model.path": "judge",
        "reward_model.model.input_tokenizer": "policy",
    })  # fmt: skip
    assert made.tree["model"]["reward_model_path"] == "judge" and made.unsupported == []
    (line,) = [line for line in made.without_effect if "input_tokenizer" in line]
    assert line.endswith("it reads the messages by its own tokenizer and chat template")


def test_names_of_newer_versions() -> None:
    made = of({
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4,
        "reward.custom_reward_function.path": "r.py", "reward.custom_reward_function.name": "score",
        "reward.reward_manager.name": "dapo",
        "reward.reward_model.enable": True, "reward.reward_model.model_path": "judge", "model_engine": "megatron",
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": "0.5_5",
    })  # fmt: skip
    assert made.tree["reward"] == {"functions": ["r.py:score"]} and made.tree["model"]["reward_model_path"] == "judge"
    assert made.tree["training"]["type"] == "megatron" and made.unsupported == []
    assert made.tree["algorithm"]["rollout_correction"] == {"type": "mask", "level": "token", "lower": 0.5, "upper": 5}
    truncated = of({"algorithm.rollout_correction.rollout_is": "sequence"}).tree["algorithm"]["rollout_correction"]
    assert truncated == {"type": "truncate", "level": "sequence", "upper": 2.0}
    gdpo = of({"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": '["a", "b"]'}).tree["algorithm"]
    assert gdpo["rewards"] == {"a": 1.0, "b": 1.0}
