"""Runs on pictures: resumed, with a frozen tower, with adapters, from preferences; replayed; what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml
from safetensors.numpy import load_file

from examples.tiles.task import puzzles, question, write_rows
from tandem.cli import main
from tandem.pictures.vlm_config import in_tower
from tandem.tracking.jsonl import read_metrics
from tests import picture_families
from tests.conftest import ROOT
from tests.learning.conftest import kill_and_resume
from tests.pictures import make_model
from tests.unit.data_tokenizer import char_tokenizer

PUZZLES = ROOT.parent / "shared/data/puzzlevqa"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO on twelve rows of two pictures each, for lower-case letters."""
    directory = tmp_path_factory.mktemp("pictures")
    rows = [question(*puzzle) for puzzle in puzzles(directory, "train", 12, 0, 28)]
    write_rows(directory / "train.jsonl", rows)
    better, worse = ([{"role": "assistant", "content": text}] for text in ("rgby", "wwww"))
    pairs = [{"prompt": row["prompt"], "images": row["images"], "chosen": better, "rejected": worse} for row in rows]
    write_rows(directory / "pairs.jsonl", pairs)
    (directory / "reward.py").write_text("def lower(completion):\n    return sum(map(str.islower, completion)) / 8\n")
    tree: dict[str, Any] = {
        "model": {"path": str(make_model("qwen2_5_vl", directory / "model"))},
        "data": {"train_files": [str(directory / "train.jsonl")], "prompts_per_step": 4, "max_prompt_tokens": 64},
        "algorithm": {"type": "grpo", "group_size": 4, "kl": {"place": "loss", "coefficient": 0.01}},
        "generation": {"max_response_tokens": 8},
        "training": {"optimizer": {"lr": 1e-3}},
        "reward": {"functions": [f"{directory}/reward.py:lower"], "workers": 1},
        "trainer": {"steps": 4, "save_every": 2, "keep_last": 9},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    return directory / "config.yaml"


def train(recipe: Path, name: str, *overrides: str, command: str = "train") -> Path:
    run = recipe.with_name(name)
    assert main([command, str(recipe), f"trainer.run_dir={run}", *overrides]) == 0
    return run


def weights(run: Path, step: int) -> dict[str, Any]:
    return load_file(run / f"checkpoints/step_{step:06d}/model/model.safetensors")


@pytest.mark.parametrize("tower", ["train", pytest.param("frozen", marks=pytest.mark.nightly)])
def test_a_resumed_run_is_the_undisturbed_one(recipe: Path, tower: str) -> None:
    whole = train(recipe, f"whole-{tower}", f"model.vision_tower={tower}")
    cut = train(recipe, f"cut-{tower}", f"model.vision_tower={tower}", "trainer.steps=2")
    assert main(["train", "--resume", str(cut), "trainer.steps=4"]) == 0
    found, expected, start = (
        weights(cut, 4),
        weights(whole, 4),
        load_file(recipe.with_name("model") / "model.safetensors"),
    )
    assert all((found[name] == expected[name]).all() for name in found.keys() | expected.keys())
    moved = {name for name in start if (start[name] != found[name]).any()}
    assert {name.startswith("visual.") for name in moved} == ({False} if tower == "frozen" else {True, False})
    mismatch = [record["rollout/mismatch_max"] for record in read_metrics(whole / "metrics.jsonl")]
    assert len(mismatch) == 4 and max(mismatch) < 2e-5


def test_transformers_loads_what_is_saved_and_the_next_run_goes_on(recipe: Path) -> None:
    run = train(recipe, "saved", "trainer.steps=2")
    directory = run / "checkpoints/step_000002/model"
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory)
    names = load_file(recipe.with_name("model") / "model.safetensors").keys()
    assert weights(run, 2).keys() == names
    assert transformers.AutoImageProcessor.from_pretrained(directory, backend="pil").patch_size == 14
    assert sum(p.numel() for p in model.parameters()) > 100_000
    train(recipe, "next", f"model.path={run}", "trainer.steps=1")
    replayed = recipe.with_name("replayed")
    saved = str(run / "trajectories")
    assert main(["train", str(recipe), f"trainer.run_dir={replayed}", "trainer.steps=2", "--debug-train", saved]) == 0
    assert all(
        torch.equal(torch.from_numpy(weight), torch.from_numpy(weights(run, 2)[name]))
        for name, weight in weights(replayed, 2).items()
    )
    report = (run / "report.html").read_text()
    assert report.count("data:image/png;base64") >= 8


