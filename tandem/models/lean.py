"""The Llama family with fewer kernels: transformers' arithmetic on transformers' modules, with less between them.

transformers computes a norm in six kernels and a rotation in eight, and looks at masks, caches and options in every
layer. Parameters and names stay as they are, and layers and linear layers are still called as modules, so that
sharding, checkpointed activations and adapters find what they wrap.
"""

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.models.attention import Scoring, interface, refuse_arguments
from tandem.models.attention.interface import AttentionPlan
from tandem.models.fused import Fused, Norm, has_hooks, lay_side_by_side, rotate
from tandem.models.fused_gpu import FusedOnGpu

FAMILIES = ("LlamaModel", "Qwen2Model", "Qwen3Model")
"""transformers' bodies whose layers are what `_layer` computes."""
_CHANGING_ANGLES = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the longest position of a pass."""


_UNKNOWN = "unknown"
"""Whether a body can be fused, before its first pass: adapters and shards come after `make_lean`."""


class Hidden(NamedTuple):
    """What a body returns: the fields that transformers' heads read. Its own class takes 20 us to make."""

    last_hidden_state: Tensor
    """`[1, N, hidden]`."""
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None


class Logits(NamedTuple):
    """What a language model returns."""

    logits: Tensor
    """`[1, wanted, V]`."""


def make_lean(model: PreTrainedModel) -> None:
    """Replace the forward passes of the body, its layers and a language model, where the body is one of FAMILIES.

    The weights that a fused pass takes as one move side by side, so nobody may hold their memory yet.
    """
    body: Any = model.base_model
    if type(body).__name__ in FAMILIES and type(body).__module__.startswith("transformers."):
        body.forward = MethodType(_body, body)
        body.fused = _UNKNOWN
        for layer in body.layers:
            layer.forward = MethodType(_layer, layer)
        lay_out(model)
        if type(model).__name__ == f"{type(body).__name__.removesuffix('Model')}ForCausalLM":
            model.forward = MethodType(_language_model, model)


def lay_out(model: Any) -> bool:
    """Move side by side what is one product in generation; whether anything moved. Again after the model's memory has
    moved; while nobody holds the memory of its weights."""
    body, moved = model.base_model, False
    if hasattr(body, "fused") and model.device.type != "meta":
        for layer in body.layers:
            attention, mlp = layer.self_attn, layer.mlp
            moved |= lay_side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
            moved |= lay_side_by_side([mlp.gate_proj, mlp.up_proj])
        let_go(model)
    return moved


def let_go(model: Any) -> None:
    """Hold no weights beside the model's own: they may leave. The next pass finds them again."""
    if hasattr(model.base_model, "fused"):
        model.base_model.fused = _UNKNOWN


def _language_model(self: Any, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **others: Any) -> Logits:
    """`logits_to_keep`: the places of the tokens to predict from, or how many of the last ones; 0: all."""
    fused = _fused(self.model) if torch.is_inference_mode_enabled() else None
    hidden = _hidden(fused, input_ids, **others) if fused else self.model(input_ids, **others).last_hidden_state
    if isinstance(logits_to_keep, Tensor):
        hidden = hidden.index_select(1, logits_to_keep)
    elif logits_to_keep:
        hidden = hidden[:, -logits_to_keep:]
    return Logits(self.lm_head(hidden))


def _body(self: Any, input_ids: Tensor, position_ids: Tensor, attention_plan: AttentionPlan, **others: Any) -> Hidden:
    if torch.is_inference_mode_enabled() and (fused := _fused(self)) is not None:
        return Hidden(_hidden(fused, input_ids, position_ids, attention_plan, **others))
    refuse_arguments(others)
    hidden = self.embed_tokens(input_ids)
    rotation = _rotation(self.rotary_emb, hidden, position_ids)
    for layer in self.layers:
        hidden = layer(hidden, rotation=rotation, plan=attention_plan)
    return Hidden(_norm(self.norm, hidden))


def _hidden(
    fused: Fused | FusedOnGpu, input_ids: Tensor, position_ids: Tensor, attention_plan: AttentionPlan, **others: Any
) -> Tensor:
    refuse_arguments(others)
    return fused(input_ids[0], position_ids[0], attention_plan)[None]


def _fused(body: Any) -> Fused | FusedOnGpu | None:
    """The body's pass without modules, where it can do without them now."""
    if body.fused is _UNKNOWN:
        fixed = body.rotary_emb.rope_type not in _CHANGING_ANGLES
        kind = FusedOnGpu if body.embed_tokens.weight.is_cuda else Fused
        body.fused = kind.of(body, type(body).__name__) if fixed else None
    return body.fused if body.fused is not None and body.fused.holds() and not has_hooks(body) else None


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
    query, key, value = (y.transpose(1, 2) for y in (rotate(query, *rotation), rotate(key, *rotation), value))
    window = None if type(module).__name__ == "LlamaAttention" else module.sliding_window
    scoring = Scoring(module.scaling, window)
    return module.o_proj(interface.attend(module, plan, query, key, value, scoring).flatten(2))


def _norm(module: Any, x: Tensor) -> Tensor:
    return Norm.of(module)(x)


def _rotation(module: Any, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of the angles for `rotate`, `[1, N, 1, head_dim]` in the dtype of `hidden`."""
    if module.rope_type in _CHANGING_ANGLES:
        cos, sin = (table[:, :, None].chunk(2, -1)[0] for table in module(hidden, position_ids))
    else:
        angles = position_ids[..., None, None] * module.inv_freq.float()
        cos, sin = ((x * module.attention_scaling).to(hidden.dtype) for x in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
