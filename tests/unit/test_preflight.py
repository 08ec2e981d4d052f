"""Mistakes that configuration, files and installed packages show: all in one message, before torch is imported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli import main
from tandem.config.load import load_config
from tandem.config.tree import DpoConfig, EvalConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.data.dataset import RLHFDataset
from tandem.errors import UserError
from tandem.jobs.inputs import read_inputs
from tandem.jobs.preflight import find_mistakes
from tandem.jobs.preflight.data import read_first_rows
from tandem.tracking.names import EVERY_NAME
from tests.conftest import ROOT
from tests.pictures import make_model

RUNNER = """
import contextlib, io, json, sys
from tandem.cli import main

for missing, arguments in json.load(sys.stdin):
    sys.modules |= dict.fromkeys(missing)  # as if they were not installed
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        status = main(arguments)
    for name in missing:
        del sys.modules[name]
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps([status, output.getvalue(), heavy]), flush=True)
"""
Told = tuple[int, str, list[str]]
"""Exit status, what was printed, and which heavy packages had been imported by then."""

SERVED = "generation={{type: vllm, max_response_tokens: 8}}"
MISTAKES: list[tuple[str, str, list[str]]] = [
    # the configuration itself
    ("train", "algorithm.groupsize=4", ["algorithm.groupsize: unknown key; did you mean algorithm.group_size?"]),
    ("train", "trainer.lr=1e-5", ["trainer.lr: unknown key; did you mean training.optimizer.lr?"]),
    ("train", "modle.path=x", ["modle: unknown key; did you mean model?"]),
    ("train", "data.prompts_per_step=many", ["data.prompts_per_step: ", "integer", "'many'"]),
    (
        "train",
        "data.mixture={{a: {{files: [{0}/prompts.jsonl]}}}}",
        ["data.mixture: ", "as train_files or as sets of mixture"],
    ),
    (
        "train",
        "data.train_files=[]|data.mixture={{a: {{files: [{0}/prompts.jsonl], weigth: 1}}}}",
        ["data.mixture.a.weigth: unknown key"],
    ),
    (
        "train",
        "data.train_files=[]|data.mixture={{a: {{files: [{0}/no.jsonl]}}}}",
        ["data.mixture.a.files: ", "no such file"],
    ),
    ("train", "training.optimizer.lr=-1e-3", ["training.optimizer.lr: ", "greater than 0", "-0.001"]),
    (
        "train",
        "training.optimizer.adamw_lr=1e-3",
        ["adamw_lr: unknown key; it is one of training.optimizer.type: muon"],
    ),
    ("train", "generation.type=vlm", ["generation.type: 'vlm' is unknown; known are 'native', 'vllm', 'sglang'"]),
    ("train", "algorithm.type=gropo", ["algorithm.type: 'gropo' is unknown; known are ", "'grpo'"]),
    ("train", "generation=native", ["generation: is a section of keys and values, not 'native'"]),
    ("train", "algorithm.group_size=1", ["algorithm.group_size: ", "greater than or equal to 2"]),
    ("train", "algorithm.kl={{place: loss, control: adaptive}}", ["algorithm.kl: ", "place: reward"]),
    ("train", "algorithm.minibatches=5", ["minibatches: 5", "data.prompts_per_step: 4"]),
    ("train", "trainer.epochs=2", ["trainer: give exactly one of steps and epochs"]),
    ("train", "trainer.run_dir", ["override 'trainer.run_dir': write it as section.key=YAML value"]),
    ("train", "placement.roles.actor=gpus", ["placement: roles.actor: pool 'gpus' is not in placement.pools"]),
    ("train", "placement={{pools: {{a: [1]}}, roles: {{actor: b}}}}", ["pool 'b' is not in placement.pools (a)"]),
    # names from elsewhere
    ("train", "actor_rollout_ref.actor.optim.lr=1e-6", ["actor_rollout_ref.actor.optim.lr", "training.optimizer.lr"]),
    ("train", "data.train_batch_size=8", ["data.train_batch_size", "write data.prompts_per_step"]),
    ("train", "algorithm.adv_estimator=grpo", ["algorithm.adv_estimator", "write algorithm.type"]),
    ("train", "+trainer.seed=3", ["override '+trainer.seed=3': keys take no +"]),
    # data
    ("train", "data.train_files=[{0}/no.jsonl]", ["data.train_files: {0}/no.jsonl: no such file"]),
    ("train", "data.train_files=[]", ["data.train_files: no file given"]),
    ("train", "data.val_files=[{0}/table.csv]", ["data.val_files: {0}/table.csv: data files end in .parquet"]),
    ("train", "data.train_files=[{0}/empty.jsonl]", ["data.train_files: {0}/empty.jsonl: the file holds no rows"]),
    ("train", "data.train_files=[{0}/broken.parquet]", ["data.train_files: {0}/broken.parquet: cannot be read"]),
    ("train", "data.train_files=[{0}/questions.jsonl]", ["{0}/questions.jsonl, row 1: column `prompt` is missing"]),
    ("sft", "data.train_files=[{0}/questions.jsonl]", ["column `prompt` is missing; the row has question"]),
    ("dpo", "data.train_files=[{0}/prompts.jsonl]", ["column `chosen` is missing"]),
    ("sft", "data.train_files=[]", ["data.train_files: no file given; name some, or sets of data.mixture"]),
    (
        "sft",
        "data.mixture={{a: {{files: [{0}/prompts.jsonl]}}}}",
        ["data.mixture: ", "as train_files or as sets of mixture"],
    ),
    (
        "dpo",
        "data.train_files=[]|data.mixture={{a: {{files: [{0}/prompts.jsonl]}}}}",
        ["data.mixture.a.files: 1 of the first 1 rows are bad", "column `chosen` is missing"],
    ),
    ("dpo", "preference.loss=dpx", ["preference.loss: ", "'dpo', 'ipo', 'simpo', 'orpo' or 'kto', not 'dpx'"]),
    ("dpo", "preference={{loss: dpo, undesirable_weight: 2}}", ["undesirable_weight are of loss: kto, not of dpo"]),
    ("dpo", "preference.loss=kto|data.train_files=[{0}/prompts.jsonl]", ["column `label` is missing"]),
    ("dpo", "preference={{loss: ipo, label_smoothing: 0.1}}", ["preference: label_smoothing", "not of ipo"]),
    ("dpo", "data.prompts_per_step=8", ["data.prompts_per_step: unknown key; did you mean data.rows_per_step?"]),
    # conversations
    ("train", "conversation={{environment: {{type: own, environment: {0}/no.py:W}}}}", ["conversation.", "{0}/no.py"]),
    (
        "train",
        "conversation={{environment: {{tools: [{0}/no.py:f]}}}}",
        ["conversation.environment.tools", "{0}/no.py"],
    ),
    (
        "train",
        "conversation={{environment: {{user: {{type: scripted}}}}}}",
        ["conversation.environment.user.column: data.train_files, row 0: column `user_turns` is missing", "must list"],
    ),
    ("train", "conversation={{environment: {{type: endpoint, command: no-program}}}}", ["no program 'no-program'"]),
    ("train", "trainer.checkpoint_url=s4://bucket", ["trainer.checkpoint_url: s4://bucket: ", "for s4://"]),
    # model
    ("train", "model.path={0}/nowhere", ["model.path: {0}/nowhere is not there"]),
    ("train", "model.path={0}/weightless", ["model.path: {0}/weightless lacks its weights (model.safetensors)"]),
    ("train", "model.path={0}/truncated", ["model.path: {0}/truncated has weights that cannot be read", "copy"]),
    ("train", "model.path={0}/sharded", ["{0}/sharded lacks its weights (model-00002-of-00002.safetensors)"]),
    ("train", "model.path={0}/wordless", ["model.path: {0}/wordless has no tokenizer; copy tokenizer.json"]),
    ("train", "model.path={0}/unstarted", ["model.path: {0}/unstarted is a run without a checkpoint"]),
    ("train", "model.path={0}/failed", ["model.path: {0}/failed is a run without a checkpoint"]),
    ("train", "model.path={0}/run/checkpoints/step_000001/model", ["step_000001/model is gone: a run that goes on"]),
    (
        "train",
        "model.path={0}/run/checkpoints/best",
        ["{0}/run/checkpoints/best is not there: a run keeps its best", "there is no checkpoint, and checkpoints"],
    ),
    ("train", "trainer.branch_from={0}/run", ["  - trainer.branch_from: {0}/run: not a checkpoint", "give a run"]),
    ("train", "trainer.branch_from={0}/judge", ["  - trainer.branch_from: {0}/judge holds a reward model"]),
    (
        "train",
        "model.path={0}/states",
        ["model.path: {0}/states: model type mamba does not run here", "its scan ignores"],
    ),
    ("sft", "model.path={0}/dynamic", ["model.path: {0}/dynamic: ", "RoPE of type dynamic", "use another"]),
    ("train", "algorithm.type=ppo|model.path={0}/headless", ["{0}/headless: model type olmo2", "value head"]),
    ("train", "algorithm.type=ppo|model.critic_path={0}/headless", ["model.critic_path: {0}/headless", "value head"]),
    ("train", "algorithm.type=ppo|model.critic_path={0}/nowhere", ["model.critic_path: {0}/nowhere is not there"]),
    ("train", "data.dataset={0}/no.py:Rows|data.train_files=[]", ["data.dataset: ", "there is no file {0}/no.py"]),
    (
        "train",
        "data.sampler={{type: own, sampler: '{0}/rewards.py:Wrong'}}",
        ["data.sampler.sampler: {0}/rewards.py", "Wrong"],
    ),
    (
        "train",
        "algorithm={{type: on_policy_distillation, top_k: 8, gamma: 0.5}}|model.teacher_path={0}/whole",
        ["gamma: with top_k each token answers for its own distribution"],
    ),
    (
        "train",
        "algorithm={{type: on_policy_distillation, top_k: 8, loss: {{type: gspo}}}}|model.teacher_path={0}/whole",
        ["loss.type: gspo reads no distributions; with top_k use clip"],
    ),
    (
        "train",
        "algorithm.type=on_policy_distillation|model.teacher_path={0}/nowhere",
        ["model.teacher_path: {0}/nowhere is not there"],
    ),
    ("train", "model.judge_path={0}/nowhere", ["model.judge_path: {0}/nowhere is not there"]),
    ("train", "reward.judge={{url: u, model: m, parser: '{0}/rewards.py:no'}}", ["reward.judge.parser", "no function"]),
    ("train", "reward.judge={{url: u, model: m, template: {0}/no.txt}}", ["reward.judge.template: {0}/no.txt cannot"]),
    ("train", "model.reward_model_path={0}/whole", ["model.reward_model_path: {0}/whole is a language model"]),
    ("train", "generation.max_response_tokens=600", ["generation.max_response_tokens: 600 = 616", "512 positions"]),
    ("train", "model.lora.target_modules=[q_prj]", ["model.lora.target_modules: ", "'q_prj'; did you mean 'q_proj'?"]),
    ("train", "model.lora.target_modules=[embed_tokens]", ["model.lora.target_modules: 'embed_tokens'", "embeddings"]),
    ("train", "model.chat_template.file={0}/none.jinja", ["model.chat_template.file: {0}/none.jinja is no file"]),
    ("train", "generation.n=4", ["generation.n: unknown key; did you mean algorithm.group_size?"]),
    ("train", "model.lora.target_modules=[lm_head]", ["model.lora.target_modules: 'lm_head'", "output layer"]),
    # rewards
    ("train", "reward.functions=[{0}/no.py:f]", ["reward.functions: ", "there is no file {0}/no.py"]),
    ("train", "reward.functions=[json:loads]", ["reward.functions: ", "json:loads", "signature"]),
    ("train", "reward.functions=[]", ["reward.functions: ", "no built-in reward for data_source ['sort4']"]),
    ("train", "reward.functions=[{0}/rewards.py:scor]", ["reward.functions: ", "has no function 'scor'"]),
    ("train", "reward.functions=[{0}/rewards.py:needs]", ["needs the column `difficulty`, which no row has"]),
    ("train", "reward.functions=[{0}/unfinished.py:f]", ["reward.functions: ", "SyntaxError"]),
    ("train", "algorithm={{type: '{0}/no.py:Mine'}}", ["algorithm.type: ", "there is no file {0}/no.py"]),
    ("train", "algorithm={{type: '{0}/rewards.py:Scor'}}", ["algorithm.type: ", "did you mean 'Score'?"]),
    # packages, each as if it were not installed
    ("train", SERVED, ["generation.type: vllm, but vLLM is not installed here: install vllm>="]),
    (
        "train",
        "generation={{type: sglang, max_response_tokens: 8}}",
        ["generation.type: sglang, but SGLang is not installed here"],
    ),
    ("train", "model.lora={{}}", ["model.lora: needs the package peft", "pip install -e '.[lora]'"]),
    ("train", "algorithm.type=ppo|model.critic_lora={{}}", ["model.critic_lora: needs the package peft"]),
    ("train", "cluster.type=ray", ["cluster.type: ray: needs the package ray", "pip install -e '.[ray]'"]),
    ("train", "tracking.tensorboard=true", ["tracking.tensorboard: needs", "pip install -e '.[tensorboard]'"]),
    ("train", "tracking.wandb=true", ["tracking.wandb: needs the package wandb", "pip install -e '.[wandb]'"]),
    ("train", "tracking.swanlab=true", ["tracking.swanlab: needs the package swanlab", "pip install -e '.[swanlab]'"]),
    ("train", "tracking.trackio=true", ["tracking.trackio: needs the package trackio", "pip install -e '.[trackio]'"]),
    (
        "train",
        "tracking={{trackio: {{server_url: 'http://h?write_token=x'}}}}",
        ["tracking.trackio.server_url: ", "TO"],
    ),
    ("train", "tracking={{mlflow: {{experiment: a}}}}", ["tracking.mlflow: needs", "pip install -e '.[mlflow]'"]),
    ("train", "training={{type: megatron}}", ["training.type: megatron needs packages", "'.[megatron]'"]),
    # trackers
    ("train", "tracking.wandbb=true", ["tracking.wandbb: unknown key; did you mean tracking.wandb?"]),
    ("train", "tracking={{wandb: {{projct: a}}}}", ["tracking.wandb.projct: unknown key; did you mean", "project?"]),
    ("train", "tracking={{mlflow: {{uri: 'http://ada:pw@host'}}}}", ["tracking.mlflow.uri: ", "MLFLOW_TRACKING_PASSW"]),
    ("train", "tracking.own=['{0}/no.py:Mine']", ["tracking.own[0]: ", "there is no file {0}/no.py"]),
    ("train", "tracking.own=['{0}/rewards.py:Scor']", ["tracking.own[0]: ", "did you mean 'Score'?"]),
    ("train", "tracking.own=['{0}/rewards.py:Score']", ["tracking.own[0]: {0}/rewards.py:Score is no subclass of tan"]),
    ("train", "tracking.own=['{0}/rewards.py:Half']", ["tracking.own[0]: {0}/rewards.py:Half lacks close of tandem.T"]),
    (
        "sft",
        "tracking.own=[{{tracker: '{0}/rewards.py:Whole', options: {{api_key: x}}}}]",
        ["tracking.own.0.options: api_key: looks like a secret"],
    ),
    # the run
    ("train", "trainer.run_dir={0}/run", ["trainer.run_dir: {0}/run: holds another run; continue it with --resume"]),
    ("train", "trainer.run_dir={0}/table.csv", ["trainer.run_dir: {0}/table.csv: is a file"]),
    ("train", "trainer.run_dir={0}/whole", ["trainer.run_dir: {0}/whole: not a run"]),
    (
        "train",
        "trainer.best_metric=val/sort4/acc/mean@2|trainer.eval_every=1",
        ["trainer.best_metric: 'val/sort4/acc/mean@2' is no metric of this run; did you mean 'val/sort4/acc/mean@4'?"],
    ),
    (
        "train",
        "trainer.best_metric=val/sort5/acc/mean@4|trainer.eval_every=1",
        ["trainer.best_metric: 'val/sort5/acc/mean@4'", "did you mean 'val/sort4/acc/mean@4'?"],
    ),
    ("train", "trainer.best_metric=actor/klcoefficient", ["trainer.best_metric: ", "'actor/kl_coefficient'?"]),
    ("train", "trainer.best_metric=critic/vf_loss", ["trainer.best_metric: 'critic/vf_loss' is no metric of this run"]),
    ("train", "trainer.best_metric=val/sort4/acc/mean@4", ["trainer.best_metric: ", "set trainer.eval_every"]),
    (
        "train",
        "trainer.best_metric=val/x|data.val_files=[]",
        ["trainer.best_metric: 'val/x' is no metric of this run; it has val/<source>/reward/mean@4"],
    ),
    ("sft", "trainer.best_metric=val/accuracy", ["trainer.best_metric: 'val/accuracy'", "it has val/loss"]),
    # evaluation
    ("eval", "data.val_files=[]", ["data.val_files: no file given"]),
    ("eval", "trainer.seed=1", ["trainer: only training reads this section"]),
    ("check", "model.path={0}/nowhere", ["model.path: {0}/nowhere"]),
]
PACKAGES = ["peft", "ray", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "megatron", "mbridge"]


@pytest.fixture(scope="module")
def place(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with sound and broken files, and `train.yaml`, `sft.yaml` and `dpo.yaml`, which are sound."""
    place = tmp_path_factory.mktemp("mistakes")
    _write_models(place, sort4 / "model")
    (place / "table.csv").write_text("prompt,answer\n1,2\n")
    (place / "empty.jsonl").touch()
    (place / "broken.parquet").write_bytes(b"PAR1 and so on")
    (place / "questions.jsonl").write_text('{"question": "1="}\n' * 3)
    (place / "prompts.jsonl").write_text('{"prompt": "1=", "completion": "1"}\n')
    (place / "unfinished.py").write_text("def f(completion:\n")
    (place / "rewards.py").write_text(
        "from tandem.tracking.base import Tracker\n\n\n"
        "class Score:\n    pass\n\n\n"
        "class Half(Tracker):\n"
        "    def __init__(self, options, run):\n        pass\n\n"
        "    def log(self, step, metrics):\n        pass\n\n\n"
        "class Whole(Half):\n    def close(self, status):\n        pass\n\n\n"
        "def score(completion):\n    return 0.0\n\n\n"
        "def needs(completion, difficulty):\n    return 0.0\n"
    )
    for part in ("model", "state"):
        (place / "judge" / part).mkdir(parents=True)
    (place / "judge/model/config.json").write_text('{"architectures": ["Qwen2ForTokenClassification"]}')
    (place / "judge/state/run.json").write_text('{"step": 1, "total_steps": 1, "training": "fsdp", "best": {}}')
    (place / "run").mkdir()
    (place / "run/config.yaml").write_text("model: {}")
    (place / "run/metrics.jsonl").write_text("{}\n")
    rl: dict[str, Any] = yaml.safe_load((ROOT / "recipes/sort4_grpo.yaml").read_text())
    rl["data"] |= {"train_files": [f"{sort4}/train.jsonl"], "val_files": [f"{sort4}/val.jsonl"], "prompts_per_step": 4}
    rl["reward"] = {"functions": [f"{place}/rewards.py:score"]}
    _write_config(place / "train.yaml", rl, place)
    supervised: dict[str, Any] = yaml.safe_load((ROOT / "recipes/sort4_sft.yaml").read_text())
    supervised["data"] |= {"train_files": [f"{sort4}/sft.jsonl"]}
    _write_config(place / "sft.yaml", supervised, place)
    (place / "pairs.jsonl").write_text('{"prompt": "1=", "chosen": "1", "rejected": "2"}\n' * 3)
    supervised["data"] |= {"train_files": [f"{place}/pairs.jsonl"]}
    _write_config(place / "dpo.yaml", supervised, place)
    return place