@pytest.mark.parametrize(
    "family",
    [
        "internvl",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("glm4v", "llava", "mistral3", "smolvlm")),
    ],
)
def test_other_families_train_and_are_saved_as_they_are_published(recipe: Path, family: str) -> None:
    """With adapters, where the tower learns in the one run and not in the other."""
    model = picture_families.make_model(family, recipe.with_name(family))
    options = [f"model.path={model}", "data.max_prompt_tokens=128", "trainer.steps=2"]
    adapted = ["model.lora.rank=4"] if family in ("internvl", "smolvlm") else []
    run = train(recipe, f"run-{family}", *options, *adapted)
    mismatch = [record["rollout/mismatch_max"] for record in read_metrics(run / "metrics.jsonl")]
    assert len(mismatch) == 2 and max(mismatch) < 2e-5
    start, found = load_file(model / "model.safetensors"), weights(run, 2)
    assert start.keys() == found.keys()
    tower = {name: in_tower(name) for name in start if (start[name] != found[name]).any()}
    assert {*tower.values()} == ({False} if adapted else {True, False})
    directory = run / "checkpoints/step_000002/model"
    saved: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory)
    assert saved.config.model_type == family
    assert (directory / "preprocessor_config.json").read_text() == (model / "preprocessor_config.json").read_text()


def test_adapters_are_in_the_language_model_alone(recipe: Path) -> None:
    run = train(recipe, "adapters", "model.lora.rank=4", "trainer.steps=2")
    described = json.loads((run / "checkpoints/step_000002/adapter/adapter_config.json").read_text())
    assert described["target_modules"] and not any("visual" in name for name in described["target_modules"])
    start = load_file(recipe.with_name("model") / "model.safetensors")
    merged = weights(run, 2)
    moved = {name for name in start if (start[name] != merged[name]).any()}
    assert moved and not any(name.startswith("visual.") for name in moved)


@pytest.fixture(scope="module")
def pairs(recipe: Path) -> Path:
    """Preferences about the pictures of `recipe`."""
    tree = yaml.safe_load(recipe.read_text())
    for section in ("generation", "reward", "algorithm"):
        del tree[section]
    tree["data"] = {"train_files": [str(recipe.with_name("pairs.jsonl"))], "rows_per_step": 4, "max_tokens": 64}
    tree["trainer"] = {"steps": 3}
    recipe.with_name("pairs.yaml").write_text(yaml.safe_dump(tree))
    return recipe.with_name("pairs.yaml")


