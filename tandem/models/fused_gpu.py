"""The Llama family's pass for generation on a GPU: nine kernels a layer, ten where few rows decode, of which four are
products of matrices.

As in `fused.py`, linear layers of the same input are one product, no module is called, and parameters keep their names
and owners. What is between the products is in `tandem.models.kernels.decoding`.

Suffix: `_N` tokens of the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from tandem.models.attention import Scoring
from tandem.models.attention.interface import AttentionPlan
from tandem.models.fused import Norm, Product, has_hooks
from tandem.models.kernels import decoding
from tandem.models.pages import PagedDecode

_Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each token, `[N, head_dim / 2]`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What a layer computes with."""

    linears: Sequence[tuple[Any, str, nn.Module]]
    """Where each linear layer hangs, by what name, and which it is."""
    index: int
    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    norms: tuple[Norm, Norm]
    of_heads: tuple[Norm, Norm] | None
    """Norms of queries and keys."""
    keys: int
    """Key heads."""
    head_dim: int
    scoring: Scoring

    @classmethod
    def of(cls, module: Any, family: str) -> Self | None:
        """None where a part of it is not plain, or not side by side."""
        attention, mlp = module.self_attn, module.mlp
        qkv = Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up, down = Product.of(mlp.gate_proj, mlp.up_proj), Product.of(mlp.down_proj)
        output = Product.of(attention.o_proj)
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            return None
        return cls(
            linears=[(p._modules, *own) for p in (attention, mlp) for own in p._modules.items() if "_proj" in own[0]],
            index=attention.layer_idx,
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            norms=(Norm.of(module.input_layernorm), Norm.of(module.post_attention_layernorm)),
            of_heads=(Norm.of(attention.q_norm), Norm.of(attention.k_norm)) if family == "Qwen3Model" else None,
            keys=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            scoring=Scoring(attention.scaling, None if family == "LlamaModel" else attention.sliding_window),
        )

    def holds(self) -> bool:
        """No other layer is in the place of one, and they have not moved."""
        there = all(modules[name] is linear for modules, name, linear in self.linears)
        return there and self.qkv.holds() and self.output.holds() and self.gate_up.holds() and self.down.holds()

    def __call__(self, hidden_N: Tensor, added_N: Tensor | None, rotation: _Rotation, plan: AttentionPlan) -> Tensor:
        """Adds `added_N`, what the layer before returns, to `hidden_N`; returns what is to be added then."""
        of_input, of_attended = self.norms
        x_N = decoding.add_and_norm_(hidden_N, added_N, of_input.weight, of_input.epsilon)
        attended_N = self.output(self._attend(self.qkv(x_N), rotation, plan))
        x_N = decoding.add_and_norm_(hidden_N, attended_N, of_attended.weight, of_attended.epsilon)
        return self.down(decoding.gated(self.gate_up(x_N)))

    def _attend(self, packed_N: Tensor, rotation: _Rotation, plan: AttentionPlan) -> Tensor:
        packed_N = packed_N.view(len(packed_N), -1, self.head_dim)
        query_N, key_N, value_N = packed_N.tensor_split((-2 * self.keys, -self.keys), 1)
        norms = [norm.weight for norm in self.of_heads] if self.of_heads else [None, None]
        epsilon = self.of_heads[0].epsilon if self.of_heads else 0.0
        if isinstance(plan, PagedDecode):
            both = plan.pages(self.index, key_N, value_N)
            decoding.rotate_and_store_(packed_N, *rotation, plan.place_N, *both, *norms, epsilon)
            return plan.attend_to(both, query_N, self.scoring).flatten(1)
        count = len(packed_N)
        rows = [x.new_empty(1, count, self.keys, self.head_dim) for x in (key_N, value_N)]
        place_N = torch.arange(count, device=packed_N.device)
        decoding.rotate_and_store_(packed_N, *rotation, place_N, *rows, *norms, epsilon)
        query, key, value = (x.transpose(0, 1)[None] for x in (query_N, rows[0][0], rows[1][0]))
        return plan.attend(self.index, query, key, value, self.scoring).flatten(2)[0]


class FusedOnGpu:
    """The pass of a body that is in one piece, its weights side by side."""

    def __init__(self, body: Any, layers: Sequence[_Layer]) -> None:
        self._layers = layers
        self._embeddings: Tensor = body.embed_tokens.weight
        self._frequencies: Tensor = body.rotary_emb.inv_freq.float()
        self._scaling: float = body.rotary_emb.attention_scaling
        self._norm = Norm.of(body.norm)

    @classmethod
    def of(cls, body: Any, family: str) -> Self | None:
        """None where a part of it is not plain, or hooks want to be called."""
        if any(has_hooks(module) for module in body.modules()) or type(body.embed_tokens) is not nn.Embedding:
            return None
        layers = [layer for layer in (_Layer.of(module, family) for module in body.layers) if layer is not None]
        return cls(body, layers) if len(layers) == len(body.layers) else None

    def holds(self) -> bool:
        """Every layer is what it was when this was made."""
        return all(layer.holds() for layer in self._layers)

    def __call__(self, token_N: Tensor, position_N: Tensor, plan: AttentionPlan) -> Tensor:
        """`[N, hidden]`."""
        hidden_N, added_N = self._embeddings.index_select(0, token_N), None
        angles_N = position_N[:, None] * self._frequencies
        cosines_N, sines_N = ((x * self._scaling).to(hidden_N.dtype) for x in (angles_N.cos(), angles_N.sin()))
        for layer in self._layers:
            added_N = layer(hidden_N, added_N, (cosines_N, sines_N), plan)
        return decoding.add_and_norm_(hidden_N, added_N, self._norm.weight, self._norm.epsilon)
