"""Every causal language model of transformers gives the log-probs of its own eager attention, or is refused by name.

Run this file to write docs/models.md anew.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from tandem.algorithms.supervised import NextTokenLoss
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import UserError
from tandem.generation.native import NativeEngine
from tandem.models import family_check
from tandem.models.attention import ATTENTION, HARMLESS
from tandem.models.attention.interface import _attend
from tandem.models.families import EQUAL, REFUSED, VALUE_HEADS, refusal
from tandem.models.family_check import TOLERANCE, Agreement, _models, check_family, compare
from tandem.models.lean import make_lean
from tandem.models.loading import drop_nothing, load_empty, load_policy
from tandem.models.mixing import wrap_mixers
from tandem.models.tiny import tiny
from tandem.training.fsdp import FsdpEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Completion, IntArray, MicroBatch, Request, SamplingParams, TokenColumns
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "models.md"

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
}
DECODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"""
BUILT = [family for family in FAMILIES if family not in NOT_BUILT]
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
    ("deepseek_v3", rope("yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0), None),
    ("gemma2", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0}, None),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, None),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True lets tokens see later"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, None),
    ("gemma4_text", {"num_kv_shared_layers": 10}, None),
    ("gemma4_text", {"attention_k_eq_v": True, "enable_moe_block": True, **EXPERTS}, None),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "is_causal False lets tokens see later"),
    ("gemma4", {"text_config": {"final_logit_softcapping": 30.0}}, None),
    ("gpt2", {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}, None),
    ("gpt_bigcode", {"multi_query": False}, None),
    ("gpt_neox", {"use_parallel_residual": False}, None),
    ("granite", {"logits_scaling": 8.0}, None),
    ("granitemoe", {"logits_scaling": 6.0}, None),
    ("hunyuan_v1_dense", rope("dynamic", factor=1.0, alpha=1000.0), "RoPE of type dynamic depends on how long"),
    ("granitemoehybrid", {"time_step_limit": (0.001, 0.1)}, "time_step_limit [0.001, 0.1] bounds the time steps"),
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
def measured(family: str, variant: int | None = None) -> Agreement | str:
    """Of the family as it is published, or of a variant; what ours fails with where eager attention does not."""
    config = config_of(family, **({} if variant is None else VARIANTS[variant][1]))
    try:
        return compare(config)
    except Exception as error:  # noqa: BLE001 - a family raises what it likes
        model: Any = AutoModelForCausalLM.from_config(tiny(config), attn_implementation="eager").eval()
        assert model(torch.arange(3, 14)[None], use_cache=False).logits.isfinite().all()
        return f"{type(error).__name__}: {error}"


def equal(found: Agreement | str) -> bool:
    return isinstance(found, Agreement) and all(difference <= TOLERANCE for difference in found)


def told(config: PreTrainedConfig, value_head: bool = False) -> str | None:
    """The refusal from the file that `save_pretrained` would write."""
    return refusal(json.loads(config.to_json_string(use_diff=False)), value_head)


COMMON = """deepseek_v3 gemma2 gemma3_text glm4 gpt2 gpt_oss granite llama mistral mixtral olmo2 phi3 qwen2 qwen3
    qwen3_moe smollm3 starcoder2 mamba falcon_h1 qwen3_next lfm2 mamba2 nemotron_h"""
"""Those that are tried with every change: the ones that users train most, and some that are refused."""


def tiers(families: Iterable[str]) -> Any:
    return [pytest.param(one, marks=() if one in COMMON.split() else pytest.mark.nightly) for one in families]


@pytest.mark.parametrize("family", tiers(BUILT))
def test_a_family_gives_the_log_probs_of_eager_attention_or_is_refused(family: str) -> None:
    reason = told(config_of(family))
    assert equal(measured(family)) == (reason is None), (measured(family), reason)


def test_every_family_of_transformers_is_in_one_of_the_two_tables() -> None:
    assert not EQUAL & REFUSED.keys()
    assert set(FAMILIES) <= EQUAL | REFUSED.keys(), "measure the new families and add them to tandem/models/families.py"
    assert NOT_BUILT.keys() <= REFUSED.keys() and set(FAMILIES) >= {*COMMON.split()}


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=lambda i: "-".join([VARIANTS[i][0], *VARIANTS[i][1]]))
def test_options_that_change_what_is_computed_are_refused(variant: int) -> None:
    family, options, reason = VARIANTS[variant]
    assert equal(measured(family, variant)) == (reason is None), measured(family, variant)
    refused = told(config_of(family, **options))
    if reason is None:
        assert refused is None
    else:
        assert refused is not None and reason in refused and f"model type {family} " in refused


RUNS = [family for family in BUILT if told(config_of(family)) is None]


