"""The coder-and-tester recipe on the published problems: `tandem data`, its preparation, and two steps of training."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.cli import main
from tandem.errors import UserError
from tandem.sandbox.build import make_sandbox
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT, load_file

MBPP = ROOT.parent / "shared" / "data" / "mbpp"
CHAT = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant: "
FIXED = """
import sys
sys.path.insert(0, {example!r})
from rewards import cure

def f(prompts, completions, ground_truth, extra_info):
    answers = []
    for i, extra in enumerate(extra_info):
        if extra["role"] == "coder":
            answers.append(extra["answer"] if i % 2 else "x = 1")
        else:
            answers.append(ground_truth[i]["tests"][1] if i % 2 else "assert str(1) == '2'")
    return cure(prompts, answers, ground_truth, extra_info, sandbox={{"timeout_s": 10}})
"""
"""An untrained model says nothing that runs, so half of the answers are put in its mouth: right ones and wrong ones."""


def model(directory: Path) -> Path:
    tokenizer = load_file(ROOT / "examples/sort4/task.py").build_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    shape = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(shape).save_pretrained(directory)
    return directory


@pytest.mark.skipif(not MBPP.is_dir(), reason=f"the published MBPP files are not at {MBPP}")
def test_the_recipe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        make_sandbox()
    except UserError as error:
        pytest.skip(f"no sandbox on this machine: {error}")
    monkeypatch.chdir(ROOT)
    assert main(["data", "mbpp", "--in", str(MBPP), "--out", str(tmp_path / "mbpp")]) == 0
    load_file(ROOT / "examples/cure/prepare.py").main(
        str(tmp_path / "mbpp/train.parquet"), str(tmp_path / "cure.parquet")
    )
    assert pq.read_metadata(tmp_path / "cure.parquet").num_rows == 2 * 374
    (tmp_path / "fixed.py").write_text(FIXED.format(example=str(ROOT / "examples/cure")))
    common = [
        f"model.path={model(tmp_path / 'model')}", "model.dtype=float32", f"data.train_files=[{tmp_path}/cure.parquet]",
        "data.val_files=[]", "data.prompts_per_step=4", "data.max_prompt_tokens=3000", "algorithm.group_size=4",
        "generation.max_response_tokens=8", "trainer.epochs=null", "trainer.steps=2",
    ]  # fmt: skip
    recipe = str(ROOT / "recipes/mbpp_cure.yaml")
    assert main(["train", recipe, *common, f"trainer.run_dir={tmp_path}/run"]) == 0
    first = read_metrics(tmp_path / "run/metrics.jsonl")[0]
    assert (first["reward/acc"], first["reward/errors"], first["reward/not_scored"]) == (0.0, 0.0, 8.0)

    functions = f"[{{function: {tmp_path}/fixed.py:f, score_together: extra_info.problem}}]"
    assert main(["train", recipe, *common, f"trainer.run_dir={tmp_path}/fixed", f"reward.functions={functions}"]) == 0
    first = read_metrics(tmp_path / "fixed/metrics.jsonl")[0]
    assert (first["reward/acc"], first["reward/errors"], first["reward/not_scored"]) == (0.5, 0.0, 0.0)
    assert first["reward/tester_sound"] == 0.5 and first["reward/max"] == 2.0
    assert first["actor/grad_norm"] > 0
