"""The Llama family with fewer kernels: transformers' arithmetic on transformers' modules, with less between them.

transformers computes a norm in six kernels and a rotation in eight, and looks at masks, caches and options in every
layer. Parameters and names stay as they are, and layers and linear layers are still called as modules, so that
sharding, checkpointed activations and adapters find what they wrap.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from tandem.models.attention import Scoring, refuse_arguments
from tandem.models.attention.interface import AttentionPlan

FAMILIES = ("LlamaModel", "Qwen2Model", "Qwen3Model")
"""transformers' bodies whose layers are what `_layer` computes."""


def make_lean(model: PreTrainedModel) -> None:
    """Replace the forward passes of the body and its layers, where the body is one of FAMILIES."""
    body: Any = model.base_model
    if type(body).__name__ in FAMILIES and type(body).__module__.startswith("transformers."):
        body.forward = MethodType(_body, body)
        for layer in body.layers:
            layer.forward = MethodType(_layer, layer)


def _body(self: Any, input_ids: Tensor, position_ids: Tensor, attention_plan: AttentionPlan, **others: Any) -> Any:
    refuse_arguments(others)
    hidden = self.embed_tokens(input_ids)
    cos, sin = (table[:, :, None] for table in self.rotary_emb(hidden, position_ids))
    low, high = sin.chunk(2, -1)
    rotation = cos, torch.cat((-low, high), -1)
    for layer in self.layers:
        hidden = layer(hidden, rotation=rotation, plan=attention_plan)
    normed: Any = _norm(self.norm, hidden)
    return BaseModelOutputWithPast(last_hidden_state=normed)


def _layer(self: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
    """`hidden` `[1, N, hidden]`."""
    hidden = hidden + _attention(self.self_attn, _norm(self.input_layernorm, hidden), rotation, plan)
    mlp, x = self.mlp, _norm(self.post_attention_layernorm, hidden)
    return hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))


def _attention(module: Any, x: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (projection(x).unflatten(-1, (-1, module.head_dim)) for projection in projections)
    if type(module).__name__ == "Qwen3Attention":
        query, key = _norm(module.q_norm, query), _norm(module.k_norm, key)
    query, key, value = (y.transpose(1, 2) for y in (_rotate(query, *rotation), _rotate(key, *rotation), value))
    window = None if type(module).__name__ == "LlamaAttention" else module.sliding_window
    scoring = Scoring(module.scaling, window)
    return module.o_proj(plan.attend(module.layer_idx, query, key, value, scoring).flatten(2))


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Su et al. 2021 (RoFormer), for a `sin` whose lower half is negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