def _write_config(path: Path, tree: dict[str, Any], place: Path) -> None:
    tree["model"] = {"path": str(place / "whole")}
    tree["trainer"] = {"run_dir": str(place / "new-run"), "steps": 3}
    path.write_text(yaml.safe_dump(tree))


def _write_models(place: Path, model: Path) -> None:
    weights = "model.safetensors"
    without: dict[str, Callable[..., Any] | None] = {
        "whole": None,
        "weightless": shutil.ignore_patterns("*.safetensors"),
        "wordless": shutil.ignore_patterns("*token*", "vocab*"),
        "truncated": None,
        "sharded": shutil.ignore_patterns("*.safetensors"),
    }
    for name, ignore in without.items():
        shutil.copytree(model, place / name, ignore=ignore)
    (place / "truncated" / weights).write_bytes((model / weights).read_bytes()[:-1000])
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    shutil.copy(model / weights, place / "sharded" / first)
    index = {"weight_map": {"a": first, "b": second}}
    (place / "sharded" / f"{weights}.index.json").write_text(json.dumps(index))
    (place / "unstarted/checkpoints").mkdir(parents=True)
    (place / "failed").mkdir()
    for name in ("config.yaml", "environment.json"):
        (place / "failed" / name).write_text("{}")
    described = json.loads((model / "config.json").read_text())
    others: dict[str, dict[str, Any]] = {
        "states": {"model_type": "mamba"},
        "headless": {"model_type": "olmo2"},
        "dynamic": {"rope_scaling": {"rope_type": "dynamic"}},
    }
    for name, other in others.items():
        shutil.copytree(model, place / name)
        changed = {key: value for key, value in described.items() if key != "rope_parameters"} | other
        (place / name / "config.json").write_text(json.dumps(changed))