@torch.no_grad()
@pytest.mark.parametrize("family", tiers(RUNS))
def test_the_engine_scores_a_family_as_eager_attention_does(family: str) -> None:
    """Through everything that training does: prefixes, chunks of the output layer, its bias."""
    eager, ours = _models(tiny(config_of(family)), trust_remote_code=False)
    ids = np.arange(3, 29, dtype=np.int32)
    offsets, prefixes = np.array([0, 4, 13, 26]), np.array([-1, 0, -1])
    scored = np.array([3, 4, 5, 11, 13, 20, 24])
    batch = MicroBatch(ids, offsets, prefixes, scored, ids[scored + 1], TokenColumns(), np.arange(len(scored)))
    found = FsdpEngine(ours, FsdpTrainingConfig(), None).forward([batch])[0].logprobs_S
    rows = [torch.from_numpy(row)[None].long() for row in (ids[:13], ids[13:])]
    wanted = torch.cat([eager(row, use_cache=False).logits[0] for row in rows]).log_softmax(-1)
    torch.testing.assert_close(found, wanted[scored, ids[scored + 1]], rtol=0, atol=TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("family", tiers(RUNS))
def test_the_engine_generates_with_the_log_probs_of_eager_attention(family: str) -> None:
    """Siblings that share a prompt, and prompts of other lengths that end before them."""
    eager, ours = _models(tiny(config_of(family)), trust_remote_code=False)
    engine = NativeEngine(ours, max_running=4)
    engine.load_weights(0, None)
    prompts = [np.arange(3, 9, dtype=np.int32), np.arange(20, 23, dtype=np.int32)]

    async def ask(prompt: IntArray, seeds: tuple[int, ...], tokens: int) -> list[Completion]:
        return [sample async for sample in engine.generate(Request(prompt, SamplingParams(max_tokens=tokens), seeds))]

    async def ask_together() -> list[list[Completion]]:
        return await asyncio.gather(ask(prompts[0], (1, 2, 3), 6), ask(prompts[1], (4,), 4))

    for prompt, samples in zip(prompts, asyncio.run(ask_together()), strict=True):
        for sample in samples:
            row = torch.from_numpy(np.concatenate((prompt, sample.token_ids))).long()
            logprobs = eager(row[None], use_cache=False).logits[0].log_softmax(-1)
            wanted = logprobs[len(prompt) - 1 : -1].gather(1, row[len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(sample.logprobs, wanted.numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", tiers(RUNS))
def test_checkpointed_layers_compute_what_the_others_do(family: str) -> None:
    """No dropout, no noise of routers: log-probs are the same whether activations are kept or computed anew."""
    config = tiny(config_of(family))
    drop_nothing(config)
    with torch.no_grad():
        ours = _models(config, trust_remote_code=False)[1]
    try:
        engine = FsdpEngine(ours, FsdpTrainingConfig(activation_checkpointing=True), AdamWConfig())
    except UserError as error:
        assert family in ("ctrl", "jetmoe") and "activation_checkpointing: transformers cannot" in str(error)
        return
    ids, share = np.arange(3, 29, dtype=np.int32), np.full(7, 1 / 7, dtype=np.float32)
    scored = np.array([3, 4, 5, 11, 13, 20, 24])
    columns = TokenColumns(loss_weights=share, shares=share)
    batch = MicroBatch(
        ids, np.array([0, 4, 13, 26]), np.array([-1, 0, -1]), scored, ids[scored + 1], columns, np.arange(7)
    )
    wanted = engine.forward([batch])[0].logprobs_S
    for output in engine.forward_backward([batch] * 4, NextTokenLoss()).outputs:
        torch.testing.assert_close(output.logprobs_S, wanted, rtol=0, atol=TOLERANCE)


def test_the_families_with_a_value_head_are_those_of_transformers() -> None:
    assert EQUAL & MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.keys() == VALUE_HEADS
    assert told(config_of("olmo2")) is None
    assert "neither as a critic nor as a reward model" in str(told(config_of("olmo2"), value_head=True))


@pytest.mark.parametrize("family", tiers(sorted(VALUE_HEADS)))
def test_values_of_packed_rows_are_those_of_rows_alone(family: str) -> None:
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None} if family == "gemma2" else {}
    config = tiny(config_of(family, num_labels=1, **uncapped))
    make: Any = AutoModelForTokenClassification.from_config
    torch.manual_seed(0)
    eager = make(deepcopy(config), attn_implementation="eager").eval()
    ours = make(config, attn_implementation=ATTENTION).eval()
    for parameter in eager.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.4)
    ours.load_state_dict(eager.state_dict())
    make_lean(ours)
    wrap_mixers(ours)
    engine = FsdpEngine(ours, FsdpTrainingConfig(), None)
    ids = np.arange(20, dtype=np.int32)
    batch = MicroBatch(
        ids, np.array([0, 13, 20]), np.array([-1, -1]), np.arange(20), ids, TokenColumns(), np.arange(20)
    )
    found = engine.forward([batch])[0].values_S
    with torch.no_grad():
        rows = [torch.from_numpy(row)[None].long() for row in (ids[:13], ids[13:])]
        wanted = [eager(row, use_cache=False).logits[0, :, 0] for row in rows]
    torch.testing.assert_close(found, torch.cat(wanted), rtol=0, atol=1e-4)


def test_what_old_config_files_leave_out_or_call_otherwise_is_refused_too() -> None:
    assert "type su" in str(refusal({"model_type": "phi3", "rope_scaling": {"type": "su"}}))
    layers = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "dynamic"}}
    assert "type dynamic" in str(refusal({"model_type": "olmo3", "rope_parameters": layers}))
    assert "kind chunked_attention" in str(refusal({"model_type": "new", "layer_types": ["chunked_attention"]}))
    assert refusal({"model_type": "new", "layer_types": ["linear_attention"]}) is None
    assert refusal({"model_type": "llama", "rope_scaling": None}) is None
    assert refusal({"model_type": "new"}) is None


