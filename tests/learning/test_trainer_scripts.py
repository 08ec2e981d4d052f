"""examples/grpo_trainer and examples/ppo_trainer run as they are, on a tiny model of the same architecture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT, load_file

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

SMALLER = [
    "model.dtype=float32", "data.prompts_per_step=4", "data.max_prompt_tokens=64", "generation.max_response_tokens=8",
    "reward.workers=1", "trainer.epochs=null", "trainer.steps=2", "trainer.eval_every=2",
]  # fmt: skip
SCRIPTS = {
    "grpo_trainer/run_qwen3-0.6b.sh": [],
    "grpo_trainer/run_qwen3-4b_8gpus.sh": ["cluster.ranks=2"],
    "grpo_trainer/run_qwen3-8b_2nodes.sh": ["placement.pools.main=[1, 1]"],
    "ppo_trainer/run_qwen3-0.6b.sh": [],
    "ppo_trainer/run_qwen3-4b_8gpus.sh": [f"placement.pools.{pool}=[1]" for pool in ("acting", "judging", "asking")],
}
"""What fits this machine, where the script's own does not."""
QUICK = ("grpo_trainer/run_qwen3-0.6b.sh",)
"""The others pass the same shell lines and differ in placement, which tests of placement have."""


def test_every_script_is_tried() -> None:
    found = {str(path.relative_to(ROOT / "examples")) for path in ROOT.glob("examples/*_trainer/*.sh")}
    assert found == set(SCRIPTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    tokenizer = load_file(ROOT / "examples/sort4/task.py").build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files as `tandem data gsm8k` writes them."""
    directory = tmp_path_factory.mktemp("data")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{number} + {number} ="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(8)
    ]
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{name}.parquet")
    return directory


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in SCRIPTS]
)
def test_a_script_trains(script: str, model: Path, data: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "MODEL_PATH": str(model),
        "DATA_DIR": str(data),
        "RUN_DIR": str(tmp_path / "run"),
    }
    if "nodes" in script:
        nodes: Cluster = request.getfixturevalue("ray_nodes")
        environment["RAY_ADDRESS"] = nodes.address
    command = ["sh", str(ROOT / "examples" / script), *SMALLER, *SCRIPTS[script]]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [record["step"] for record in read_metrics(tmp_path / "run/metrics.jsonl")][-2:] == [1, 2]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step_000002/model")
    assert trained.config.model_type == "qwen3"
