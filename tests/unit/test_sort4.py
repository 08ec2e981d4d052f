"""The quickstart's task and the recipes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.config.load import load_config
from tandem.config.tree import DpoConfig, EvalConfig, SftConfig, TrainConfig

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def load_example(name: str) -> ModuleType:
    """A module of examples/sort4, which is no package."""
    spec = importlib.util.spec_from_file_location(f"sort4_{name}", ROOT / "examples/sort4" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


task = load_example("task")
reward = load_example("reward")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sort4")
    task.make(directory, seed=3)
    return directory


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_validation_prompts_are_in_no_other_file(directory: Path) -> None:
    held_out = {row["prompt"] for row in read_rows(directory / "val.jsonl")}
    train = {row["prompt"] for row in read_rows(directory / "train.jsonl")}
    demonstrated = {row["prompt"] for row in read_rows(directory / "sft.jsonl")}
    assert len(held_out) == 256 and len(train) == 5_040 - 256
    assert not held_out & (train | demonstrated)


def test_a_third_of_the_demonstrations_is_right_and_the_rest_one_swap_away(directory: Path) -> None:
    rows = read_rows(directory / "sft.jsonl")
    wrong = 0
    for row in rows:
        right, given = sorted(row["prompt"][:4]), list(row["completion"])
        assert sorted(given) == right
        differing = [i for i in range(4) if given[i] != right[i]]
        assert not differing or differing[1] - differing[0] == 1 == len(differing) - 1
        wrong += bool(differing)
    assert len(rows) == 44_800
    assert wrong / len(rows) == pytest.approx(0.65, abs=0.01)


def test_seed_decides_everything(directory: Path, tmp_path: Path) -> None:
    task.make(tmp_path / "same", seed=3)
    task.make(tmp_path / "other", seed=4)
    for name in ("sft.jsonl", "train.jsonl", "val.jsonl", "model/model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (directory / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (directory / name).read_bytes()


def test_tokenizer_round_trips_through_the_saved_directory(directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    text = "".join(task.VOCABULARY[3:])
    assert len(tokenizer) == len(task.VOCABULARY) == 99
    assert tokenizer(text).input_ids == list(range(3, 99))
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer("1<eos>").input_ids[-1] == 1


def test_model_is_the_size_it_claims(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    assert model.num_parameters() == 138_112
    assert model.generation_config.eos_token_id == 1
    assert model.config.hidden_size // model.config.num_attention_heads == 32


def test_skewed_demonstrations_are_mostly_short() -> None:
    rows = list(task.demonstrations(["4821"], 20_000, seed=0, skewed=True))
    lengths = [len(row["completion"]) + 1 for row in rows]
    assert sum(length == 5 for length in lengths) / len(rows) == pytest.approx(0.8, abs=0.01)
    assert 28 < sum(lengths) / len(lengths) < 49
    assert max(lengths) == task.MAX_RESPONSE_TOKENS


@pytest.mark.parametrize(("response", "right"), [("1248", 1.0), ("1248 ...", 1.0), ("1284", 0.0), ("12481", 0.0)])
def test_reward_is_an_exact_match(response: str, right: float) -> None:
    score = reward.compute_score("sort4", response, "1248", extra_info=None)
    assert score == {"score": right, "acc": right, "pred": response.split(" ")[0]}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    kinds = {"sft": SftConfig, "model": SftConfig, "dpo": DpoConfig, "kto": DpoConfig, "orpo": DpoConfig}
    evaluates = path.stem.startswith("eval_")
    load_config(EvalConfig if evaluates else kinds.get(path.stem.rpartition("_")[2], TrainConfig), path)


def test_every_recipe_is_there() -> None:
    assert {path.stem for path in RECIPES} >= {"sort4_sft", "sort4_grpo", "sort4_ppo", "gsm8k_grpo"}
