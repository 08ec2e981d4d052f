"""`tandem train` on models with state mixers: GRPO on sort4 with the native engine, publishes, checkpoints, a resumed
run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT
from tests.state_models import OFTEN, config_of

STEPS = 3


def make_model(family: str, sort4: Path, directory: Path) -> Path:
    """Random, with the tokenizer of the task."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(sort4 / "model")
    config: Any = config_of(family)
    config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def recipe(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small recipes/sort4_grpo.yaml that rewards digits; it names no model."""
    directory = tmp_path_factory.mktemp("state_mixers")
    (directory / "reward.py").write_text(
        "def digits(completion, ground_truth):\n    return sum(map(str.isdigit, completion)) / 8\n"
    )
    tree = yaml.safe_load((ROOT / "recipes/sort4_grpo.yaml").read_text())
    tree["model"] = {"path": "", "dtype": "float32"}
    tree["data"] |= {"train_files": [str(sort4 / "train.jsonl")], "val_files": [], "prompts_per_step": 4}
    tree["algorithm"]["group_size"] = 4
    tree["training"] |= {"tokens_per_micro_batch": 64}
    tree["reward"] = {"functions": [f"{directory}/reward.py:digits"], "workers": 1}
    tree["trainer"] = {"steps": STEPS, "save_every": 1, "keep_last": STEPS}
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    return directory / "config.yaml"


def train(recipe: Path, model: Path, name: str, *options: str) -> Path:
    run = recipe.with_name(name)
    assert main(["train", str(recipe), f"model.path={model}", f"trainer.run_dir={run}", *options]) == 0
    return run


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:06}/model/model.safetensors")


@pytest.mark.parametrize("family", OFTEN)
def test_the_engine_follows_the_trainer_and_a_resumed_run_the_undisturbed_one(
    family: str, recipe: Path, sort4: Path
) -> None:
    model = make_model(family, sort4, recipe.with_name(f"model-{family}"))
    run = train(recipe, model, family)
    records = read_metrics(run / "metrics.jsonl")
    mismatch = [record["rollout/mismatch_max"] for record in records if "rollout/mismatch_max" in record]
    assert len(mismatch) == STEPS and max(mismatch) < 1e-4
    start, found = load_file(model / "model.safetensors"), weights(run, STEPS)
    assert start.keys() == found.keys(), "as transformers writes it"
    moved = [name for name in start if not torch.equal(start[name], found[name])]
    assert any("A_log" in name or "conv.conv" in name for name in moved)
    cut = train(recipe, model, f"cut-{family}", "trainer.steps=2")
    assert main(["train", "--resume", str(cut), f"trainer.steps={STEPS}"]) == 0
    assert all(torch.equal(found[name], weight) for name, weight in weights(cut, STEPS).items())


@pytest.mark.nightly
@pytest.mark.parametrize("family", OFTEN)
def test_a_model_with_states_learns(family: str, recipe: Path, sort4: Path) -> None:
    """Answers of digits, from one in ten."""
    model = make_model(family, sort4, recipe.with_name(f"learns-{family}"))
    options = ["trainer.steps=60", "trainer.save_every=60", "training.optimizer.lr=3e-3", "algorithm.group_size=8"]
    records = read_metrics(train(recipe, model, f"learned-{family}", *options) / "metrics.jsonl")
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    assert sum(rewards[:5]) / 5 < 0.25 and sum(rewards[-5:]) / 5 > 0.6


@pytest.mark.nightly
@pytest.mark.parametrize("family", OFTEN)
def test_older_answers_adapters_and_other_optimizers(family: str, recipe: Path, sort4: Path) -> None:
    model = make_model(family, sort4, recipe.with_name(f"other-{family}"))
    ways = {
        "stale": ["trainer.max_staleness=2"],
        "lora": ["model.lora.rank=4"],
        "muon": ["training.optimizer.type=muon", "training.activation_checkpointing=true"],
        "8bit": ["training.optimizer.type=adamw_8bit", "training.optimizer_offload=true"],
    }
    for name, options in ways.items():
        run = train(recipe, model, f"{name}-{family}", *options)
        records = [record for record in read_metrics(run / "metrics.jsonl") if record["step"] > 0]
        mismatch = [record["rollout/mismatch_max"] for record in records if "rollout/mismatch_max" in record]
        assert len(records) == STEPS and max(mismatch) < 1e-4, name
        assert len(mismatch) == (1 if name == "stale" else STEPS), "of answers of the newest version"