def test_a_refused_family_is_named_before_weights_are_looked_for(tmp_path: Path) -> None:
    config_of("mamba").save_pretrained(tmp_path)
    for load in (load_policy, lambda config: load_empty(config, value_head=True)):
        with pytest.raises(UserError, match=r"model type mamba does not run here: its scan ignores the state"):
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


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (2, 2), (6, 2)])
def test_any_number_of_heads_makes_a_small_model_that_runs(heads: int, kv_heads: int) -> None:
    shape = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 30}
    check_family(transformers.Qwen2Config(**shape, num_attention_heads=heads, num_key_value_heads=kv_heads))


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
    "argument", [{"position_bias": 1.0}, {"indices": 1}, {"attention_mask": 1}, {"dropout": 0.1}, {"is_causal": False}]
)
def test_attention_refuses_what_it_does_not_understand(argument: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"attention with .*{next(iter(argument))}"):
        attend(**argument)


def test_attention_takes_what_is_absent_or_harmless() -> None:
    attend(position_bias=None, dropout=0.0, is_causal=True, **dict.fromkeys(HARMLESS, 1))


def render() -> str:
    """docs/models.md with its tables measured anew."""
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return "\n".join([head + MARK, "", *family_rows(), "", *variant_rows(), ""])


MARK = "<!-- Written by `python -m tests.unit.test_models_families`; below this line nothing is by hand. -->"


def family_rows() -> Iterator[str]:
    count = sum(told(config_of(family)) is None for family in BUILT)
    yield f"## The {len(FAMILIES)} families of transformers {transformers.__version__}"
    yield ""
    yield f"{count} are equal, {len(FAMILIES) - count} are refused. The options are those of the class in transformers."
    yield ""
    yield "| model type | | largest difference | |"
    yield "| --- | --- | --- | --- |"
    for family in FAMILIES:
        reason = REFUSED[family] if family in NOT_BUILT else told(config_of(family))
        found = "not built: it " + NOT_BUILT[family] if family in NOT_BUILT else difference(measured(family))
        heads = "policy, critic, reward model" if family in VALUE_HEADS else "policy"
        yield f"| `{family}` | {verdict(reason)} | {found} | {brief(reason) or heads} |"


def variant_rows() -> Iterator[str]:
    yield "## Options that decide"
    yield ""
    yield "| model type | option | | largest difference | |"
    yield "| --- | --- | --- | --- | --- |"
    for number, (family, options, _) in enumerate(VARIANTS):
        shown = ", ".join(f"`{name}: {option(value)}`" for name, value in options.items())
        reason, found = told(config_of(family, **options)), difference(measured(family, number))
        yield f"| `{family}` | {shown} | {verdict(reason)} | {found} | {brief(reason)} |"


def option(value: Any) -> Any:
    """RoPE parameters by their type alone."""
    return {"rope_type": value["rope_type"]} if isinstance(value, dict) and "rope_type" in value else value


def verdict(reason: str | None) -> str:
    return "equal" if reason is None else "refused"


def brief(reason: str | None) -> str:
    """Without what every refusal begins and ends with; nothing of none."""
    return "" if reason is None else reason.rpartition("does not run here: ")[2].partition(" (docs/")[0]


def difference(found: Agreement | str) -> str:
    return f"fails: {found.partition(':')[0]}" if isinstance(found, str) else f"{max(found):.0e}"


def test_models_that_see_pictures_are_told_which_transformers_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_check, "TAKES_FEATURES", False)
    with pytest.raises(NotImplementedError, match=r"see pictures need 5\.18 or newer"):
        compare(CONFIG_MAPPING["qwen2_vl"]())


@pytest.mark.nightly
def test_the_page_is_what_is_measured() -> None:
    """But for the digits of differences, which are other ones on another processor."""
    assert sum(equal(measured(family)) for family in BUILT) >= 25
    page, wanted = (re.sub(r"\d+e[-+]\d\d", "…", text) for text in (PAGE.read_text(encoding="utf-8"), render()))
    assert page == wanted, "run: python -m tests.unit.test_models_families"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
