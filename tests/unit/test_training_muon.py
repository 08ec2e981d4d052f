"""Muon's steps: how long, which way, and which weights take them; on several ranks: tests/contract."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from tandem.training.optimizer import MasterOptimizer
from tandem.training.optimizers.muon import MuonConfig
from tandem.training.optimizers.steps.sharded_muon import hidden_matrices

TINY = Qwen2Config(
    vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2, num_labels=1,
)  # fmt: skip


def test_the_matrices_of_layers_are_moved_and_neither_embeddings_nor_heads_nor_vectors() -> None:
    for kind in (Qwen2ForCausalLM, Qwen2ForTokenClassification):
        model = kind(TINY)
        chosen = hidden_matrices(model)
        assert {name.rpartition("layers.0.")[2] for name, p in model.named_parameters() if p in chosen} == {
            *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
            *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        }


def test_a_first_step_goes_the_gradients_way_with_every_singular_value_about_one() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 6)
    before = layer.weight.detach().clone()
    muon = MasterOptimizer(layer, MuonConfig(lr=0.5, adamw_lr=0.125), 1)
    left, right = torch.linalg.qr(torch.randn(6, 6)).Q, torch.linalg.qr(torch.randn(12, 6)).Q
    layer.weight.grad, layer.bias.grad = (
        left @ torch.diag(torch.linspace(0.05, 0.2, 6)) @ right.T,
        torch.full((6,), 0.1),
    )
    bias = layer.bias.detach().clone()
    muon.step()
    step = (before - layer.weight.detach()) / (0.5 * 0.2 * 12**0.5)
    found = left.T @ step @ right
    torch.testing.assert_close(found - torch.diag(found.diag()), torch.zeros(6, 6), rtol=0, atol=0.03)
    assert found.diag().min() > 0.6 and found.diag().max() < 1.3
    torch.testing.assert_close(bias - layer.bias.detach(), torch.full((6,), 0.125))  # AdamW's first step is its rate


def test_a_momentum_that_takes_nothing_in_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum"):
        MuonConfig(momentum=1.0)


def test_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(12, 6, bias=False), nn.Linear(12, 6, bias=False)
    theirs.load_state_dict(ours.state_dict())
    config = MuonConfig(lr=0.1, momentum=0.9, weight_decay=0.2, max_grad_norm=1e9)
    muon = MasterOptimizer(ours, config, 4)
    how = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
    reference = torch.optim.Muon(theirs.parameters(), **how)
    for _ in range(4):
        gradient = torch.randn(6, 12)
        ours.weight.grad, theirs.weight.grad = gradient.clone(), gradient.clone()
        muon.step()
        reference.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-6)
