"""Which model families are refused, and why: read from a config.json alone, before torch is imported.

Log-probs are computed on packed rows, generated with a key-value cache, and taken chunk by chunk from the output layer.
Each of these is another computation than transformers' own, so a family runs only where all of them give the log-probs
of its eager attention. `family_check` measures that with a small model; docs/models.md has the figures. This module
says the same without a model: tests/unit/test_models_families.py holds the two together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.model_files import STATE_LAYERS, rope_kinds
from tandem.pictures.vlm_config import MODEL_TYPES, SPATIAL_TYPES

_EQUAL = """
    afmoe apertus arcee aria_text axk1 bamba biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm dbrx deepseek_v2
    deepseek_v3 dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo fuyu gemma gemma2 gemma3
    gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite
    got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kimi_linear laguna lfm2
    lfm2_moe llama longcat_flash mamba2 mellum mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral nanochat
    nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2
    vaultgemma youtu"""
EQUAL = frozenset(_EQUAL.split())
"""Model types whose log-probs are those of eager attention, where none of the options below says otherwise."""

_VALUE_HEADS = """
    apertus arcee axk1 biogpt deepseek_v3 exaone4 gemma gemma2 glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss
    helium llama ministral ministral3 mistral mixtral persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_5 qwen3_moe
    qwen3_next seed_oss smollm3 starcoder2"""
VALUE_HEADS = frozenset(_VALUE_HEADS.split())
"""Those of them that transformers has with a head of one number a token: critics and reward models."""

PICTURES = frozenset(MODEL_TYPES)
"""Those that see pictures, and are loaded with their vision tower; others that could are loaded without it."""
SPATIAL = frozenset(SPATIAL_TYPES)
"""Those of them in which a picture's tokens have positions in three dimensions."""

_REFUSED = {
    "its scan ignores the state that several tokens go on from": "falcon_mamba jamba mamba",
    "it keeps what goes from token to token in a form of its own": """minimax qwen4_exp qwen4_exp_text recurrent_gemma
    rwkv xlstm zamba zaya""",
    "it computes attention by itself, in which packed rows see one another": """big_bird bloom codegen cpmant falcon git
    gpt_neo gpt_neox_japanese gptj megatron-bert mpt mvp openai-gpt prophetnet reformer roformer trocr xglm xlm
    xlnet""",
    "it does not tell its attention which tokens form a row": "moshi nemotron stablelm",
    "it counts positions by itself, on from one row into the next or from another one than 0": """bart bigbird_pegasus
    blenderbot blenderbot-small camembert data2vec-text marian mbart pegasus plbart roberta roberta-prelayernorm
    xlm-roberta xlm-roberta-xl xmod""",
    "its tokens see later ones": "bert-generation",
    "its logits are not those of its output layer alone": """bert electra ernie minicpm3 mllama
    modernbert-decoder rembert roc_bert""",
    "it picks the tokens to attend to with an index over one row": """axk2 deepseek_v32 glm_moe_dsa hy_v4
    minimax_m3_vl_text""",
    "it adds to attention scores what ours does not know": "doge inkling_text",
    "its layers share an attention, of which one set of keys and values would be kept": "zamba2",
    "its attention is cut into chunks": "llama4 llama4_text",
    "it attends to keys that are compressed from those of several tokens": "deepseek_v4",
    "it gives the logits of every token where those of some are asked for": "whisper",
    "a layer attends several times, but one set of keys and values is kept of it": "diffllama hrm_text",
    "it cannot be run, or not made small, from a configuration and tokens alone": """blt cohere_compass_text
    gemma3n gemma4_assistant gemma4_unified_assistant musicgen musicgen_melody""",
}
REFUSED = {family: reason for reason, families in _REFUSED.items() for family in families.split()}
"""Model type -> the reason for which it is refused whatever its options are."""

_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_causal": ((None, True), "lets tokens see later ones"),
    "use_bidirectional_attention": ((None, False, "vision"), "lets tokens see later ones"),
}
"""Key of a configuration -> values that change nothing, and what the others do."""
_LAYERS = ("full_attention", "sliding_attention", "attention", "mlp", "moe", *STATE_LAYERS)
"""Kinds of layers that see tokens of the row alone."""
_ROPES = ("dynamic", "longrope", "su")
"""RoPE whose angles depend on how long the longest row of a pass is."""


def refusal(described: Mapping[str, Any], value_head: bool = False) -> str | None:
    """Why the model of this config.json does not run on the native engine or `training.type: fsdp`, in a sentence.

    `value_head`: as a critic or a reward model. None where nothing is known against it; then
    `family_check.check_family` still compares, before weights are read. Megatron, vLLM and SGLang compute otherwise:
    what they do not know is another list.
    """
    family = str(described.get("model_type"))
    reason = REFUSED.get(family) or next(_reasons(described), None)
    if reason is None and value_head and family in EQUAL - VALUE_HEADS:
        reason = "transformers has it without a value head, so neither as a critic nor as a reward model"
    return reason and f"model type {family} does not run here: {reason} (docs/models.md lists the families that run)"


def _reasons(described: Mapping[str, Any]) -> Iterator[str]:
    text: Mapping[str, Any] = {**described, **(described.get("text_config") or {})}
    for key, (harmless, effect) in _OPTIONS.items():
        value = text.get(key)
        if value not in harmless:
            yield f"{key} {value} {effect}"
    for kind in text.get("layer_types") or ():
        if kind not in _LAYERS:
            yield f"layers of the kind {kind} do more than attend to the tokens of their row"
    if (limits := text.get("time_step_limit")) and not _unbounded(limits):
        yield f"time_step_limit {limits} bounds the time steps of its mixers, but for those of single tokens"
    for kind in rope_kinds(text):
        if kind in _ROPES:
            yield f"RoPE of type {kind} depends on how long the longest row of a pass is; use another RoPE scaling"


def _unbounded(limits: Sequence[Any]) -> bool:
    """Of two numbers, infinity as transformers writes it, or as JSON cannot."""
    lower, upper = limits
    return not lower and upper in (math.inf, "Infinity", {"__float__": "Infinity"})