def tell(place: Path, rows: list[tuple[str, str]]) -> list[Told]:
    """What one process, in which nothing heavy is imported before, says to each command and its overrides."""
    calls: list[tuple[list[str], list[str]]] = []
    for command, overrides in rows:
        given = [override for override in overrides.format(place).split("|") if override]
        config = place / f"{command if command in ('sft', 'dpo') else 'train'}.yaml"
        calls.append((PACKAGES, [command, str(config), *given]))
    done = subprocess.run([sys.executable, "-c", RUNNER], input=json.dumps(calls), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def told(place: Path) -> dict[tuple[str, str], Told]:
    rows = [(command, overrides) for command, overrides, _ in MISTAKES]
    return dict(zip(rows, tell(place, rows), strict=True))


@pytest.mark.parametrize(("command", "overrides", "said"), MISTAKES, ids=[f"{row[0]} {row[1]}" for row in MISTAKES])
def test_a_mistake_is_told_with_its_key_and_a_mend(
    told: dict[tuple[str, str], Told], place: Path, command: str, overrides: str, said: list[str]
) -> None:
    status, message, heavy = told[command, overrides]
    assert status == 2 and heavy == [], message
    assert "Traceback" not in message or "SyntaxError" in message
    listed = [line for line in message.splitlines() if line.startswith("  - ") and "not installed" not in line]
    assert len(listed) <= 1, message
    for words in said:
        assert words.format(place) in message
    assert not (place / "new-run").exists()


TOGETHER = "|".join(
    [
        "data.shufle=true",
        "data.train_files=[{0}/no.jsonl]",
        "reward.functions=[{0}/no.py:f]",
        "data.sampler={{type: own, sampler: '{0}/no.py:Order'}}",
        "algorithm.minibatches=0",
        "cluster.ranks=4",
        "training.shard_size=3",
        "training.context_parallel=4",
        "model={{path: {0}/truncated, lora: {{}}}}",
        "tracking.tensorboard=true",
        "trainer={{run_dir: {0}/run, steps: 3, best_metric: val/loss}}",
    ]
)
ALL_OF_THEM = [
    "12 errors in the configuration",
    "data.shufle: unknown key; did you mean data.shuffle?",
    "data.train_files: {0}/no.jsonl: no such file",
    "there is no file {0}/no.py",
    "data.sampler.sampler: ",
    "algorithm.minibatches: input should be greater than 0, not 0",
    "training.shard_size: 4 ranks cannot be cut into groups of 3",
    "training.context_parallel: 4 ranks cannot share 2 attention heads",
    "model.path: {0}/truncated has weights that cannot be read",
    "model.lora: needs the package peft",
    "tracking.tensorboard: needs the package tensorboard",
    "trainer.run_dir: {0}/run: holds another run",
    "trainer.best_metric: 'val/loss' is no metric of this run",
]


def test_all_mistakes_are_told_in_one_message(place: Path) -> None:
    (status, message, heavy), (_, dry, _) = tell(place, [("train", TOGETHER), ("train", TOGETHER + "|--dry-run")])
    assert status == 2 and heavy == []
    assert [words for words in ALL_OF_THEM if words.format(place) not in message] == [], message
    assert dry == message, "a dry run tells the same"


def test_a_typo_hides_no_missing_file(place: Path) -> None:
    """Neither in another section nor in its own."""
    rows = "trainer.stps=1|data.train_fils=[x]|data.val_files=[{0}/no.jsonl]|reward.functions=[{0}/no.py:f]"
    ((status, message, heavy),) = tell(place, [("train", rows)])
    assert status == 2 and heavy == []
    for words in ("trainer.stps", "data.train_fils", "data.val_files: {0}/no.jsonl", "{0}/no.py"):
        assert words.format(place) in message
    assert "4 errors" in message, "what the unknown keys may have been meant for is not told as missing"


def test_an_unknown_section_hides_no_missing_file(place: Path) -> None:
    nope = "reward.functions=[{0}/nope.py:f]"
    for (status, message, _), unknown in zip(
        tell(place, [("train", f"{section}|{nope}") for section in ("foo.x=1", "trainr.steps=3")]),
        ("foo: unknown key", "trainr: unknown key; did you mean trainer?"),
        strict=True,
    ):
        assert status == 2 and unknown in message and f"there is no file {place}/nope.py" in message, message


@pytest.mark.parametrize(
    ("command", "recipe", "meant"),
    [
        ("train", "hh_dpo", "tandem dpo"), ("sft", "hh_dpo", "tandem dpo"), ("dpo", "hh_dpo", ""),
        ("train", "hh_sft", "tandem sft or tandem reward-model"), ("sft", "hh_sft", ""),
        ("sft", "hh_ppo", "tandem train"), ("dpo", "hh_ppo", "tandem train"), ("train", "hh_ppo", ""),
    ],
)  # fmt: skip
def test_the_command_is_named_that_a_configuration_is_of(
    capsys: pytest.CaptureFixture[str], command: str, recipe: str, meant: str
) -> None:
    path = ROOT / f"recipes/{recipe}.yaml"
    assert main([command, str(path), "model.path=nowhere"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told == f"{path} looks like a configuration of {meant}" if meant else "looks like" not in told


def test_a_sound_configuration_has_no_mistakes(place: Path, sort4: Path) -> None:
    with_everything = [
        f"data.val_files=[{sort4}/val.jsonl]", "trainer.eval_every=1", "trainer.best_metric=val/sort4/acc/mean@4",
        "model.lora={target_modules: [q_proj, mlp.down_proj]}", "tracking.tensorboard=true",
        "algorithm.kl.place=loss", "generation.max_response_tokens=496", "trainer.run_dir=~/new-run",
    ]  # fmt: skip
    assert find_mistakes(load_config(TrainConfig, place / "train.yaml", with_everything), claims_run_dir=True) == []
    assert find_mistakes(load_config(EvalConfig, place / "train.yaml")) == []
    trained_with = [f"model.critic_path={place}/nowhere", f"model.teacher_path={place}/nowhere"]
    assert find_mistakes(load_config(EvalConfig, place / "train.yaml", trained_with)) == []
    assert find_mistakes(load_config(SftConfig, place / "sft.yaml"), claims_run_dir=True) == []
    assert find_mistakes(load_config(DpoConfig, place / "dpo.yaml"), claims_run_dir=True) == []


def test_what_a_program_puts_together_keeps_the_same_rules(place: Path) -> None:
    config = load_config(TrainConfig, place / "train.yaml")
    many = config.algorithm.model_copy(update={"minibatches": 5})
    with pytest.raises(UserError, match=r"algorithm: minibatches: 5 cannot share data\.prompts_per_step: 4; lower it"):
        read_inputs(config.model_copy(update={"algorithm": many}), RLHFDataset)


def test_a_family_is_refused_only_where_we_compute_it(place: Path) -> None:
    def told(kind: Any, model: str, *overrides: str) -> list[str]:
        return find_mistakes(load_config(kind, place / "train.yaml", [f"model.path={place}/{model}", *overrides]))

    assert told(TrainConfig, "headless") == [], "a policy needs no value head"
    assert [reason for reason in told(EvalConfig, "states") if "its scan ignores" in reason]
    served = "generation={type: vllm, max_response_tokens: 8}"
    assert not [reason for reason in told(EvalConfig, "states", served) if "model.path" in reason]
    assert [reason for reason in told(TrainConfig, "states", served) if "model.path" in reason]
    rewards = load_config(RewardModelConfig, place / "dpo.yaml", [f"model.path={place}/headless"])
    assert [reason for reason in find_mistakes(rewards) if "value head" in reason]


def test_a_tower_s_layers_take_no_adapters(place: Path, tmp_path: Path) -> None:
    model = make_model("qwen2_5_vl", tmp_path / "model")
    given = f"model.path={model}|model.lora.target_modules=[qkv]"
    ((status, message, _),) = tell(place, [("train", given)])
    assert status == 2 and "no layer of" in message and "is named 'qkv'" in message
    offered = message.partition("give some of ")[2].partition(", or all-linear")[0]
    assert offered == "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj", message


@pytest.mark.parametrize("target", ["score", "classifier"])
def test_adapters_of_reward_models_and_critics_are_looked_at_as_a_policy_s(target: str, place: Path) -> None:
    """Critics in the directory that they start from; what learns no critic takes no section for one."""
    assert find_mistakes(load_config(RewardModelConfig, place / "dpo.yaml", ["model.lora={}"])) == []
    wrong = load_config(RewardModelConfig, place / "dpo.yaml", [f"model.lora.target_modules=[{target}]"])
    (told,) = find_mistakes(wrong)
    assert told == f"model.lora.target_modules: '{target}': a value head takes no adapter, for it learns as a whole; " \
        "leave it out"  # fmt: skip
    critic = ["algorithm.type=ppo", f"model.critic_path={place}/other", f"model.critic_lora.target_modules=[{target}]"]
    shutil.copytree(place / "whole", place / "other", dirs_exist_ok=True)
    (told,) = find_mistakes(load_config(TrainConfig, place / "train.yaml", critic))
    assert told.startswith(f"model.critic_lora.target_modules: '{target}': a value head takes no adapter")
    critic[-1] = "model.critic_lora.target_modules=[q_prj]"
    (told,) = find_mistakes(load_config(TrainConfig, place / "train.yaml", critic))
    assert told.startswith(f"model.critic_lora.target_modules: no layer of {place}/other is named 'q_prj'; did you")
    with pytest.raises(UserError, match="critic_lora: this command trains no critic; leave it out"):
        load_config(RewardModelConfig, place / "dpo.yaml", ["model.critic_lora={}"])


@pytest.mark.parametrize("kind", [SftConfig, DpoConfig, RewardModelConfig])
def test_what_trains_on_rows_takes_no_model_but_its_own(kind: type[SftConfig], place: Path) -> None:
    keys = {
        "critic_path": "this command trains no critic",
        "teacher_path": "this command learns from no teacher",
        "reward_model_path": "this command scores nothing with a reward model",
        "judge_path": "this command asks no judge",
    }
    for key, why in keys.items():
        with pytest.raises(UserError, match=f"model: {key}: {why}; leave it out, or take tandem train"):
            load_config(kind, place / "sft.yaml", [f"model.{key}={place}/whole"])
        load_config(kind, place / "sft.yaml", [f"model.{key}=null"])


def test_answers_of_whitespace_alone_are_no_mistake(place: Path) -> None:
    blank = {"prompt": "1", "completion": "\n", "chosen": "2", "rejected": "\n"}
    (place / "blank.jsonl").write_text(json.dumps(blank))
    for kind, name in ((SftConfig, "sft"), (DpoConfig, "dpo")):
        assert (
            find_mistakes(load_config(kind, place / f"{name}.yaml", [f"data.train_files=[{place}/blank.jsonl]"])) == []
        )


def test_bad_rows_may_be_skipped(place: Path) -> None:
    files = f"data.train_files=[{place}/questions.jsonl]"
    assert find_mistakes(load_config(TrainConfig, place / "train.yaml", [files, "data.on_bad_row=skip"])) == []


def test_of_many_files_fewer_rows_each_are_looked_at(tmp_path: Path, place: Path) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(200)]
    for path in files:
        path.write_text('{"prompt": "1="}\n' * 300)
    config = load_config(TrainConfig, place / "train.yaml", [f"data.train_files=[{', '.join(map(str, files))}]"])
    rows = read_first_rows(config)["data.train_files"]
    assert len(rows.usable) == 200 * 201 and not rows.complete


def test_the_table_of_metrics_is_that_of_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)) == EVERY_NAME
