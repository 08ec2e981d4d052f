"""`tandem import openrlhf`: every argument of published scripts is accounted for; what comes out is a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main
from tandem.config import yaml12
from tandem.config.load import read_config
from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.importing.openrlhf import COMMANDS, convert, read
from tandem.importing.outcome import ForeignConfig, written
from tests.conftest import ROOT
from tests.imported import with_local_paths

PUBLISHED: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/unit/openrlhf_flags.json").read_text())
"""What OpenRLHF's example scripts set, by their names."""
KINDS = {"train": TrainConfig, "sft": SftConfig, "dpo": DpoConfig, "reward-model": RewardModelConfig}
QUOTED = r"""
srun --nodes=1 bash -c \
"pip install ray \
&& ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \
    --actor.num_nodes 2 --actor.num_gpus_per_node 4 \
    --actor.eps_clip_low_high 0.2 0.27 \
    --algo.kl.use_loss --algo.kl.init_coef 1e-3" &>> log
"""
IN_A_DOCUMENT = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --model.beta 0.2 \\
   --data.max_len 4096
EOF
deepspeed --module $training_commands
"""
OLDER = """
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen3-4B --advantage_estimator group_norm \\
   --prompt_max_len 1024 --generate_max_len 3072 --n_samples_per_prompt 8 --actor_learning_rate 2e-6 --use_wandb {token}
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_script_becomes_a_configuration(name: str, tmp_path: Path) -> None:
    source = ForeignConfig(**PUBLISHED[name])
    made = convert(source)
    told = [*made.mapped, *made.without_effect, *made.unsupported]
    assert sorted(line.partition("=")[0] for line in told) == sorted(source.values)
    with_local_paths(made.tree)
    (tmp_path / "config.yaml").write_text(written(made, "openrlhf", name))
    assert read_config(KINDS[COMMANDS[source.method]], tmp_path / "config.yaml", []).problems == []


@pytest.mark.parametrize("name", [name for name in PUBLISHED if PUBLISHED[name]["method"] == "ppo_ray"])
def test_it_passes_a_dry_run_once_it_has_files(name: str, grpo_config: Path, tmp_path: Path) -> None:
    """On one process, with engines that are there and the letters of a tiny tokenizer."""
    tree, ours = convert(ForeignConfig(**PUBLISHED[name])).tree, yaml12.read(grpo_config.read_text())
    tree["model"], tree["reward"] = {"path": ours["model"]["path"]}, ours["reward"]
    tree["data"] |= {"train_files": ours["data"]["train_files"], "val_files": [], "max_prompt_tokens": 32}
    for section in ("cluster", "placement", "tracking"):
        tree.pop(section, None)
    tree["training"].pop("context_parallel", None)
    tree["generation"] = {"type": "native", "max_response_tokens": 16}
    tree["trainer"] |= {"run_dir": str(tmp_path / "run"), "eval_every": 0}
    (tmp_path / "imported.yaml").write_text(yaml12.write(tree))
    assert main(["train", str(tmp_path / "imported.yaml"), "--dry-run"]) == 0


def test_scripts_are_read_without_running_them(tmp_path: Path) -> None:
    (tmp_path / "quoted.sh").write_text(QUOTED)
    assert read(tmp_path / "quoted.sh") == ForeignConfig("ppo_ray", {
        "actor.num_nodes": 2, "actor.num_gpus_per_node": 4, "actor.eps_clip_low_high": [0.2, 0.27],
        "algo.kl.use_loss": True, "algo.kl.init_coef": 1e-3,
    })  # fmt: skip
    (tmp_path / "document.sh").write_text(IN_A_DOCUMENT)
    assert read(tmp_path / "document.sh") == ForeignConfig("dpo", {"model.beta": 0.2, "data.max_len": 4096})


def test_values_are_what_they_were(tmp_path: Path) -> None:
    """Those of the DAPO script, and of one with the names of older versions."""
    tree = convert(ForeignConfig(**PUBLISHED["train_dapo_ray_hybrid_engine"])).tree
    assert tree["algorithm"] == {
        "type": "grpo", "group_size": 8, "minibatches": 8, "resample_rounds": 100,
        "loss": {"type": "clip", "clip_ratio_low": 0.2, "clip_ratio_high": 0.27},
        "kl": {"place": "loss", "coefficient": 1e-3, "estimator": "k3"},
        "rollout_correction": {"type": "truncate", "upper": 5.0},
    }  # fmt: skip
    assert tree["generation"] == {
        "type": "vllm", "max_response_tokens": 1024, "tensor_parallel": 2, "memory_share": 0.6,
        "engine_args": {"enforce_eager": True},
    }  # fmt: skip
    assert tree["training"]["optimizer"] == {
        "lr": 5e-7, "betas": [0.9, 0.95], "schedule": "cosine", "min_lr_ratio": 0.1,
    }  # fmt: skip
    (tmp_path / "older.sh").write_text(OLDER)
    older = convert(read(tmp_path / "older.sh"))
    assert older.tree["algorithm"]["type"] == "grpo" and older.tree["model"]["path"] == "Qwen/Qwen3-4B"
    assert older.tree["data"]["max_prompt_tokens"], older.tree["generation"]["max_response_tokens"] == (1024, 3072)
    assert older.tree["training"]["optimizer"]["lr"] == 2e-6 and older.tree["tracking"] == {"wandb": True}
    assert "{token}" not in yaml12.write(older.tree) and older.unsupported == []


