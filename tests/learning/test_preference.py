"""`tandem dpo` and `tandem reward-model` on pairs of sort4: losses fall, margins rise, a resumed run is the same."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tandem.algorithms.preference import LinearScoreLoss, PairBatch, preference_loss
from tandem.batching.packing import micro_batches, pairs_to_batch, rated_to_batch
from tandem.cli import main
from tandem.config.algorithms import PreferenceConfig
from tandem.config.data import SftDataConfig
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.data.preference import PreferenceDataset, RatedDataset
from tandem.jobs.push import files_of, model_card
from tandem.models.loading import load_tokenizer
from tandem.training.fsdp import make_engine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch
from tests.conftest import ROOT

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs TRL, which scripts/setup installs"
)
HH = ROOT.parent / "shared/data/hh_rlhf_helpful/pairs_4000.jsonl.gz"


@pytest.fixture(scope="module")
def pairs(sort4: Path) -> Path:
    """A right answer and a wrong one (its first two digits swapped) to each of 256 prompts."""
    rows = [json.loads(line) for line in (sort4 / "train.jsonl").read_text().splitlines()[:256]]
    lines = []
    for row in rows:
        right = row["ground_truth"]
        wrong = right[1] + right[0] + right[2:]
        if wrong != right:
            lines.append(json.dumps({"prompt": row["prompt"], "chosen": right, "rejected": wrong}))
    (sort4 / "pairs.jsonl").write_text("\n".join(lines[32:]))
    (sort4 / "pairs_val.jsonl").write_text("\n".join(lines[:32]))
    return sort4


def config(pairs: Path, run_dir: Path, **more) -> Path:
    sections = {
        "model": {"path": str(pairs / "model")},
        "data": {
            "train_files": [str(pairs / "pairs.jsonl")],
            "val_files": [str(pairs / "pairs_val.jsonl")],
            "rows_per_step": 32,
        },
        "training": {"optimizer": {"lr": 3e-3}},
        "trainer": {"run_dir": str(run_dir), "steps": 30, "eval_every": 30},
        **more,
    }
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(sections))
    return path


def records(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "preference", [{}, {"loss": "simpo", "beta": 2.0, "target_margin": 0.5}, {"loss": "orpo", "beta": 1.0}]
)
def test_dpo_learns(pairs: Path, tmp_path: Path, preference: dict) -> None:
    assert main(["dpo", str(config(pairs, tmp_path / "run", preference=preference))]) == 0
    before, *_, after = records(tmp_path / "run")
    assert after["val/loss"] < before["val/loss"] and after["val/margin"] > before["val/margin"] + 0.1
    assert after["val/accuracy"] > 0.9
    assert {"dpo/loss", "dpo/margin", "dpo/accuracy", "dpo/grad_norm", "dpo/lr"} <= after.keys()


def test_kto_learns_and_resumes(pairs: Path, tmp_path: Path) -> None:
    """Of each pair two rows, in turn in one file and with their `label` in the other; a run of two halves ends as one
    run does."""
    rows = [json.loads(line) for line in (pairs / "pairs_val.jsonl").read_text().splitlines()]
    rated = [
        {"prompt": row["prompt"], "completion": row[column], "label": column == "chosen"}
        for row in rows
        for column in ("chosen", "rejected")
    ]
    (tmp_path / "rated.jsonl").write_text("\n".join(map(json.dumps, rated)))
    more: dict = {"preference": {"loss": "kto", "undesirable_weight": 1.2}}
    steps = ["trainer.steps=30", "trainer.eval_every=30", f"data.val_files=[{tmp_path}/rated.jsonl]"]
    assert main(["dpo", str(config(pairs, tmp_path / "once", **more)), *steps]) == 0
    before, *_, after = records(tmp_path / "once")
    assert before["val/loss"] == pytest.approx(1.1 / 2) and after["val/loss"] < before["val/loss"] - 0.01
    assert after["val/accuracy"] > 0.8
    assert main(["dpo", str(config(pairs, tmp_path / "halves", **more)), *steps, "trainer.steps=15"]) == 0
    assert main(["dpo", "--resume", str(tmp_path / "halves"), *steps]) == 0
    assert records(tmp_path / "halves")[-1]["val/loss"] == after["val/loss"]


def test_a_reward_model_learns_and_resumes(pairs: Path, tmp_path: Path) -> None:
    """Held-out accuracy well above chance; a run of two halves ends as one run does."""
    steps = ["trainer.steps=80", "trainer.eval_every=80"]
    assert main(["reward-model", str(config(pairs, tmp_path / "once")), *steps]) == 0
    before, *_, after = records(tmp_path / "once")
    assert after["val/accuracy"] > 0.75 and after["val/loss"] < before["val/loss"] - 0.1
    assert main(["reward-model", str(config(pairs, tmp_path / "halves")), "trainer.steps=40"]) == 0
    assert main(["reward-model", "--resume", str(tmp_path / "halves"), *steps]) == 0
    assert records(tmp_path / "halves")[-1]["val/loss"] == after["val/loss"]


def test_a_reward_model_of_adapters_learns_resumes_and_rewards(pairs: Path, tmp_path: Path) -> None:
    """Its model directory is a reward model's like any other, with the scores of `adapter/` on the first weights."""
    model = {"path": str(pairs / "model"), "lora": {"rank": 8, "alpha": 16}}
    settings = ["trainer.steps=16", "trainer.eval_every=16", "training.optimizer.lr=0.01"]
    assert main(["reward-model", str(config(pairs, tmp_path / "once", model=model)), *settings]) == 0
    before, *_, after = records(tmp_path / "once")
    assert after["val/loss"] < before["val/loss"] - 0.05
    assert (
        main(["reward-model", str(config(pairs, tmp_path / "halves", model=model)), *settings, "trainer.steps=8"]) == 0
    )
    assert main(["reward-model", "--resume", str(tmp_path / "halves"), *settings]) == 0
    once, halves = (tmp_path / run / "checkpoints/step_000016" for run in ("once", "halves"))
    assert records(tmp_path / "halves")[-1]["val/loss"] == after["val/loss"]
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (once / file).read_bytes() == (halves / file).read_bytes()
    merged: Any = AutoModelForTokenClassification.from_pretrained(once / "model")
    base = AutoModelForSequenceClassification.from_pretrained(pairs / "model", num_labels=1)
    adapted: Any = PeftModel.from_pretrained(base, once / "adapter")
    row = torch.arange(4, 12)[None]
    with torch.no_grad():
        score = merged(row).logits[0, -1]
        torch.testing.assert_close(adapted(row).logits[0], score, rtol=1e-4, atol=1e-5)
    assert "adapter/adapter_model.safetensors" in dict(files_of(once))
    card = model_card(tmp_path / "once", once, "ada/judge")
    assert "`AutoModelForSequenceClassification` of `num_labels=1`, as `PeftModel" in card
    recipe = yaml.safe_load((ROOT / "recipes/sort4_ppo.yaml").read_text())
    del recipe["reward"]
    recipe["model"] = {"path": str(pairs / "model"), "reward_model_path": str(tmp_path / "once")}
    recipe["data"] |= {"train_files": [str(pairs / "train.jsonl")], "val_files": [], "prompts_per_step": 8}
    recipe["trainer"] = {"run_dir": str(tmp_path / "run"), "steps": 1, "eval_every": 0}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(tmp_path / "ppo.yaml")]) == 0
    assert records(tmp_path / "run")[-1]["reward/mean"] != 0


