"""Degrees that do not fit, families without a bridge, missing packages: one message each, before any process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tandem.cli import main
from tandem.config.load import load_config
from tandem.config.rules.ranks import find_bridge_mistakes
from tandem.config.training import MegatronTrainingConfig
from tandem.config.tree import SftConfig
from tandem.jobs.preflight.packages import find_training_package
from tests.conftest import ROOT

INSTALLED = find_spec("megatron") is not None
DENSE = {
    "model_type": "qwen2",
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
}
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 20}
SAVED_MOE = {**MOE, "num_local_experts": MOE["num_experts"]}
"""As transformers 5 names them."""
del SAVED_MOE["num_experts"]


def told(path: Path, shape: dict[str, Any], ranks: int, **layout: int) -> str:
    (path / "config.json").write_text(json.dumps(shape))
    return "; ".join(find_bridge_mistakes(path, MegatronTrainingConfig(type="megatron", **layout), ranks))


@pytest.mark.parametrize(
    ("shape", "ranks", "layout", "said"),
    [
        (DENSE, 4, {"tensor_parallel": 4}, ""),
        (DENSE, 12, {"tensor_parallel": 2, "pipeline_parallel": 3, "virtual_pipeline": 2, "context_parallel": 2}, ""),
        (MOE, 4, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}, ""),
        (SAVED_MOE, 3, {"expert_parallel": 3}, ""),
        (DENSE, 6, {"tensor_parallel": 4}, "= 4 does not divide 6 ranks"),
        (DENSE, 8, {"tensor_parallel": 8}, "= 8 does not divide 12 attention heads"),
        (DENSE, 6, {"tensor_parallel": 6}, "= 6 does not divide 4 key-value heads"),
        (MOE, 24, {"expert_parallel": 3, "expert_tensor_parallel": 8}, "= 8 does not divide 20 expert columns"),
        (DENSE, 4, {"pipeline_parallel": 4}, "= 4 does not divide 6 layers"),
        (DENSE, 2, {"pipeline_parallel": 2, "virtual_pipeline": 2}, "= 4 does not divide 6 layers"),
        (SAVED_MOE, 4, {"expert_parallel": 4}, "= 4 does not divide 6 experts"),
        (MOE, 2, {"expert_parallel": 2, "expert_tensor_parallel": 2}, "= 4 does not divide 2 ranks"),
        (DENSE, 2, {"expert_parallel": 2}, "expert_parallel is for a mixture of experts"),
        (MOE, 2, {"tensor_parallel": 2}, "needs sequence_parallel: true"),
        ({**DENSE, "model_type": "gpt2"}, 1, {}, "no bridge for model type gpt2"),
        ({**DENSE, "hidden_act": "silu", "use_sliding_window": False, "rope_scaling": None}, 1, {}, ""),
        ({**DENSE, "hidden_act": "gelu"}, 1, {}, "leaves out what config.json of {path} says: hidden_act: gelu;"),
        ({**DENSE, "attention_bias": True, "mlp_bias": True}, 1, {}, "says: attention_bias: True, mlp_bias: True;"),
        ({**DENSE, "use_sliding_window": True, "sliding_window": 9}, 1, {}, "says: use_sliding_window: True;"),
        ({**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [0]}, 1, {}, "decoder_sparse_step: 2, mlp_only_layers"),
        ({**DENSE, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 1, {}, "says: RoPE of type dynamic;"),
        (
            {**DENSE, "rope_scaling": {"type": "linear", "factor": 4.0}, "partial_rotary_factor": 0.5},
            1,
            {},
            "says: partial_rotary_factor: 0.5;",
        ),
    ],
)
def test_what_does_not_fit_is_told(
    tmp_path: Path, shape: dict[str, Any], ranks: int, layout: dict[str, int], said: str
) -> None:
    message = told(tmp_path, shape, ranks, **layout)
    assert said.format(path=tmp_path) in message and bool(said) == bool(message)


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    message = told(tmp_path, DENSE, 7, tensor_parallel=8)
    assert message.count("does not divide") == 4


@pytest.mark.skipif(INSTALLED, reason="Megatron-Core is installed here")
def test_missing_packages_are_named() -> None:
    sections = {"model": {"path": "m"}, "data": {"train_files": ["a.jsonl"]}, "training": {"type": "megatron"}}
    config = load_config(SftConfig, {**sections, "trainer": {"run_dir": "r", "steps": 1}})
    (told,) = find_training_package(config)
    assert "not installed (megatron, mbridge): pip install -e '.[megatron]'" in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["training.tensor_parallel=2"], "= 2 does not divide 3 ranks"),
        (["model.lora.rank=4"], "model.lora: adapters are of training.type: fsdp"),
    ],
)
def test_a_run_is_refused_before_anything_starts(
    sort4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    files = [f"model.path={sort4 / 'model'}", f"data.train_files=[{sort4 / 'train.jsonl'}]", "data.val_files=[]"]
    run = ["cluster.ranks=3", "training.type=megatron", f"trainer.run_dir={tmp_path / 'run'}"]
    assert main(["train", str(ROOT / "recipes/sort4_grpo.yaml"), *files, *run, *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"virtual_pipeline": 2}, "needs pipeline_parallel"),
        ({"sequence_parallel": True}, "needs tensor_parallel"),
        ({"expert_tensor_parallel": 2}, "needs expert_parallel"),
    ],
)
def test_degrees_that_need_others_are_refused(layout: dict[str, int], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        MegatronTrainingConfig(type="megatron", **layout)
