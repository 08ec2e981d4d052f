"""The Llama family's pass for generation on a CPU, in still fewer calls: small models wait for calls, not for numbers.

Linear layers of the same input lie side by side and are one product, queries and keys are rotated together, what a
product is added to comes with it, angles come from a table, and no module is called. Parameters keep their names and
their owners, and what changes in them is seen at once. It is for passes in inference mode, without gradients, and for
models in one piece: of what is sharded or adapted the modules must be called, and `Fused.of` and `holds` find out.

Suffix: `_N` tokens of the pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from tandem.models.attention import Scoring
from tandem.models.attention.interface import AttentionPlan
from tandem.models.kv_cache import Decode

_POSITIONS = 512
"""Angles are computed for a multiple of this many positions."""


def lay_side_by_side(layers: Sequence[nn.Module]) -> bool:
    """Move their weights, and their biases, into one piece of memory each, where they are plain layers and lie apart:
    nobody may hold the memory that they have now. Whether any moved."""
    moved = False
    if not all(type(layer) is nn.Linear for layer in layers):
        return moved
    for name in ("weight", "bias"):
        parameters = [parameter for layer in layers if (parameter := getattr(layer, name)) is not None]
        plain = all(type(parameter) is nn.Parameter for parameter in parameters)
        if plain and len(parameters) == len(layers) and _as_one(parameters) is None:
            together = torch.cat([parameter.detach() for parameter in parameters])
            for parameter, place in zip(parameters, together.split([len(p) for p in parameters]), strict=True):
                parameter.data = place
            moved = True
    return moved


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """Linear layers of the same input, or one, as one product."""

    weight: Tensor
    """`[in, out]`, the memory of all their weights."""
    bias: Tensor | None
    first: Tensor
    """The weight of the first."""

    @classmethod
    def of(cls, *layers: nn.Linear) -> Self | None:
        """None where they are something else than plain layers, side by side."""
        if not all(type(layer) is nn.Linear for layer in layers):
            return None
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        weight, bias = _as_one(weights), _as_one(biases) if biases else None
        if weight is None or len(biases) not in (0, len(layers)) or (biases and bias is None):
            return None
        return cls(weight.t(), bias, weights[0])

    def holds(self) -> bool:
        """They still lie where they lay."""
        return self.first.data_ptr() == self.weight.data_ptr()

    def __call__(self, x_N: Tensor) -> Tensor:
        return torch.mm(x_N, self.weight) if self.bias is None else torch.addmm(self.bias, x_N, self.weight)

    def added_to(self, hidden_N: Tensor, x_N: Tensor) -> Tensor:
        total_N = torch.addmm(hidden_N, x_N, self.weight)
        return total_N if self.bias is None else total_N.add_(self.bias)


def _as_one(parameters: Sequence[Tensor]) -> Tensor | None:
    """One tensor over parameters that lie side by side; None where they do not."""
    if not all(type(p) is nn.Parameter and p.device.type != "meta" and p.is_contiguous() for p in parameters):
        return None
    first = parameters[0].detach()
    memory = first.untyped_storage().data_ptr()
    if any(p.untyped_storage().data_ptr() != memory or p.dtype != first.dtype for p in parameters):
        return None
    if any(p.data_ptr() + p.nbytes != following.data_ptr() for p, following in pairwise(parameters)):
        return None
    return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())


class Norm(NamedTuple):
    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Self:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True, eq=False)
class _QuickNorm:
    """`Norm` in four kernels where torch's own has six on a CPU: x w |1| / sqrt(|x|^2 + |1|^2 epsilon), |1|^2 being how
    many numbers are normed."""

    weight: Tensor
    length: float
    """|1|."""
    floor: Tensor
    """|1| sqrt(epsilon)."""
    zero: Tensor

    @classmethod
    def of(cls, module: Any) -> "_QuickNorm | Norm":
        norm = Norm.of(module)
        if norm.weight.dtype != torch.float32:
            return norm
        length = math.sqrt(norm.weight.numel())
        return cls(norm.weight, length, torch.tensor(length * math.sqrt(norm.epsilon)), torch.tensor(0.0))

    def __call__(self, x: Tensor) -> Tensor:
        divisor = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
        return torch.addcmul(self.zero, x, self.weight, value=self.length).div_(divisor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Su et al. 2021 (RoFormer), for a `sin` whose lower half is negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """What `rotate` returns."""
    rolled = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(rolled, sin)


class Angles:
    """Cosines and sines for `rotate`, of the positions seen so far."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        """`module`: the body's rotary embedding, whose frequencies are the same in every pass."""
        self._frequencies = module.inv_freq.float()
        self._scaling = module.attention_scaling
        self._dtype = dtype
        self._table = self._computed(_POSITIONS)

    def __call__(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """`[N, 1, head_dim]` each."""
        try:
            cos, sin = self._table.index_select(0, position_N).unbind(1)
        except IndexError:  # asking first for the last position takes longer than the rest
            self._table = self._computed(-(-(int(position_N.max()) + 1) // _POSITIONS) * _POSITIONS)
            return self(position_N)
        return cos, sin

    def _computed(self, positions: int) -> Tensor:
        """`[positions, 2, 1, head_dim]`."""
        angles = torch.arange(positions)[:, None, None] * self._frequencies
        cos, sin = ((x * self._scaling).to(self._dtype) for x in (angles.cos(), angles.sin()))
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a layer computes with, so that no pass looks it up."""

    linears: Sequence[tuple[Any, str, nn.Module]]
    """Where each linear layer hangs, by what name, and which it is."""
    index: int
    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    activation: Any
    norms: tuple[Any, Any]
    """Of the layer's input and of what is attended to, as `norm_of` makes them."""
    of_heads: tuple[Any, Any] | None
    """Norms of queries and keys."""
    keys: int
    """Key heads."""
    head_dim: int
    scoring: Scoring

    norm_of: ClassVar[Callable[[Any], "_QuickNorm | Norm"]] = _QuickNorm.of

    @classmethod
    def of(cls, module: Any, family: str) -> Self | None:
        """None where a part of it is not plain, or not side by side."""
        attention, mlp = module.self_attn, module.mlp
        qkv = Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up, down = Product.of(mlp.gate_proj, mlp.up_proj), Product.of(mlp.down_proj)
        output = Product.of(attention.o_proj)
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        parents, norm = (attention, mlp), cls.norm_of
        return cls(
            linears=[(p._modules, *own) for p in parents for own in p._modules.items() if own[0].endswith("_proj")],
            index=attention.layer_idx,
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            activation=mlp.act_fn.forward,
            norms=(norm(module.input_layernorm), norm(module.post_attention_layernorm)),
            of_heads=(norm(attention.q_norm), norm(attention.k_norm)) if family == "Qwen3Model" else None,
            keys=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            scoring=Scoring(attention.scaling, None if family == "LlamaModel" else attention.sliding_window),
        )

    def holds(self) -> bool:
        """No other layer is in the place of one, and they have not moved."""
        there = all(modules[name] is linear for modules, name, linear in self.linears)
        return there and self.qkv.holds() and self.output.holds() and self.gate_up.holds() and self.down.holds()


class _Layer(Parts):
    def __call__(self, hidden_N: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        of_input, of_attended = self.norms
        hidden_N = self.output.added_to(hidden_N, self._attend(of_input(hidden_N), rotation, plan))
        gate_N, up_N = self.gate_up(of_attended(hidden_N)).chunk(2, -1)
        return self.down.added_to(hidden_N, self.activation(gate_N).mul_(up_N))

    def _attend(self, x_N: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        keys, (cos_N, sin_N) = self.keys, rotation
        packed_N = self.qkv(x_N).view(x_N.shape[0], -1, self.head_dim)
        turned_N = packed_N.narrow(1, 0, packed_N.shape[1] - keys)
        if self.of_heads is not None:
            for norm, x in zip(self.of_heads, turned_N.tensor_split((-keys,), 1), strict=True):
                x.copy_(norm(x))
        rotate_in_place(turned_N, cos_N, sin_N)
        if isinstance(plan, Decode):
            return plan.attend_packed(self.index, packed_N, keys, self.scoring)
        query, key, value = packed_N.transpose(0, 1)[None].tensor_split((-2 * keys, -keys), 1)
        return plan.attend(self.index, query, key, value, self.scoring).flatten(2)[0]


class BodyPass:
    """The pass of a body that is in one piece, without its modules."""

    layer_kind: ClassVar[type[Parts]]

    def __init__(self, body: Any, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._embeddings: Tensor = body.embed_tokens.weight

    @classmethod
    def of(cls, body: Any, family: str) -> Self | None:
        """None where a part of it is not plain, or hooks want to be called."""
        if any(has_hooks(module) for module in body.modules()) or type(body.embed_tokens) is not nn.Embedding:
            return None
        layers = [layer for layer in (cls.layer_kind.of(module, family) for module in body.layers) if layer is not None]
        return cls(body, layers) if len(layers) == len(body.layers) else None

    def holds(self) -> bool:
        """Every layer is what it was when this was made."""
        return all(layer.holds() for layer in self._layers)


class Fused(BodyPass):
    """On a CPU."""

    layer_kind = _Layer

    def __init__(self, body: Any, layers: Sequence[_Layer]) -> None:
        super().__init__(body, layers)
        self._angles = Angles(body.rotary_emb, self._embeddings.dtype)
        self._norm = _QuickNorm.of(body.norm)

    def __call__(self, token_N: Tensor, position_N: Tensor, plan: AttentionPlan) -> Tensor:
        """`[N, hidden]`."""
        hidden_N, rotation = self._embeddings.index_select(0, token_N), self._angles(position_N)
        for layer in self._layers:
            hidden_N = layer(hidden_N, rotation, plan)
        return self._norm(hidden_N)


def has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks)  # fmt: skip
