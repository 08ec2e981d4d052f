"""The Llama family's pass for generation on a GPU: nine kernels a layer, ten where few rows decode, of which four are
products of matrices.

As in `fused.py`, linear layers of the same input are one product, no module is called, and parameters keep their names
and owners. What is between the products is in `tandem.models.kernels.decoding`.

Suffix: `_N` tokens of the pass.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tandem.models.attention.interface import AttentionPlan
from tandem.models.fused import BodyPass, Norm, Parts
from tandem.models.kernels import decoding
from tandem.models.pages import PagedDecode

_Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each token, `[N, head_dim / 2]`."""


class _Layer(Parts):
    norm_of = Norm.of

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


class FusedOnGpu(BodyPass):
    """On a GPU, of weights side by side."""

    layer_kind = _Layer

    def __init__(self, body: Any, layers: Sequence[_Layer]) -> None:
        super().__init__(body, layers)
        self._frequencies: Tensor = body.rotary_emb.inv_freq.float()
        self._scaling: float = body.rotary_emb.attention_scaling
        self._norm = Norm.of(body.norm)

    @classmethod
    def of(cls, body: Any, family: str) -> Self | None:
        """None besides where the gate is another function than SiLU."""
        gates = {type(layer.mlp.act_fn).__name__ for layer in body.layers}
        return super().of(body, family) if gates <= {"SiLU", "SiLUActivation"} else None

    def __call__(self, token_N: Tensor, position_N: Tensor, plan: AttentionPlan) -> Tensor:
        """`[N, hidden]`."""
        hidden_N, added_N = self._embeddings.index_select(0, token_N), None
        angles_N = position_N[:, None] * self._frequencies
        rotation = angles_N.cos(), angles_N.sin()
        if self._scaling != 1:
            rotation = tuple(x * self._scaling for x in rotation)
        cosines_N, sines_N = (x.to(hidden_N.dtype) for x in rotation)
        for layer in self._layers:
            added_N = layer(hidden_N, added_N, (cosines_N, sines_N), plan)
        return decoding.add_and_norm_(hidden_N, added_N, self._norm.weight, self._norm.epsilon)