@pytest.mark.nightly
def test_ppo_raises_the_score_of_a_reward_model(pairs: Path, tmp_path: Path) -> None:
    """Rewards normalised and clipped; the model is the only judge, in validation too."""
    assert main(["reward-model", str(config(pairs, tmp_path / "judge")), "trainer.eval_every=0"]) == 0
    sections = yaml.safe_load((ROOT / "recipes/sort4_ppo.yaml").read_text())
    sections["model"] = {
        "path": str(pairs / "model"),
        "reward_model_path": str(tmp_path / "judge/checkpoints/step_000030/model"),
    }
    sections["data"] |= {"train_files": [str(pairs / "train.jsonl")], "val_files": [str(pairs / "pairs_rl.jsonl")]}
    (pairs / "pairs_rl.jsonl").write_text("\n".join((pairs / "val.jsonl").read_text().splitlines()[:64]))
    sections["data"] |= {"prompts_per_step": 64}
    sections["algorithm"] |= {"normalize_rewards": True, "clip_rewards": 2.0}
    sections["training"]["optimizer"] = {"lr": 2e-3}
    sections["trainer"] = {"run_dir": str(tmp_path / "run"), "steps": 80, "eval_every": 40}
    del sections["reward"]
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(sections))
    assert main(["train", str(tmp_path / "ppo.yaml")]) == 0
    before, *_, after = records(tmp_path / "run")
    assert after["val/sort4/reward/mean@4"] > before["val/sort4/reward/mean@4"] + 0.5
    assert after["reward/model"] == after["reward/mean"]
    state = json.loads((tmp_path / "run/checkpoints/step_000080/state/rl.json").read_text())
    assert state["algorithm"]["count"] == 80 * 64


