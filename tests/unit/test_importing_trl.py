"""`tandem import trl`: every argument of published scripts is accounted for, and what comes out is a configuration."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main
from tandem.config import yaml12
from tandem.config.load import read_config
from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.errors import UserError
from tandem.importing.outcome import ForeignConfig, Imported, written
from tandem.importing.trl import COMMANDS, convert
from tandem.importing.trl_source import read
from tests.conftest import ROOT
from tests.imported import with_local_paths
from tests.sandboxes import sandboxed

PUBLISHED: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/unit/trl_flags.json").read_text())
"""What TRL's example scripts, and the command lines of its documents, set, by their names."""
RUNS = [name for name in PUBLISHED if PUBLISHED[name]["method"] in COMMANDS]
KINDS = {"train": TrainConfig, "sft": SftConfig, "dpo": DpoConfig, "reward-model": RewardModelConfig}
SCRIPT = r"""
MODEL=Qwen/Qwen3-0.6B
pip install num2words
accelerate launch --config_file zero3.yaml --num_processes 4 \
    examples/scripts/gspo.py --model_name_or_path $MODEL --no_remove_unused_columns \
    --lora_target_modules "q_proj", "v_proj" --use_peft --learning-rate=1e-5 --log_completions \
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --steps_per_generation 8 --max_steps 90
trl sft --learning_rate 1
"""
PYTHON = """
import torch
from trl import GRPOConfig, GRPOTrainer
model_id = "Qwen/Qwen3-4B"

def longer(completions, **kwargs):
    return [len(c) for c in completions]

if __name__ == "__main__":
    parser.add_argument("--max-steps", type=int, default=12)
    parser.add_argument("--quiet", action="store_true")
    settings = GRPOConfig(output_dir="out", max_steps=args.max_steps, bf16=not args.quiet, epsilon=-1 + 1.3,
                          model_init_kwargs={"dtype": torch.bfloat16}, disable_tqdm=args.quiet)
    GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(model_id), args=settings,
                reward_funcs=[longer, accuracy_reward], train_dataset=load_dataset("trl-lib/tldr", split="train"),
                peft_config=LoraConfig(r=8))
"""
REWARD = """
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]
"""
AT_TOP = """
training_args = GRPOConfig(output_dir="out", logging_steps=10)
trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=reward_len, args=training_args,
                      train_dataset=load_dataset("trl-lib/tldr", split="train"))
trainer.train()
"""
IN_MAIN = "def main():" + AT_TOP.replace("\n", "\n    ")


