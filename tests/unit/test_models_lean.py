"""Lean layers compute what transformers' layers compute, forward and backward; so do fused ones, in generation."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tandem.models.attention import ATTENTION, PackedRows
from tandem.models.fused import Angles, Fused
from tandem.models.lean import make_lean

SHAPE: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
}
ROPE = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = [
    LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, rope_parameters={**ROPE, "original_max_position_embeddings": 16}
    ),
    Qwen2Config(**{**SHAPE, "head_dim": 6}, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    Qwen3Config(**SHAPE, hidden_act="gelu"),
    Qwen3Config(**SHAPE, rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}),
    LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 4},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    ),
]
TOKENS, OFFSETS, PREFIXES = torch.arange(20)[None] % 17, np.array([0, 4, 9, 11, 20]), np.array([-1, 0, 0, -1])


def make(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> tuple[Any, Any]:
    """The same random model twice, the second one lean; norms and biases are not what they are made as."""
    torch.manual_seed(0)
    plain = auto.from_config(config, attn_implementation=ATTENTION).eval()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.4)
    lean = copy.deepcopy(plain)
    make_lean(lean)
    return plain, lean


def run(model: Any) -> torch.Tensor:
    plan = PackedRows(OFFSETS, prefixes=PREFIXES)
    return model(TOKENS, position_ids=plan.positions[None], attention_plan=plan, use_cache=False).logits


@pytest.mark.parametrize(
    "config", FAMILIES, ids=lambda config: f"{config.model_type}-{config.rope_parameters['rope_type']}"
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_logits_and_gradients_are_those_of_transformers(config: PreTrainedConfig, checkpointing: bool) -> None:
    plain, lean = make(config)
    assert lean.model.layers[0].forward.__func__ is not type(lean.model.layers[0]).forward
    if checkpointing:
        lean.gradient_checkpointing_enable({"use_reentrant": False})
        lean.train()
    for model in (plain, lean):
        run(model).sin().sum().backward()
    torch.testing.assert_close(run(lean), run(plain), rtol=1e-5, atol=1e-5)
    for (name, wanted), found in zip(plain.named_parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_a_value_head_stands_on_a_lean_body() -> None:
    plain, lean = make(FAMILIES[1], AutoModelForTokenClassification)
    torch.testing.assert_close(run(lean), run(plain), rtol=1e-5, atol=1e-5)


def test_a_copy_computes_with_its_own_parameters() -> None:
    _, lean = make(FAMILIES[0])
    copied, before = copy.deepcopy(lean), run(lean)
    for parameter in lean.parameters():
        parameter.data.zero_()
    assert torch.equal(run(copied), before) and not run(lean).any()


def run_fused(model: Any) -> torch.Tensor:
    """As generation does it."""
    with torch.inference_mode():
        return run(model)


@pytest.mark.parametrize("config", FAMILIES[:4], ids=lambda config: config.model_type)
def test_fused_logits_are_those_of_transformers(config: PreTrainedConfig) -> None:
    plain, lean = make(config)
    torch.testing.assert_close(run_fused(lean), run(plain), rtol=1e-5, atol=1e-5)
    assert isinstance(lean.model.fused, Fused) and lean.model.fused.holds()


def test_angles_of_far_positions_are_those_of_transformers() -> None:
    plain, lean = make(FAMILIES[3])
    angles, position_N = Angles(lean.model.rotary_emb, torch.float32), torch.tensor([3, 5000, 511, 512])
    cos, sin = plain.model.rotary_emb(torch.zeros(1), position_N[None])
    found_cos, found_sin = (x[:, 0] for x in angles(position_N))
    torch.testing.assert_close(found_cos, cos[0])
    torch.testing.assert_close(found_sin * torch.tensor([-1.0, 1.0]).repeat_interleave(4), sin[0])


def test_angles_that_change_with_the_length_are_not_fused() -> None:
    plain, lean = make(FAMILIES[4])
    torch.testing.assert_close(run_fused(lean), run(plain), rtol=1e-5, atol=1e-5)
    assert lean.model.fused is None


def test_a_hook_on_the_body_is_called_also_where_it_comes_late() -> None:
    _, lean = make(FAMILIES[0])
    before, seen = run_fused(lean), list[torch.Tensor]()
    lean.model.register_forward_hook(lambda module, inputs, output: seen.append(output.last_hidden_state))
    torch.testing.assert_close(run_fused(lean), before, rtol=1e-5, atol=1e-5)
    assert len(seen) == 1


def test_fused_layers_see_changed_weights_at_once() -> None:
    plain, lean = make(FAMILIES[0])
    run_fused(lean)
    for model in (plain, lean):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    torch.testing.assert_close(run_fused(lean), run(plain), rtol=1e-5, atol=1e-5)


class Doubled(torch.nn.Linear):
    """What an adapter does: another layer in the place of a linear one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("place", ["self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"])
@pytest.mark.parametrize("late", [False, True])
def test_adapted_layers_are_called(place: str, late: bool) -> None:
    plain, lean = make(FAMILIES[1])
    if late:
        run_fused(lean)
    for model in (plain, lean):
        layer, (block, name) = model.model.layers[1], place.split(".")
        old = getattr(getattr(layer, block), name)
        adapted = Doubled(old.in_features, old.out_features, bias=old.bias is not None)
        adapted.load_state_dict(old.state_dict())
        setattr(getattr(layer, block), name, adapted)
    torch.testing.assert_close(run_fused(lean), run(plain), rtol=1e-5, atol=1e-5)


def test_hooks_are_called() -> None:
    plain, lean = make(FAMILIES[2])
    for model in (plain, lean):
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    torch.testing.assert_close(run_fused(lean), run(plain), rtol=1e-5, atol=1e-5)


def test_weights_that_have_moved_are_those_that_count() -> None:
    plain, lean = make(FAMILIES[2])
    run_fused(lean)
    for model in (plain, lean):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
    torch.testing.assert_close(run_fused(lean), run(plain), rtol=1e-5, atol=1e-5)
    assert not lean.model.fused.holds()


def test_weights_side_by_side_are_saved_as_they_are(tmp_path: Path) -> None:
    plain, lean = make(FAMILIES[1])
    lean.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in plain.state_dict().items())


def test_other_families_stay_as_they_are() -> None:
    _, model = make(MistralConfig(**SHAPE))
    assert "forward" not in vars(model.model) and "forward" not in vars(model.model.layers[0])