@needs_trl
@pytest.mark.parametrize(
    ("preference", "theirs"),
    [
        (PreferenceConfig(beta=0.3), {"loss_type": "sigmoid"}),
        (PreferenceConfig(beta=0.3, loss="ipo"), {"loss_type": "ipo"}),
        (PreferenceConfig(beta=0.3, length_normalized=True), {"loss_type": "sigmoid_norm"}),
    ],
)
def test_loss_and_gradient_are_trls(pairs: Path, tmp_path: Path, preference: PreferenceConfig, theirs: dict) -> None:
    """One batch of eight HH pairs, without HH of sort4; the policy has moved away from the reference."""
    lines = hh_pairs() if HH.is_file() else (pairs / "pairs.jsonl").read_text().splitlines()[:8]
    policy = moved(pairs / "model", tmp_path / "moved")
    expected = trl_loss(policy, pairs / "model", [json.loads(line) for line in lines], tmp_path, theirs)
    expected.backward()

    (tmp_path / "eight.jsonl").write_text("\n".join(lines))
    data = SftDataConfig(train_files=[tmp_path / "eight.jsonl"])
    rows = PreferenceDataset(data.train_files, load_tokenizer(ModelConfig(path=pairs / "model")), data)
    batch = pairs_to_batch([rows[row] for row in range(8)])
    compare(preference, batch, pairs / "model", tmp_path / "moved", policy, expected, margins_D=torch.zeros(8))