@pytest.fixture(scope="module")
def rows(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By command, files of a few rows: a dry run reads, and turns into tokens, whatever it is given."""
    folder = tmp_path_factory.mktemp("rows")
    for name in ("sft", "train"):
        with (sort4 / f"{name}.jsonl").open() as file:
            (folder / f"{name}.jsonl").write_text("".join(islice(file, 64)))
    pairs = folder / "pairs.jsonl"
    pairs.write_text('{"prompt": "1=", "chosen": "1", "rejected": "2"}\n' * 3)
    of = {"train": [f"{folder}/train.jsonl"], "sft": [f"{folder}/sft.jsonl"]}
    return {command: of.get(command, [str(pairs)]) for command in KINDS}


def test_a_script_is_read_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    source = read(tmp_path / "run.sh", command=1)
    assert source.method == "grpo" and source.values == {
        "launcher.num_processes": 4, "model_name_or_path": "Qwen/Qwen3-0.6B", "remove_unused_columns": False,
        "lora_target_modules": ["q_proj", "v_proj"], "use_peft": True, "learning_rate": 1e-5, "log_completions": True,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 8, "max_steps": 90,
    }  # fmt: skip
    assert read(tmp_path / "run.sh", "dpo", command=1).method == "dpo"
    (tmp_path / "more.yaml").write_text("beta: 0.2\nlearning_rate: 3\n")
    (tmp_path / "second.sh").write_text("trl dpo --config more.yaml --learning_rate 2e-6\n")
    assert read(tmp_path / "second.sh").values == {"beta": 0.2, "learning_rate": 2e-6}


def test_a_python_script_is_read_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PYTHON)
    values = read(path).values
    assert values == {
        "output_dir": "out", "max_steps": 12, "bf16": "⟨not args.quiet⟩", "epsilon": "⟨-1 + 1.3⟩",
        "disable_tqdm": False, "model_init_kwargs": {"dtype": "bfloat16"}, "model_name_or_path": "Qwen/Qwen3-4B",
        "dataset_name": "trl-lib/tldr", "dataset_train_split": "train", "use_peft": True, "lora_r": 8,
        "reward_funcs": [f"{path}:longer", "accuracy_reward"],
    }  # fmt: skip
    made = convert(read(path))
    assert made.tree["reward"]["functions"] == [f"{path}:longer", "trl.rewards:accuracy_reward"]
    assert [line for line in made.unsupported if line.startswith("epsilon=⟨-1 + 1.3⟩: only a run")]


def test_a_script_that_trains_when_it_is_imported_gives_no_reward_function(
    grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out, ran = tmp_path / "train.py", tmp_path / "ours.yaml", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'w')\n{REWARD}{AT_TOP}")
    assert main(["import", "trl", str(script), "--out", str(out)]) == 0
    told = f"reward.functions: reward_len of {script}: to import the file runs its line 6, GRPOConfig(…); move"
    assert told in capsys.readouterr().out and told in out.read_text()
    ours, tree = yaml12.read(grpo_config.read_text()), yaml12.read(out.read_text())
    assert tree["reward"] == {"functions": ["REWARDS.py:reward_len"]}
    model, rows = ours["model"]["path"], ours["data"]["train_files"]
    given = [f"model.path={model}", f"data.train_files={json.dumps(rows)}", f"trainer.run_dir={tmp_path / 'run'}"]
    assert main(["train", str(out), *given, "--dry-run"]) == 2
    assert "REWARDS.py" in capsys.readouterr().err and not ran.exists()


OWN = """
import argparse
from rewards import format_reward as well_formed
from elsewhere.rules import right

def main(beta=0.9):
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--gens", type=int, default=8)
    parser.add_argument("--rate", dest="lr", default=1e-5)
    parser.add_argument("--resume")
    parser.add_argument("--no-peft", dest="peft", action="store_false")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--rows", type=int, default=10)
    given, _ = parser.parse_known_args()
    first = given.rows
    steps: int = 70
    seed = 1
    seed += 1
    GRPOTrainer("m", args=GRPOConfig(learning_rate=given.lr, num_generations=given.gens, beta=beta, max_steps=steps,
                seed=seed, use_peft=given.peft, fp16=given.half), reward_funcs=[well_formed, right, length(3)])

if __name__ == "__main__":
    main()
"""


def test_names_that_are_bound_twice_are_marked_and_options_of_a_parser_are_read(tmp_path: Path) -> None:
    path = tmp_path / "grpo.py"
    path.write_text(OWN)
    (tmp_path / "rewards.py").write_text("def format_reward(completions, **row): ...\n")
    assert read(path).values == {
        "learning_rate": 1e-5, "num_generations": 8, "beta": "⟨beta⟩", "max_steps": 70, "seed": "⟨seed⟩",
        "use_peft": True, "fp16": False, "model_name_or_path": "m",
        "reward_funcs": [f"{tmp_path / 'rewards.py'}:format_reward", "elsewhere.rules.right", "length(3)"],
    }  # fmt: skip
    made = convert(read(path))
    assert made.tree["reward"]["functions"][1:] == ["elsewhere.rules:right", "REWARDS.py:length(3)"]
    assert any("write the file that has length(3) in the place of REWARDS.py" in note for note in made.notes)


@sandboxed
@pytest.mark.parametrize("name", ["grpo.py", "mine.py"])
def test_a_launch_script_gives_arguments_to_a_python_script_of_one_s_own(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(OWN)
    run = tmp_path / "run.sh"
    run.write_text(
        f"accelerate launch --num_processes 2 {name} -n 4 --rate $LR --rows 5 --resume last --no-peft --half\n"
    )
    values = read(run).values
    assert values["num_generations"] == 4 and values["learning_rate"] == "⟨LR⟩" and values["max_steps"] == 70
    assert values["use_peft"] is False and values["fp16"] is True and values["launcher.num_processes"] == 2
    assert {key: value for key, value in values.items() if key.startswith("--")} == {"--resume": "last", "--rows": 5}


@sandboxed
def test_a_configuration_that_the_launch_script_writes_is_read(tmp_path: Path) -> None:
    run = tmp_path / "run.sh"
    run.write_text(
        "mkdir -p out/$RUN\ncat > out/one.yaml <<EOF\nbeta: ${BETA:-0.2}\noutput_dir: /models/$RUN\nEOF\n"
        "accelerate launch --num_processes 2 -m trl.scripts.dpo --config out/one.yaml --seed 3\n"
    )
    values = read(run).values
    assert values == {"launcher.num_processes": 2, "beta": 0.2, "output_dir": "/models/⟨RUN⟩", "seed": 3}


@pytest.mark.parametrize(
    ("rest", "line"),
    [
        (AT_TOP, 5),
        (f"{IN_MAIN}\nmain()", 10),
        (f"{IN_MAIN}\nif not main():\n    raise SystemExit", 10),
        (f"{IN_MAIN}\nif __name__ == '__main__':\n    main()\nelse:\n    main()", 13),
        (f"args = GRPOParser().parse_args()\n{IN_MAIN}", 4),
        (f"rows = Dataset.from_dict({{}})\n{IN_MAIN}", 4),
        (f"model = transformers.AutoModel.from_pretrained('m')\n{IN_MAIN}", 4),
        (f"tokenizer = AutoTokenizer.from_pretrained('m')\nparser = ArgumentParser()\n{IN_MAIN}", None),
        (f"{IN_MAIN}\nif __name__ == '__main__':\n    main()", None),
        (f"{IN_MAIN}\nif '__main__' == __name__:\n    main()", None),
    ],
)
def test_what_an_import_of_the_script_would_run(rest: str, line: int | None, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(REWARD + rest)
    source = read(path)
    assert source.values["reward_funcs"] == ["reward_len" if line else f"{path}:reward_len"]
    assert [f"runs its line {line}, " in note for note in source.notes] == ([True] if line else [])


@pytest.mark.parametrize(
    ("call", "method", "expected"),
    [
        ("GRPOTrainer(model=MODEL, reward_funcs=accuracy_reward, train_dataset=rows)", "grpo", {"lr": 1e-6}),
        ("RLOOTrainer(MODEL, accuracy_reward, train_dataset=rows)", "rloo", {"lr": 1e-6}),
        ("SFTTrainer(model=MODEL, train_dataset=rows)", "sft", {"lr": 2e-5}),
        ("trl.DPOTrainer(MODEL, None, None, train_dataset=rows)", "dpo", {"lr": 1e-6}),
        ("KTOTrainer(model=MODEL, args=KTOConfig(), train_dataset=rows)", "kto", {"lr": 1e-6}),
        ("RewardTrainer(model=MODEL, args=None, train_dataset=rows)", "reward", {"lr": 1e-4}),
    ],
)
def test_a_trainer_without_arguments_has_those_of_its_configuration_class(
    call: str, method: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"MODEL = 'Qwen/Qwen3-0.6B'\nrows = load_dataset('trl-lib/tldr', split='train')\n{call}.train()\n")
    source = read(path)
    made = convert(source)
    assert source.method == method and made.tree["model"]["path"] == "Qwen/Qwen3-0.6B"
    assert made.tree["training"]["optimizer"] == {**expected, "schedule": "linear"}
    assert made.tree["data"]["train_files"] == ["hub:trl-lib/tldr[train]"] and made.tree["trainer"]["epochs"] == 3
    assert made.tree.get("reward") == (
        {"functions": ["trl.rewards:accuracy_reward"]} if method in ("grpo", "rloo") else None
    )
    assert made.unsupported == []


@pytest.mark.parametrize("call", ["SFTTrainer(MODEL, args=args)", "SFTTrainer(MODEL, args)", "SFTTrainer(**given)"])
def test_a_trainer_whose_arguments_nobody_knows_has_no_defaults(call: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"args = parser.parse_args_and_config()\n{call}.train()\n")
    with pytest.raises(UserError, match="no trainer of TRL is started in it"):
        read(path)
    path.write_text(f"'''\npython train_sft.py --learning_rate 0.5\n'''\n{path.read_text()}")
    assert read(path, "sft").values == {"learning_rate": 0.5}


BEST: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sft", {"load_best_model_at_end": True}, {"best_metric": "val/loss"}),
    ("sft", {"metric_for_best_model": "eval_loss"}, {"best_metric": "val/loss"}),
    ("sft", {"metric_for_best_model": "loss", "greater_is_better": False}, {"best_metric": "val/loss"}),
    ("dpo", {"load_best_model_at_end": True, "metric_for_best_model": "eval_rewards/accuracies"},
     {"best_metric": "val/accuracy"}),
    ("dpo", {"metric_for_best_model": "rewards/margins", "greater_is_better": False},
     {"best_metric": "val/margin", "best_mode": "min"}),
    ("dpo", {"metric_for_best_model": "loss", "greater_is_better": True},
     {"best_metric": "val/loss", "best_mode": "max"}),
    ("orpo", {"metric_for_best_model": "eval_log_odds_chosen"}, {"best_metric": "val/margin"}),
    ("kto", {"load_best_model_at_end": True}, {"best_metric": "val/loss"}),
    ("reward", {"metric_for_best_model": "eval_accuracy"}, {"best_metric": "val/accuracy"}),
    ("reward", {"metric_for_best_model": "margin", "save_strategy": "best"}, {"best_metric": "val/margin"}),
    ("grpo", {"metric_for_best_model": "eval_reward", "greater_is_better": True, "num_generations_eval": 2},
     {"best_metric": "val/default/reward/mean@2"}),
    ("grpo", {"metric_for_best_model": "eval_rewards/accuracy_reward/mean"},
     {"best_metric": "val/default/reward/mean@8"}),
    ("rloo", {"metric_for_best_model": "reward", "num_generations": 4}, {"best_metric": "val/default/reward/mean@4"}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "values", "expected"), BEST)
def test_the_best_checkpoint_is_kept_by_the_metric_of_ours(
    method: str, values: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    evaluates = {"eval_strategy": "steps", "eval_steps": 5}
    rewards = {"reward_funcs": ["accuracy_reward"]} if method in ("grpo", "rloo") else {}
    made = convert(ForeignConfig(method, {**evaluates, **rewards, **values}))
    trainer = made.tree["trainer"]
    assert {key: value for key, value in trainer.items() if key.startswith("best")} == expected
    assert made.unsupported == [] and trainer["eval_every"] == 5
    assert trainer.get("save_every", 0) == (0 if "save_strategy" in values else 500)
    for key, value in values.items():
        assert any(line.startswith(f"{key}={value}: ") for line in made.mapped)
    with_local_paths(made.tree)
    (tmp_path / "config.yaml").write_text(written(made, "trl", method))
    assert read_config(KINDS[COMMANDS[method]], tmp_path / "config.yaml", []).problems == []

    never = convert(ForeignConfig(method, {**rewards, **values}))
    assert "best_metric" not in never.tree["trainer"]
    told = "TRL does not evaluate without eval_strategy: steps or epoch"
    best = [key for key in values if not key.startswith("num_generations") or key == "num_generations_eval"]
    assert {f"{key}={values[key]}: {told}" for key in best} <= set(never.without_effect)


@pytest.mark.parametrize(
    ("method", "values", "told"),
    [
        ("grpo", {"load_best_model_at_end": True},
         ["load_best_model_at_end=True: not taken over; write a metric that there is here, as trainer.best_metric "
          "(val/<source>/reward/mean@8); loss is none"]),
        ("grpo", {"metric_for_best_model": "eval_completions/mean_length", "greater_is_better": True},
         ["metric_for_best_model=eval_completions/mean_length: not taken over; write a metric that there is here, as "
          "trainer.best_metric (val/<source>/reward/mean@8); completions/mean_length is none",
          "greater_is_better=True: not taken over; write trainer.best_mode"]),
        ("sft", {"metric_for_best_model": "eval_mean_token_accuracy"},
         ["metric_for_best_model=eval_mean_token_accuracy: not taken over; write a metric that there is here, as "
          "trainer.best_metric (val/loss); mean_token_accuracy is none"]),
        ("kto", {"metric_for_best_model": "eval_rewards/margins"},
         ["metric_for_best_model=eval_rewards/margins: not taken over; write a metric that there is here, as "
          "trainer.best_metric (val/loss); rewards/margins is none"]),
        ("sft", {"load_best_model_at_end": True, "metric_for_best_model": "⟨args.metric⟩"},
         ["load_best_model_at_end=True: not taken over; write trainer.best_metric",
          "metric_for_best_model=⟨args.metric⟩: only a run of the script would tell; write its value in yourself"]),
        ("sft", {"load_best_model_at_end": False, "greater_is_better": False}, []),
    ],
)  # fmt: skip
def test_a_metric_without_counterpart_keeps_no_best_checkpoint(
    method: str, values: dict[str, Any], told: list[str]
) -> None:
    rewards = {"reward_funcs": ["accuracy_reward"]} if method == "grpo" else {}
    made = convert(ForeignConfig(method, {"eval_strategy": "steps", **rewards, **values}))
    assert "best_metric" not in made.tree["trainer"] and made.unsupported == told


@pytest.mark.parametrize(
    ("rows", "source", "note"),
    [
        ([{"data_source": "sums"}], "sums", None),
        ([{"prompt": "1"}], "default", None),
        ([{"data_source": "sums"}, {"data_source": "maths"}], "maths", "rows of data_source maths alone; sums have"),
        ([], "default", "default is the data_source of rows without that column"),
    ],
)
def test_the_best_metric_is_of_the_data_source_of_the_rows(
    rows: list[Any], source: str, note: str | None, tmp_path: Path
) -> None:
    """Of files that are there; no row is one that is not."""
    path = tmp_path / "val.jsonl"
    if rows:
        path.write_text("\n".join(map(json.dumps, rows)))
    values = {"eval_strategy": "steps", "metric_for_best_model": "eval_reward", "eval_data_files": [str(path)]}
    made = convert(ForeignConfig("grpo", values))
    assert made.tree["trainer"]["best_metric"] == f"val/{source}/reward/mean@8"
    notes = [one for one in made.notes if one.startswith("trainer.best_metric: ")]
    assert len(notes) == (note is not None) and all(note in one for one in notes if note)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_script_becomes_a_configuration(name: str, tmp_path: Path) -> None:
    source = ForeignConfig(**PUBLISHED[name])
    if source.method not in COMMANDS:
        with pytest.raises(UserError, match=f"TRL's {source.method} has no counterpart here; these have one: sft, dpo"):
            convert(source)
        return
    made = convert(source)
    told = [*made.mapped, *made.without_effect, *made.unsupported]
    assert sorted(line.partition("=")[0] for line in told) == sorted(source.values)
    with_local_paths(made.tree)
    (tmp_path / "config.yaml").write_text(written(made, "trl", name))
    assert read_config(KINDS[COMMANDS[source.method]], tmp_path / "config.yaml", []).problems == []


@pytest.mark.parametrize("name", RUNS)
def test_it_passes_a_dry_run_once_it_has_files(
    name: str, rows: dict[str, list[str]], grpo_config: Path, tmp_path: Path
) -> None:
    """On one process, with engines that are there and the letters of a tiny tokenizer."""
    source = ForeignConfig(**PUBLISHED[name])
    command, tree = COMMANDS[source.method], convert(source).tree
    ours = yaml12.read(grpo_config.read_text())
    tree["model"] = {"path": ours["model"]["path"]}
    for key in ("train_files", "val_files"):
        if key in tree["data"]:
            tree["data"][key] = rows[command]
    for section in ("cluster", "tracking"):
        tree.pop(section, None)
    tree["trainer"] = {**tree["trainer"], "run_dir": str(tmp_path / "run")}
    if command == "train":
        tree["reward"] = ours["reward"]
        tree["generation"] = {"type": "native", "max_response_tokens": 16}
        tree["data"]["max_prompt_tokens"] = 32
    (tmp_path / "imported.yaml").write_text(yaml12.write(tree))
    assert main([command, str(tmp_path / "imported.yaml"), "--dry-run"]) == 0


def test_values_are_what_they_were(tmp_path: Path) -> None:
    """GSPO's settings, as its script has them: 8 rows of 4 devices, twice, four optimizer steps a generation."""
    (tmp_path / "run.sh").write_text(SCRIPT)
    values = read(tmp_path / "run.sh", command=1).values | {
        "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo",
        "num_generations": 16, "use_vllm": True, "warmup_steps": 0.1, "scale_rewards": "none", "beta": 0.04,
        "vllm_importance_sampling_mode": "token_truncate", "seed": 3, "report_to": ["wandb", "none"], "project": "p",
        "mask_truncated_completions": True,
    }  # fmt: skip
    tree = convert(ForeignConfig("grpo", values)).tree
    assert tree["algorithm"] == {
        "type": "grpo", "group_size": 16, "minibatches": 4, "normalize_by_std": False, "mask_truncated": True,
        "loss": {"type": "gspo", "aggregation": "sequence_mean_token_mean", "clip_ratio_low": 3e-4,
                 "clip_ratio_high": 4e-4},
        "kl": {"place": "loss", "coefficient": 0.04, "estimator": "k3"},
        "rollout_correction": {"type": "truncate", "upper": 3.0},
    }  # fmt: skip
    assert tree["data"]["prompts_per_step"] == 8 * 4 * 8 // 16 and tree["cluster"] == {"ranks": 4}
    assert tree["training"]["optimizer"] == {"lr": 1e-5, "schedule": "linear", "warmup_steps": 9}
    assert tree["trainer"] == {"run_dir": "runs/imported", "steps": 23, "save_every": 125, "seed": 3}
    assert tree["model"]["lora"] == {"rank": 16, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    assert tree["tracking"] == {"wandb": {"project": "p"}}


def _of(method: str, **values: Any) -> Imported:
    return convert(ForeignConfig(method, values))


def test_a_reward_model_s_head_learns_beside_its_adapters(tmp_path: Path) -> None:
    script = tmp_path / "reward.py"
    script.write_text(
        "from peft import LoraConfig\nfrom trl import RewardTrainer\n"
        'peft_config = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, modules_to_save=["score"])\n'
        "RewardTrainer(model='Qwen/Qwen3-0.6B', train_dataset=rows, peft_config=peft_config).train()\n"
    )
    made = convert(read(script))
    assert made.tree["model"]["lora"] == {"rank": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    assert not [line for line in made.unsupported if "lora" in line]
    assert "lora_modules_to_save=['score']: a value head always learns beside model.lora" in made.mapped
    for method, layers in (("reward", ["score", "embed_tokens"]), ("sft", ["score"])):
        made = _of(method, use_peft=True, lora_modules_to_save=layers)
        assert [line for line in made.unsupported if line.startswith("lora_modules_to_save")], method


def test_what_cannot_be_taken_over_is_told() -> None:
    made = _of("dpo", loss_type=["sigmoid", "sft"], load_in_4bit=True, ld_alpha=0.5, optim="adamw_torch", max_length=64)
    assert made.tree["preference"] == {"loss": "dpo"} and made.tree["data"]["max_tokens"] == 64
    assert made.unsupported == [
        "load_in_4bit=True: not taken over; write model.lora alone: weights are not quantised",
        "ld_alpha=0.5: there is no counterpart here",
    ]
    assert any("sum of losses" in note for note in made.notes) and made.without_effect == ["optim=adamw_torch: as here"]
    rloo = _of("rloo").tree["algorithm"]
    assert rloo["kl"] == {"place": "reward", "coefficient": 0.05, "estimator": "k1"} and rloo["group_size"] == 2
    ppo = _of("ppo", total_episodes=30_000, gradient_accumulation_steps=64, per_device_train_batch_size=1).tree
    assert ppo["trainer"]["steps"] == 469 and ppo["algorithm"]["epochs"] == 4


@pytest.mark.parametrize("method", ["sft", "grpo", "dpo", "kto"])
@pytest.mark.parametrize(
    ("given", "every"), [({"eval_strategy": "steps", "eval_steps": 6}, 6), ({"eval_strategy": "epoch"}, None)]
)
def test_what_trl_evaluates_is_written_and_passes_a_dry_run(
    method: str, given: dict[str, Any], every: int | None, rows: dict[str, list[str]], grpo_config: Path, tmp_path: Path
) -> None:
    values = {"dataset_name": "trl-lib/tldr", "dataset_config": "c", "report_to": "none", "reward_funcs": "a.b"}
    made, command = convert(ForeignConfig(method, values | given)), COMMANDS[method]
    tree, ours = made.tree, yaml12.read(grpo_config.read_text())
    assert tree["data"]["val_files"] == ["hub:trl-lib/tldr/c[test]"] and tree["trainer"].get("eval_every") == every
    assert any(note.startswith("eval_strategy=epoch: give trainer.eval_every") for note in made.notes) == (not every)
    assert f"eval_strategy={given['eval_strategy']}: trainer.eval_every and data.val_files" in made.mapped
    tree["model"] = {"path": ours["model"]["path"]}
    tree["data"] |= {"train_files": rows[command], "val_files": rows[command]}
    tree["trainer"]["run_dir"] = str(tmp_path / "run")
    if method == "grpo":
        assert tree["generation"]["eval"] == {"samples": 8, "temperature": 1.0}
        tree["reward"], tree["data"]["max_prompt_tokens"] = ours["reward"], 32
        tree["generation"]["max_response_tokens"] = 16
    (tmp_path / "imported.yaml").write_text(yaml12.write(tree))
    assert main([command, str(tmp_path / "imported.yaml"), "--dry-run"]) == 0


def test_trl_evaluates_only_where_it_is_told_to() -> None:
    for strategy in ({}, {"eval_strategy": "no"}):
        made = _of("sft", eval_steps=500, dataset_test_split="held", dataset_name="a/b", **strategy)
        assert "val_files" not in made.tree["data"] and "eval_every" not in made.tree["trainer"]
        assert "eval_steps=500: TRL does not evaluate without eval_strategy: steps or epoch" in made.without_effect
        assert made.unsupported == []
    made = _of("dpo", eval_strategy="steps", dataset_test_split="held", dataset_name="a/b")
    assert made.tree["data"]["val_files"] == ["hub:a/b[held]"] and made.tree["trainer"]["eval_every"] == 10
    made = _of("dpo", eval_strategy="steps", eval_steps=0.1, dataset_name="mine")
    assert made.tree["data"]["val_files"] == ["VAL.parquet"] and "eval_every" not in made.tree["trainer"]
    assert "eval_steps=0.1: no number of steps; give trainer.eval_every" in made.notes
    assert any(note.startswith("data.val_files: put mine, split test in the place of VAL") for note in made.notes)
    made = _of("grpo", eval_strategy="⟨args.eval⟩", eval_steps=5)
    assert made.unsupported == [
        "eval_strategy=⟨args.eval⟩: only a run of the script would tell; write its value in yourself",
        "eval_steps=5: not taken over; write trainer.eval_every, with data.val_files",
    ]


@pytest.mark.parametrize(
    ("loaded", "held_out", "expected"),
    [
        ("rows = load_dataset('a/b', 'c')", "rows['dev']", "hub:a/b/c[dev]"),
        ("rows = {'train': load_dataset('a/b', split='train')}", "load_dataset('a/b', split='dev')", "VAL.parquet"),
        ("rows = load_dataset('a/b')", "load_dataset('a/b', split='dev').map(f)", "hub:a/b[dev]"),
        ("rows = load_dataset('a/b')", "load_dataset('b/b', split='dev')", "VAL.parquet"),
        ("rows = load_dataset('a/b', split='train').train_test_split(0.1)", "rows['test']", "VAL.parquet"),
    ],
)
def test_a_script_says_on_which_rows_it_evaluates(loaded: str, held_out: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"{loaded}\nSFTTrainer(model='M', args=SFTConfig(eval_strategy='steps', eval_steps=5), "
        f"train_dataset=rows['train'], eval_dataset={held_out})\n"
    )
    made = convert(read(path))
    assert made.tree["data"]["train_files"] == [f"hub:a/b{'/c' if 'c[' in expected else ''}[train]"]
    assert made.tree["data"]["val_files"] == [expected] and made.tree["trainer"]["eval_every"] == 5
    told = f"data.val_files: put {held_out} in the place of VAL.parquet"
    assert any(note.startswith(told) for note in made.notes) == (expected == "VAL.parquet")


@pytest.mark.parametrize(
    ("loaded", "train", "held_out", "files"),
    [
        ("load_dataset('json', data_files='a.jsonl', split='train')", "rows", "None", (["a.jsonl"], ["VAL.parquet"])),
        ("load_dataset('json', data_files=['a.jsonl', 'b.json'])", "rows['train']",
         "load_dataset('json', data_files='c.jsonl', split='train')", (["a.jsonl", "b.json"], ["c.jsonl"])),
        ("load_dataset('parquet', data_files={'train': 'a.parquet', 'dev': ['b.parquet']})", "rows['train']",
         "rows['dev']", (["a.parquet"], ["b.parquet"])),
        ("load_dataset('json', data_files='*.jsonl')", "rows['train']", "None", (["TRAIN.parquet"], ["VAL.parquet"])),
        ("load_dataset('json', data_files='a.jsonl')", "load_dataset('csv', data_files='a.csv')", "None",
         (["TRAIN.parquet"], ["VAL.parquet"])),
        ("load_dataset('json', data_files='a.jsonl', split='train[:9]')", "rows", "None",
         (["TRAIN.parquet"], ["VAL.parquet"])),
        ("load_dataset('json', data_files=args.files)", "rows", "None", (["TRAIN.parquet"], ["VAL.parquet"])),
    ],
)  # fmt: skip
def test_files_that_a_script_loads_are_ours(
    loaded: str, train: str, held_out: str, files: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"rows = {loaded}\nSFTTrainer(model='M', args=SFTConfig(eval_strategy='steps', eval_steps=5), "
        f"train_dataset={train}, eval_dataset={held_out})\n"
    )
    made = convert(read(path))
    assert (made.tree["data"]["train_files"], made.tree["data"]["val_files"]) == files
    assert ["of TRAIN.parquet" in note for note in made.notes].count(True) == (files[0] == ["TRAIN.parquet"])


MIXED = """
datasets:
  - {path: a/b, name: c, split: dev}
  - {path: a/d}
  - {path: json, data_files: {train: mine.jsonl}}
  - {path: e/f, data_dir: g}
packing: true
test_split_size: 0.1
streaming: false
"""


def test_several_data_sets_of_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(MIXED)
    made = convert(read(tmp_path / "sft.yaml"))
    assert made.tree["data"]["train_files"] == ["hub:a/b/c[dev]", "hub:a/d[train]", "mine.jsonl", "TRAIN_4.parquet"]
    assert any(note.startswith("data.train_files: put e/f of g, split train in the place") for note in made.notes)
    (line,) = made.unsupported
    assert line.startswith("test_split_size=0.1: not taken over; write data.val_files")


@pytest.mark.parametrize("launcher", ["python", "accelerate launch --num_processes 2"])
def test_a_script_of_trl_may_be_started_as_a_module(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{launcher} -m trl.scripts.dpo --dataset_name a/b --learning_rate 2e-6\n")
    source = read(tmp_path / "run.sh")
    assert source.method == "dpo"
    assert source.values.items() >= {"dataset_name": "a/b", "learning_rate": 2e-6}.items()


@pytest.mark.parametrize("given", [{"warmup_steps": 0.1}, {"warmup_ratio": 0.1}])
def test_a_warm_up_over_a_share_of_the_run_is_steps_where_their_number_is_known(given: dict[str, Any]) -> None:
    (key,) = given
    made = _of("sft", **given)
    assert "warmup_steps" not in made.tree["training"]["optimizer"] and made.mapped == []
    assert made.unsupported == [
        f"{key}=0.1: not taken over; write training.optimizer.warmup_steps, that share of the run's optimizer steps"
    ]
    assert _of("sft", **{"warmup_steps": 0, "warmup_ratio": 0.0} | given).unsupported == made.unsupported
    made = _of("sft", **given, max_steps=25)
    assert made.tree["training"]["optimizer"]["warmup_steps"] == 3 and made.unsupported == []
    assert f"{key}=0.1: training.optimizer.warmup_steps" in made.mapped
    for number in (7, 7.0):
        made = _of("sft", warmup_steps=number, warmup_ratio=0.5)
        assert made.tree["training"]["optimizer"]["warmup_steps"] == 7 and made.unsupported == []


@pytest.mark.parametrize("token", ["<|im_end|>", "<end_of_turn>", "</s>"])
def test_the_end_of_answers_and_uploads_are_not_passed_over(token: str) -> None:
    made = _of("sft", eos_token=token, push_to_hub=True, hub_model_id="me/mine")
    assert made.unsupported == [
        f"eos_token={token}: not taken over; set it as eos_token in the model's tokenizer_config.json, and its id as "
        "eos_token_id in generation_config.json: these say where an answer ends",
        "push_to_hub=True: not taken over; run `tandem push RUN OWNER/NAME` afterwards: nothing is uploaded while "
        "training",
    ]
    assert made.without_effect[0] == "hub_model_id=me/mine: tandem push is what uploads"
    assert _of("sft", eos_token=None, push_to_hub=False).unsupported == []


def test_adapters_that_use_peft_does_not_ask_for_are_without_effect() -> None:
    made = _of("sft", lora_r=8)
    assert "lora" not in made.tree["model"] and made.unsupported == []
    assert "lora_r=8: without use_peft the whole model learns" in made.without_effect


@pytest.mark.parametrize("name", ["paged_adamw_8bit", "adamw_8bit", "adamw_bnb_8bit"])
def test_moments_in_8_bits_are_taken_over_and_what_differs_is_told(name: str) -> None:
    made = _of("ppo", optim=name, learning_rate=2e-6, total_episodes=300)
    assert made.tree["training"]["optimizer"]["type"] == made.tree["algorithm"]["critic_optimizer"]["type"]
    assert made.tree["training"]["optimizer"] | {"schedule": ""} == {"lr": 2e-6, "type": "adamw_8bit", "schedule": ""}
    assert f"optim={name}: training.optimizer.type" in made.mapped
    (note,) = (line for line in made.notes if line.startswith("optim="))
    assert "embeddings in 8 bits" in note and ("optimizer_offload" in note) == name.startswith("paged")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "plain.yaml").write_text("learning_rate: 1e-5\n")
    (tmp_path / "other.sh").write_text("python my_training.py --learning_rate 1\n")
    (tmp_path / "nothing.py").write_text("print(1)\n")
    (tmp_path / "broken.py").write_text("print(1\n")
    command = ["import", "trl", str(tmp_path / "run.sh"), "--out", str(tmp_path / "ours.yaml")]
    assert main(command) == 2 and "it starts 2 trainings; give --command 1 to 2" in capsys.readouterr().err
    assert main([*command, "--command", "1"]) == 0
    told = capsys.readouterr().out
    assert "log_completions=True: trajectories are always written" in told and "try it: tandem train" in told
    out = ["--out", str(tmp_path / "second.yaml")]
    for source, message in (
        ("plain.yaml", "plain.yaml: it does not say which trainer reads it; give --trainer dpo|grpo|"),
        ("other.sh", "my_training is no trainer that has a counterpart here; those that have one: dpo, grpo,"),
        ("nothing.py", "nothing.py: no trainer of TRL is started in it"),
        ("broken.py", "broken.py: line 1: it is no Python"),
        ("none.sh", "none.sh: it cannot be read"),
    ):
        assert main(["import", "trl", str(tmp_path / source), *out]) == 2
        assert message in capsys.readouterr().err
    assert main(["import", "trl", str(tmp_path / "plain.yaml"), "--trainer", "bco", *out]) == 2
    assert "--trainer bco: has no counterpart here" in capsys.readouterr().err
    assert main(["import", "trl", str(tmp_path / "other.sh"), "--trainer", "sft", *out]) == 0
    assert "try it: tandem sft" in capsys.readouterr().out


def test_several_splits_at_once_get_a_stand_in_and_a_note(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "rows = load_dataset('a/b', split=['train', 'test'])\n"
        "SFTTrainer(model='M', args=SFTConfig(), train_dataset=rows)\n"
    )
    made = convert(read(path))
    assert made.tree["data"]["train_files"] == ["TRAIN.parquet"]
    assert any("['train', 'test']" in note for note in made.notes)
