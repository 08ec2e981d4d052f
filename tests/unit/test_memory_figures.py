"""The figures of memory in docs/megatron.md and recipes/dapo.yaml, from parameters counted on the meta device.

tests/megatron/test_layouts.py measures the same formulas on tiny models.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.conftest import ROOT

GIB = 2**30
HEADS: dict[str, Any] = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151_936}
SHAPES = {
    "Qwen3-8B": Qwen3Config(
        **HEADS,
        num_key_value_heads=8,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        **HEADS,
        num_key_value_heads=4,
        hidden_size=2048,
        num_hidden_layers=48,
        num_experts=128,
        moe_intermediate_size=768,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-32B": Qwen2Config(
        vocab_size=152_064,
        hidden_size=5120,
        intermediate_size=27_648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
}
"""As the models' own config.json have them."""
PAGE = (ROOT / "docs/megatron.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (Qwen[^,|]*), ([^|]*) \|([^|]*)\|([^|]*)\|$", PAGE, re.MULTILINE)


@cache
def parameters(name: str) -> tuple[int, int]:
    """Dense ones, and those of experts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name])
    sizes = {part: weight.numel() for part, weight in model.named_parameters()}
    experts = sum(size for part, size in sizes.items() if ".experts." in part)
    return sum(sizes.values()) - experts, experts


def megatron_gib(name: str, ranks: int, t: int = 1, p: int = 1, e: int = 1) -> str:
    """`weights and gradients + optimizer` on a rank in bfloat16, as the table has it."""
    dense, experts = parameters(name)
    held = 6 * (dense / (t * p) + experts / (e * p))
    optimizer = 12 * (dense + experts) / ranks
    return f"{held / GIB:.0f} + {optimizer / GIB:.0f}"


def test_the_table_of_the_page_is_there() -> None:
    assert len(ROWS) == 7


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(row[:2]))
def test_megatron_ranks(row: tuple[str, ...]) -> None:
    name, degrees, *cells = row
    layout = {letter: int(size) for letter, size in re.findall(r"(\w) = (\d+)", degrees)}
    for ranks, cell in zip((8, 16), cells, strict=True):
        if cell.strip():
            assert cell.strip() == megatron_gib(name, ranks, **layout), (name, layout, ranks)


def test_sizes_that_are_named() -> None:
    assert "Qwen3-8B (8.19 B)" in PAGE and f"{sum(parameters('Qwen3-8B')) / 1e9:.2f}" == "8.19"
    dense, experts = parameters("Qwen3-30B-A3B")
    assert f"({dense / 1e9:.2f} B dense, {experts / 1e9:.2f} B in experts)" in PAGE


def test_what_dapos_model_takes() -> None:
    """A float32 master, two moments and a gradient for each parameter."""
    total = sum(parameters("Qwen2.5-32B"))
    recipe = (ROOT / "recipes/dapo.yaml").read_text(encoding="utf-8")
    assert f"16 bytes for each of {total / 1e9:.2f} B parameters, {16 * total / GIB:.0f} GiB" in recipe