@needs_trl
def test_orpo_is_trls(pairs: Path, tmp_path: Path) -> None:
    """With prompts of one token, for TRL's likelihood is of the prompt's tokens, too, of all but the first."""
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    lines = [json.loads(line) for line in (pairs / "pairs.jsonl").read_text().splitlines()[:8]]
    lines = [{**line, "prompt": "=", "chosen": line["chosen"][: 2 + row % 3]} for row, line in enumerate(lines)]
    policy = moved(pairs / "model", tmp_path / "moved")
    tokenizer = AutoTokenizer.from_pretrained(pairs / "model")
    arguments = ORPOConfig(**trl_arguments(tmp_path), disable_dropout=True, max_length=64)
    trainer = ORPOTrainer(
        model=policy, args=arguments, train_dataset=Dataset.from_list(lines), processing_class=tokenizer
    )
    expected = trainer.compute_loss(policy, next(iter(trainer.get_train_dataloader())))
    expected.backward()

    (tmp_path / "eight.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = SftDataConfig(train_files=[tmp_path / "eight.jsonl"])
    rows = PreferenceDataset(data.train_files, load_tokenizer(ModelConfig(path=pairs / "model")), data)
    batch = pairs_to_batch([rows[row] for row in range(8)])
    config = PreferenceConfig(beta=0.3, loss="orpo")
    compare(config, batch, None, tmp_path / "moved", policy, expected, margins_D=torch.zeros(8))


@needs_trl
def test_kto_is_trls(pairs: Path, tmp_path: Path) -> None:
    """Eight answers of which every third is bad."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    lines = [json.loads(line) for line in (pairs / "pairs.jsonl").read_text().splitlines()[:8]]
    lines = [
        {"prompt": line["prompt"], "completion": line["rejected" if row % 3 == 0 else "chosen"], "label": row % 3 > 0}
        for row, line in enumerate(lines)
    ]
    policy = moved(pairs / "model", tmp_path / "moved")
    weights = {"desirable_weight": 0.75, "undesirable_weight": 1.25}
    arguments = KTOConfig(
        **trl_arguments(tmp_path), **weights, train_sampling_strategy="sequential", disable_dropout=True
    )
    trainer = KTOTrainer(
        model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(pairs / "model"),
        args=arguments,
        train_dataset=Dataset.from_list(lines),
        processing_class=AutoTokenizer.from_pretrained(pairs / "model"),
    )
    expected = trainer.compute_loss(policy, next(iter(trainer.get_train_dataloader())))
    expected.backward()

    (tmp_path / "eight.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = SftDataConfig(train_files=[tmp_path / "eight.jsonl"])
    dataset = RatedDataset(data.train_files, load_tokenizer(ModelConfig(path=pairs / "model")), data)
    rows = [dataset[row] for row in range(8)]
    batch = rated_to_batch(rows, data.max_tokens)
    config = PreferenceConfig(beta=0.3, loss="kto", **weights)
    facts = {"margins_D": torch.zeros(8), "desirable_D": torch.tensor([row.desirable for row in rows])}
    compare(config, batch, pairs / "model", tmp_path / "moved", policy, expected, **facts)


def moved(model: Path, directory: Path) -> Any:
    """The model a little changed, also in `directory`."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    policy.save_pretrained(directory)
    return policy


def compare(
    preference: PreferenceConfig, batch: Batch, reference: Path | None, path: Path, policy: Any,
    expected: torch.Tensor, **facts: torch.Tensor,
) -> None:  # fmt: skip
    """Loss and gradients of the policy at `path` on the batch are those that TRL left in `policy`."""
    engine = make_engine(ModelConfig(path=path), FsdpTrainingConfig(), AdamWConfig())
    frozen = make_engine(ModelConfig(path=reference), FsdpTrainingConfig(), None) if reference else None
    slopes, metrics = preference_loss(preference)(
        logprobs(engine, batch),
        PairBatch(
            torch.from_numpy(batch.row_of_token),
            torch.from_numpy(batch.loss_mask),
            ref_logprobs_T=logprobs(frozen, batch) if frozen else None,
            **facts,
        ),
    )
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    batch.tokens.loss_weights = slopes.numpy()
    engine.forward_backward(micro_batches(batch, range(16), 512), LinearScoreLoss())
    largest = max(parameter.grad.abs().max().item() for parameter in policy.parameters())
    ours = dict(engine.model.named_parameters())
    for name, parameter in policy.named_parameters():
        assert (ours[name].grad - parameter.grad).abs().max().item() < 1e-5 * largest, name


def hh_pairs() -> list[str]:
    """Eight short ones, as text."""
    start = "\n\nAssistant:"
    with gzip.open(HH, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if len(line) < 400][:8]
    split = [(row["chosen"].rpartition(start), row["rejected"].rpartition(start)) for row in rows]
    return [json.dumps({"prompt": a[0] + start, "chosen": a[2], "rejected": b[2]}) for a, b in split]


def trl_arguments(directory: Path) -> dict[str, Any]:
    return {
        "output_dir": str(directory / "trl"), "per_device_train_batch_size": 8, "beta": 0.3, "report_to": [],
        "use_cpu": True, "gradient_checkpointing": False, "bf16": False,
    }  # fmt: skip


def trl_loss(policy: Any, reference: Path, rows: list[dict], directory: Path, options: dict) -> torch.Tensor:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(**trl_arguments(directory), disable_dropout=True, **options)
    trainer = DPOTrainer(
        model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(reference),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(reference),
    )
    return trainer.compute_loss(policy, next(iter(trainer.get_train_dataloader())))


def logprobs(engine: Any, batch: Batch) -> torch.Tensor:
    found = torch.zeros(len(batch.response_ids))
    parts = micro_batches(batch, range(16), 512)
    for part, outputs in zip(parts, engine.forward(parts), strict=True):
        found[torch.from_numpy(part.source)] = outputs.logprobs_S
    return found
