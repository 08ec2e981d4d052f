"""Every causal language model of transformers gives the log-probs of its own eager attention, or is refused by name.

Run this file to write docs/models.md anew.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.config.tree import ModelConfig
from tandem.errors import UserError
from tandem.models.attention import HARMLESS, _attend
from tandem.models.families import EQUAL, REFUSED, refusal
from tandem.models.family_check import TOLERANCE, Agreement, check_family, compare
from tandem.models.loading import load_empty, load_policy
from tandem.models.tiny import tiny

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # gpt_bigcode
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NOT_BUILT = {
    "blt": "has tables of 500,002 rows whatever its configuration says",
    "cohere_compass_text": "has no RoPE parameters of its own",
    "gemma3n": "needs the package timm",
    "gemma4_assistant": "needs the states of another model",
    "gemma4_unified_assistant": "needs the states of another model",
    "musicgen": "has no configuration of its own",
    "musicgen_melody": "has no configuration of its own",
    "qwen4_exp": "has no default for its index",
    "qwen4_exp_text": "has no default for its index",
    "zamba": "ties weights between layers that a small model lacks",
    "zamba2": "ties weights between layers that a small model lacks",
}
DECODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"""
SHAPES: dict[str, dict[str, Any]] = {
    **{family: {"is_decoder": True} for family in DECODERS.split() if family != "bert-generation"},
    "dbrx": {"attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 10, "intermediate_size": 64},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "mamba2": {"expand": 1, "num_heads": 64, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse"] * 60},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True, "hidden_size": 64, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [32, 32]},
    "xlm": {"causal": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}
"""What published models of a family say, or a decoder has to, that its class has no default for."""


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 512} | options
    }


LONG = {"factor": 4.0, "short_factor": [1.0] * 48, "long_factor": [3.0] * 48}
EXPERTS = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: list[tuple[str, dict[str, Any], str | None]] = [
    ("cohere", {"logit_scale": 1.0, "use_qk_norm": True}, None),
    ("cohere2", {"logit_scale": 1.0}, None),
    ("deepseek_v3", rope("yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0), None),
    ("gemma2", {"final_logit_softcapping": None}, "attn_logit_softcapping 50.0 caps attention scores"),
    ("gemma2", {"attn_logit_softcapping": None}, "final_logit_softcapping 30.0 caps logits"),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, None),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True lets tokens see later"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 caps logits"),
    ("gemma4_text", {"num_kv_shared_layers": 10}, None),
    ("gemma4_text", {"attention_k_eq_v": True, "enable_moe_block": True, **EXPERTS}, None),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "is_causal False lets tokens see later"),
    ("gemma4", {"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping 30.0 caps logits"),
    ("gpt2", {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}, None),
    ("gpt_bigcode", {"multi_query": False}, None),
    ("gpt_neox", {"use_parallel_residual": False}, None),
    ("granite", {"logits_scaling": 8.0}, "logits_scaling 8.0 multiplies logits"),
    ("granitemoe", {"logits_scaling": 6.0}, "logits_scaling 6.0 multiplies logits"),
    ("hunyuan_v1_dense", rope("dynamic", factor=1.0, alpha=1000.0), "RoPE of type dynamic depends on how long"),
    ("llama", {"is_causal": False}, "is_causal False lets tokens see later ones"),
    ("llama", rope("dynamic", factor=4.0), "RoPE of type dynamic depends on how long"),
    ("llama", rope("linear", factor=4.0), None),
    ("llama", rope("llama3", **LLAMA3), None),
    ("llama", rope("longrope", **LONG), "RoPE of type longrope depends on how long"),
    ("llama", rope("proportional", partial_rotary_factor=0.25), None),
    ("llama", rope("yarn", factor=4.0), None),
    ("nanochat", {"final_logit_softcapping": None}, None),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 512}, None),
    ("phi3", rope("longrope", **LONG), "RoPE of type longrope depends on how long"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 10}, None),
    ("qwen3", {"is_causal": False}, "is_causal False lets tokens see later ones"),
]
"""Options that decide: a family, what its configuration says, and what the refusal says (None: it runs)."""