@pytest.mark.nightly
def test_two_ranks_learn_as_one_does(recipe: Path) -> None:
    """Answers are the same; checkpoints load, and a run goes on, at the other number of ranks."""
    one, two = (train(recipe, f"on-{ranks}", f"cluster.ranks={ranks}", "trainer.steps=2") for ranks in (1, 2))
    for wanted, found in zip(*(read_metrics(run / "metrics.jsonl") for run in (one, two)), strict=True):
        assert found["rollout/mismatch_max"] < 2e-5
        for name in ("reward/mean", "actor/entropy", "actor/grad_norm", "actor/kl"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name
    names = load_file(recipe.with_name("model") / "model.safetensors").keys()
    files = [load_file(path) for path in (two / "checkpoints/step_000002/model").glob("*.safetensors")]
    assert len(files) == 2 and {name for own in files for name in own} == names
    assert main(["train", "--resume", str(two), "trainer.steps=3", "cluster.ranks=1"]) == 0
    train(recipe, "after-two", f"model.path={two}", "trainer.steps=1", "cluster.ranks=2", "model.lora.rank=4")


@pytest.mark.nightly
def test_generation_on_a_pool_of_its_own_a_step_ahead(recipe: Path, tmp_path: Path) -> None:
    """In step it learns the very weights of one process; ahead, killed and resumed, those of the undisturbed run."""
    pools = ["placement.pools={train: [1], serve: [1]}", "placement.roles={rollout: serve}"]
    one, two = (train(recipe, name, *options, "trainer.steps=2") for name, options in (("one", []), ("two", pools)))
    expected = weights(one, 2)
    assert all((found == expected[name]).all() for name, found in weights(two, 2).items())
    tree = yaml.safe_load(recipe.read_text())
    tree["placement"] = {"pools": {"train": [1], "serve": [1]}, "roles": {"rollout": "serve"}}
    tree["generation"]["partial_rollouts"] = False
    tree["trainer"] |= {"max_staleness": 1, "keep_trajectories": 0}
    kill_and_resume(tree, tmp_path, steps=3, kills=1)


@pytest.mark.nightly
def test_a_critic_and_a_reward_model_see_pictures(recipe: Path, pairs: Path) -> None:
    """The reward model learns from pairs, and scores for PPO, whose reference sees them, too; on two ranks."""
    judge = train(pairs, "judge", "cluster.ranks=2", command="reward-model")
    losses = [record["reward_model/loss"] for record in read_metrics(judge / "metrics.jsonl")]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < losses[0]
    scored = [f"model.reward_model_path={judge}", "reward.functions=[]"]
    ppo = ["algorithm.type=ppo", "algorithm.kl.place=reward", "algorithm.critic_optimizer.lr=1e-3"]
    run = train(recipe, "ppo", *ppo, *scored, "trainer.steps=2", "cluster.ranks=2")
    records = [*read_metrics(run / "metrics.jsonl")]
    assert all(record["rollout/mismatch_max"] < 2e-5 and record["critic/grad_norm"] > 0 for record in records)
    assert main(["train", "--resume", str(run), "trainer.steps=3", "cluster.ranks=1"]) == 0
    critic = run / "checkpoints/step_000003/critic/model"
    names = load_file(recipe.with_name("model") / "model.safetensors").keys()
    assert load_file(critic / "model.safetensors").keys() == names | {"score.weight", "score.bias"}
    train(recipe, "ppo again", *ppo, f"model.critic_path={critic}", "trainer.steps=1")


def test_a_judge_that_sees_otherwise_is_told_before_anything_starts(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_model("qwen3_vl", recipe.with_name("other"))
    refused = ["train", str(recipe), f"trainer.run_dir={recipe.with_name('no')}", f"model.critic_path={other}"]
    assert main([*refused, "algorithm.type=ppo"]) == 2
    assert "cuts pictures into other tokens than the policy" in capsys.readouterr().err


def test_a_reward_model_with_another_tokenizer_is_shown_no_pictures(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = char_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, **sizes)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    given = ["train", str(recipe), f"trainer.run_dir={tmp_path}/run", f"model.reward_model_path={tmp_path}/judge"]
    assert main([*given, "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "judge has another tokenizer or chat template than" in told and "pictures, which data row 0 has" in told


def test_preferences_have_pictures_too(pairs: Path) -> None:
    run = train(pairs, "dpo", command="dpo")
    losses = [record["dpo/loss"] for record in read_metrics(run / "metrics.jsonl")]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < losses[0]


@pytest.mark.skipif(not PUZZLES.is_dir(), reason=f"the published PuzzleVQA files are not at {PUZZLES}")
def test_published_puzzles(recipe: Path, tmp_path: Path) -> None:
    assert main(["data", "puzzlevqa", "--in", str(PUZZLES), "--out", str(tmp_path)]) == 0
    overrides = [
        f"model.path={recipe.with_name('model')}",
        "model.dtype=float32",
        f"data.train_files=[{tmp_path}/train.parquet]",
        "data.prompts_per_step=4",
        "data.images.max_pixels=50176",  # 64 tokens
        "generation.max_response_tokens=8",
        "trainer.epochs=null",
        "trainer.steps=3",
        f"trainer.run_dir={tmp_path}/run",
        # A letter alone earns nothing from a model that knows no words: it would have nothing to learn from.
        f"reward.functions=['tandem.reward.rules.choice:letter', '{recipe.with_name('reward.py')}:lower']",
    ]
    assert main(["train", str(ROOT / "recipes/puzzlevqa_grpo.yaml"), *overrides]) == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 3 and all(record["rollout/mismatch_max"] < 2e-5 for record in records)
    assert all(record["reward/errors"] == record["reward/timeouts"] == 0 for record in records)
    assert min(record["prompt_length/min"] for record in records) > 64


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "generation.type=sglang",
            "generation.type: sglang: a model that sees pictures (qwen2_5_vl) does not run so yet; use native or vllm",
        ),
        ("training.compile=true", "training.compile: a model that sees pictures"),
        (
            "training.context_parallel=2 cluster.ranks=2",
            "training.context_parallel: a model that sees pictures (qwen2_5_vl)",
        ),
        ("training.type=megatron", "training.type: megatron: a model that sees pictures (qwen2_5_vl)"),
    ],
)
def test_what_is_not_there_yet_is_told_before_anything_starts(
    recipe: Path, override: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), f"trainer.run_dir={recipe.with_name('no')}", *override.split()]) == 2
    printed = capsys.readouterr().err
    assert told in printed
    assert "1 error in the configuration" in printed, "one message for one cause"