@pytest.mark.parametrize(
    ("key", "metric", "notes"),
    [
        ("eval_default_pass1", "val/default/reward/mean@2", 0),
        ("eval_math_pass1", "val/math/reward/mean@2", 1),
        ("", "val/default/reward/mean@2", 1),
        ("none", None, 0),
        ("eval_math_pass2", None, 0),
    ],
)
def test_the_best_checkpoint_is_kept_by_the_metric_of_ours(key: str, metric: str | None, notes: int) -> None:
    values = {"eval.steps": 5, "eval.dataset": "a/b", "eval.n_samples_per_prompt": 2, "ckpt.best_metric_key": key}
    made = convert(ForeignConfig("ppo_ray", values))
    assert made.tree["trainer"].get("best_metric") == metric and made.tree["trainer"]["eval_every"] == 5
    assert sum(note.startswith("trainer.best_metric: ") for note in made.notes) == notes
    told = [line for line in made.unsupported if "best" in line]
    assert bool(told) is (key == "eval_math_pass2")
    assert told == [] or told[0].endswith("not taken over; write trainer.best_metric, as val/default/reward/mean@N")
    del values["eval.steps"]
    never = convert(ForeignConfig("ppo_ray", values))
    assert "best_metric" not in never.tree["trainer"]
    assert [line for line in never.without_effect if "OpenRLHF does not evaluate without eval.steps" in line]


RM = """
deepspeed --module openrlhf.cli.train_rm --pretrain Qwen/Qwen3-4B --dataset org/pairs --lora_rank 32 --lora_alpha 64 \\
   --target_modules q_proj v_proj
"""


def test_reward_models_and_critics_have_the_adapters_of_their_script(tmp_path: Path) -> None:
    (tmp_path / "rm.sh").write_text(RM)
    made = convert(read(tmp_path / "rm.sh"))
    lora = {"rank": 32, "alpha": 64, "target_modules": ["q_proj", "v_proj"]}
    assert made.tree["model"]["lora"] == lora and made.unsupported == []
    (tmp_path / "rm.yaml").write_text(written(made, "openrlhf", "rm.sh"))
    settings = ["model.path=.", "data.train_files=[]"]
    assert read_config(RewardModelConfig, tmp_path / "rm.yaml", settings).problems == []
    values = {"ds.lora.rank": 32, "ds.lora.alpha": 64, "ds.lora.target_modules": ["q_proj", "v_proj"]}
    made = convert(ForeignConfig("ppo_ray", {**values, "algo.advantage.estimator": "gae"}))
    assert made.tree["model"]["critic_lora"] == made.tree["model"]["lora"] == lora
    assert "ds.lora.rank=32: model.lora.rank and model.critic_lora.rank" in made.mapped
    made = convert(ForeignConfig("ppo_ray", {**values, "algo.advantage.estimator": "rloo"}))
    assert "critic_lora" not in made.tree["model"] and "ds.lora.rank=32: model.lora.rank" in made.mapped


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quoted.sh").write_text(QUOTED)
    (tmp_path / "other.sh").write_text("python -m openrlhf.cli.train_kd --x 1\n")
    (tmp_path / "empty.sh").write_text("ls\n")
    assert main(["import", "openrlhf", str(tmp_path / "quoted.sh"), "--out", str(tmp_path / "ours.yaml")]) == 0
    assert yaml12.read((tmp_path / "ours.yaml").read_text())["placement"] == {"pools": {"main": [4, 4]}}
    for source, message in (
        ("other.sh", "other.sh: train_kd has no counterpart here; these have one: ppo_ray, sft, dpo, rm"),
        ("empty.sh", "empty.sh: no openrlhf.cli.train_… is started in it"),
    ):
        capsys.readouterr()
        assert main(["import", "openrlhf", str(tmp_path / source), "--out", str(tmp_path / "new.yaml")]) == 2
        assert message in capsys.readouterr().err
