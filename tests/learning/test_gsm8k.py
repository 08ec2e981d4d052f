"""Real data: GSM8K from the published files through `tandem data` and `tandem train`."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tandem.checkpoint.draft import Draft
from tandem.cli import main
from tandem.cluster.inline import InlineCluster
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.placement import Placement, pools_of
from tandem.data.dataset import RLHFDataset
from tandem.jobs.inputs import read_inputs
from tandem.jobs.rl import RlJob
from tandem.reward.manager import RewardManager
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT, load_file

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
pytestmark = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"the published GSM8K files are not at {GSM8K}")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gsm8k")
    assert main(["data", "gsm8k", "--in", str(GSM8K), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained model that reads characters and has a chat template."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = load_file(ROOT / "examples/sort4/task.py").build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(shape).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def overrides(parquet: Path, model: Path, run: Path) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float32", f"data.train_files=[{parquet}/train.parquet]",
        f"data.val_files=[{parquet}/test.parquet]", "data.prompts_per_step=4", "data.max_prompt_tokens=1500",
        "generation.max_response_tokens=24", "trainer.epochs=null", "trainer.steps=3", "trainer.eval_every=0",
        f"trainer.run_dir={run}",
    ]  # fmt: skip


def test_every_row_becomes_a_prompt(parquet: Path) -> None:
    assert pq.read_metadata(parquet / "train.parquet").num_rows == 7473
    assert pq.read_metadata(parquet / "test.parquet").num_rows == 1319


def test_the_recipe_runs(parquet: Path, model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", str(ROOT / "recipes/gsm8k_grpo.yaml"), *overrides(parquet, model, run)]) == 0
    records = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["reward/mean"] == record["reward/acc"] and record["reward/errors"] == 0 for record in records)
    assert all("actor/kl" in record for record in records)


def test_the_saved_model_gives_the_same_logits(parquet: Path, model: Path, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"  # an untrained model never solves one: reward what differs
    rewards.write_text("def f(completion, ground_truth):\n    return completion.count('a')\n")
    changed = [*overrides(parquet, model, tmp_path / "run"), f"reward.functions=[{rewards}:f]"]
    config = load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", changed)
    inputs = read_inputs(config, RLHFDataset)
    cluster = InlineCluster()
    reward = RewardManager(config.reward)
    config.trainer.run_dir.mkdir(exist_ok=True)
    job = RlJob(config, inputs, Placement(cluster, pools_of(config)), reward)
    try:
        job.step(1)
        draft = Draft(tmp_path)
        job.save(draft)
        draft.complete()
        assert inputs.train is not None
        prompt = inputs.train[0].token_ids
        trained = dict(cluster.host.workers["actor"].engine.named_weights())
    finally:
        job.close()
        reward.close()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.tensor(prompt, dtype=torch.int64)[None]
    before = AutoModelForCausalLM.from_pretrained(model)
    same = AutoModelForCausalLM.from_pretrained(model)
    same.load_state_dict(trained, strict=False)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, same(ids).logits)
        assert not torch.equal(loaded(ids).logits, before(ids).logits)