def test_families_that_nobody_has_compared_on_vllm_are_refused_there(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "glm4v"}')
    assert main(["train", str(recipe), f"model.path={tmp_path}", "generation.type=vllm"]) == 2
    told = "generation.type: vllm: a model that sees pictures (glm4v) does not run so yet; use native"
    assert told in capsys.readouterr().err


def test_a_tower_that_learns_alone_on_several_ranks_is_told_with_the_other_mistakes(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mistral3"}')
    given = ["train", str(recipe), f"model.path={tmp_path}", "training.type=fsdp"]
    told = "model.vision_tower: train on 2 ranks (actor): a model that sees pictures (mistral3) does not run so yet"
    assert main([*given, "cluster.ranks=2"]) == 2
    assert told in capsys.readouterr().err
    for override in ("cluster.ranks=1", "cluster.ranks=2 model.vision_tower=frozen"):
        assert main([*given, *override.split()]) == 2  # the directory holds no weights
        assert "model.vision_tower" not in capsys.readouterr().err


def test_a_run_on_videos(recipe: Path) -> None:
    """Two steps of GRPO on four frames of tiles a row; conversations open with a video, too. The second run reads what
    the first one has written."""
    folder = recipe.parent / "videos"
    rows = [question(*puzzle) for puzzle in puzzles(folder, "train", 8, 0, 28)]
    message = [{"role": "user", "content": "<video>?"}]
    for row in rows:
        frames = [image["path"] for image in row.pop("images")]
        row |= {"prompt": message, "videos": [{"frames": [*frames, *frames[::-1], frames[0]], "fps": 2.0}]}
    write_rows(folder / "train.jsonl", rows)
    overrides = [
        f"model.path={make_model('qwen2_vl', folder / 'model')}", f"data.train_files=[{folder}/train.jsonl]",
        "data.videos.min_pixels=784", "data.videos.max_frames=4", "trainer.steps=2",
    ]  # fmt: skip
    run = train(recipe, "on-videos", *overrides)
    mismatch = [record["rollout/mismatch_max"] for record in read_metrics(run / "metrics.jsonl")]
    assert len(mismatch) == 2 and max(mismatch) < 2e-5
    (table,) = (pq.read_table(file) for file in (run / "trajectories").glob("*1.parquet"))
    steps = table["pictures"].to_pylist()
    assert all([one["step"] for one in shown] == [[0, 0], [1, 2]] for shown in steps)
    again = train(recipe, "videos-again", *overrides, "--debug-train", str(run / "trajectories"))
    assert weights(again, 2).keys() == weights(run, 2).keys()
    assert all((weights(again, 2)[name] == array).all() for name, array in weights(run, 2).items())