def config_of(family: str, **options: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[family](**{**SHAPES.get(family, {}), **options})


@cache
def measured(family: str) -> Agreement | str:
    """Of the family as it is published, or what ours fails with; that eager attention runs is asserted."""
    config = config_of(family)
    try:
        return compare(config)
    except Exception as error:  # noqa: BLE001 - a family raises what it likes
        model: Any = AutoModelForCausalLM.from_config(tiny(config), attn_implementation="eager").eval()
        assert model(torch.arange(3, 14)[None], use_cache=False).logits.isfinite().all()
        return f"{type(error).__name__}: {error}"


def equal(found: Agreement | str) -> bool:
    return isinstance(found, Agreement) and max(found) <= TOLERANCE


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_BUILT])
def test_a_family_gives_the_log_probs_of_eager_attention_or_is_refused(family: str) -> None:
    described = json.loads(config_of(family).to_json_string(use_diff=False))
    assert equal(measured(family)) == (refusal(described) is None), (measured(family), refusal(described))


def test_every_family_of_transformers_is_in_one_of_the_two_tables() -> None:
    assert not EQUAL & REFUSED.keys()
    assert set(FAMILIES) <= EQUAL | REFUSED.keys(), "measure the new families and add them to tandem/models/families.py"
    assert NOT_BUILT.keys() <= REFUSED.keys()
    assert len([family for family in FAMILIES if family not in NOT_BUILT and equal(measured(family))]) >= 25


@pytest.mark.parametrize(("family", "options", "reason"), VARIANTS)
def test_options_that_change_what_is_computed_are_refused(
    family: str, options: dict[str, Any], reason: str | None
) -> None:
    config = config_of(family, **options)
    told = refusal(json.loads(config.to_json_string(use_diff=False)))
    if reason is None:
        assert told is None and max(compare(config)) <= TOLERANCE
        return
    assert told is not None and reason in told and f"model type {family} " in told
    with suppress(NotImplementedError):
        assert max(compare(config)) > TOLERANCE, "refused without need"


def test_what_old_config_files_leave_out_or_call_otherwise_is_refused_too() -> None:
    assert "attn_logit_softcapping 50.0" in str(refusal({"model_type": "gemma2"}))
    assert "logit_scale 0.0625" in str(refusal({"model_type": "cohere"}))
    assert "type su" in str(refusal({"model_type": "phi3", "rope_scaling": {"type": "su"}}))
    layers = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "dynamic"}}
    assert "type dynamic" in str(refusal({"model_type": "olmo3", "rope_parameters": layers}))
    assert "kind linear_attention" in str(refusal({"model_type": "new", "layer_types": ["linear_attention"]}))
    assert refusal({"model_type": "llama", "rope_scaling": None}) is None
    assert refusal({"model_type": "new"}) is None


def test_a_refused_family_is_named_before_weights_are_looked_for(tmp_path: Path) -> None:
    config_of("gpt_oss").save_pretrained(tmp_path)
    for load in (load_policy, lambda config: load_empty(config, value_head=True)):
        with pytest.raises(UserError, match=r"model type gpt_oss does not run here: its attention has sinks"):
            load(ModelConfig(path=tmp_path))


class ScaledConfig(LlamaConfig):
    model_type = "llama_scaled"
    factor: float = 1.0
    table: int = 0


class Scaled(LlamaForCausalLM):
    config_class = ScaledConfig  # pyright: ignore[reportAssignmentType]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.zeros(config.table))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.config.factor
        return outputs


AutoConfig.register("llama_scaled", ScaledConfig)
AutoModelForCausalLM.register(ScaledConfig, Scaled)


def test_a_family_that_nobody_knows_is_compared_when_it_is_loaded() -> None:
    check_family(ScaledConfig())
    with pytest.raises(UserError, match=r"model type llama_scaled .* differ from those of transformers' eager"):
        check_family(ScaledConfig(factor=2.0))
    with pytest.raises(UserError, match=r"model of it fails with ValueError: it still has 100,\d+,\d+ parameters"):
        check_family(ScaledConfig(table=10**8))


def attend(**arguments: Any) -> Any:
    class Plan:
        def attend(self, layer: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
            return query

    class Module:
        layer_idx = 0

    return _attend(
        Module(), *torch.zeros(3, 1, 1, 1, 1), **{"attention_mask": None, **arguments}, attention_plan=Plan()
    )


@pytest.mark.parametrize(
    "argument", [{"s_aux": 1.0}, {"softcap": 50.0}, {"attention_mask": 1}, {"dropout": 0.1}, {"is_causal": False}]
)
def test_attention_refuses_what_it_does_not_understand(argument: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"attention with .*{next(iter(argument))}"):
        attend(**argument)


def test_attention_takes_what_is_absent_or_harmless() -> None:
    attend(s_aux=None, softcap=None, dropout=0.0, is_causal=True, **dict.fromkeys(HARMLESS, 1))
