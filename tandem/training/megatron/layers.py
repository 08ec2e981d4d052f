"""Which modules a transformer layer is made of: TransformerEngine's where it is installed, local ones where not."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from tandem.models.attention import Scoring
from tandem.training.megatron.packed_rows import PackedSeqPlan
from tandem.training.megatron.routers import Router

FUSED = find_spec("transformer_engine") is not None
"""TransformerEngine is there, with the fused layers of GPUs."""
LOCAL: dict[str, bool] = dict.fromkeys(
    (
        "apply_rope_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "moe_grouped_gemm",
        "persist_layer_norm",
    ),
    False,
)
"""Options of TransformerConfig for local modules."""


def layer_specs(config: Any, stage: int | None) -> TransformerBlockSubmodules:
    """The specifications of the layers of one pipeline stage; `config`: a TransformerConfig."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=FUSED, normalization=config.normalization, vp_stage=stage
    )
    if not FUSED:
        block.layer_norm = RMSNorm
    for layer in block.layer_specs or []:
        parts: Any = layer.submodules
        if isinstance(parts.mlp.submodules, MoESubmodules):
            parts.mlp.submodules.router = Router
        if not FUSED:
            parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
            attention = parts.self_attention.submodules
            attention.core_attention = PackedAttention
            for name in ("q_layernorm", "k_layernorm"):
                if getattr(attention, name) is not IdentityOp:
                    setattr(attention, name, RMSNorm)
    return block


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square normalisation (Zhang & Sennrich 2019) that sequence parallelism may cut by token."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """Causal attention within rows packed head to tail; context-parallel ranks each attend over all of their tokens."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqPlan,
        **_: Any,
    ) -> Tensor:
        """`[tokens, heads, head_dim]` each -> `[tokens, heads * head_dim]`."""
        plan = packed_seq_params
        assert plan.rows is not None and plan.gathered is not None and plan.held is not None
        heads = [query, key, value]
        if self._group.size() > 1:
            heads = [gather_from_sequence_parallel_region(x, group=self._group)[plan.gathered] for x in heads]
        query, key, value = (x.transpose(0, 1)[None] for x in heads)
        output = plan.rows.attend(0, query, key, value, Scoring(self._scale))[0].flatten(1)
        return output[plan.held] if self._group.size() > 1 else output
