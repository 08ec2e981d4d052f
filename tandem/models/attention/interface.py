"""What transformers' layers call: any model loaded with `attn_implementation=ATTENTION` asks the plan of its forward.

`model(..., attention_plan=plan)`: the plan knows which tokens form a row and, in generation, where the row's keys and
values are kept; the model knows neither, so nothing is padded outside attention.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from tandem.models.attention.pieces import Scoring
from tandem.models.mixing import StateMixer

ATTENTION = "tandem"
"""The name of this attention among transformers' attention implementations."""


class AttentionPlan(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Causal attention within rows: `[1, N, heads, head_dim]`, the head_dim of `value`.

        query `[1, heads, N, head_dim]`, key and value `[1, kv_heads, N, head_dim]`, positions already encoded.
        """
        ...

    def mix(self, mixer: StateMixer, hidden: Tensor) -> Tensor:
        """What a state mixer makes of hidden states `[1, N, hidden]`, each row from the state of its own beginning."""
        ...


HARMLESS = {
    "position_ids": "queries and keys have their positions already, and the plan knows the order within a row",
    "use_cache": "the plan keeps keys and values, transformers' cache is never made",
    "return_dict": "it is about what the model returns, not about attention",
    "logits_to_keep": "it is about the output layer",
    "output_router_logits": "it is about the experts",
    "output_attentions": "weights are never returned, which the model says where it needs them",
}
"""Arguments that models hand down to attention although attention does not depend on them, each with the reason."""


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call. NotImplementedError for an argument that would change what attention computes."""
    refuse_arguments({"attention_mask": attention_mask, **others})
    if dropout or is_causal is False:
        raise NotImplementedError(f"attention with dropout {dropout}, is_causal {is_causal} is not what ours computes")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window, s_aux, softcap)
    return attend(module, attention_plan, query, key, value, scoring), None


def _attend_by_plan(
    module: Any, plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
) -> Tensor:
    return plan.attend(module.layer_idx, query, key, value, scoring)


attend: Callable[[Any, AttentionPlan, Tensor, Tensor, Tensor, Scoring], Tensor] = _attend_by_plan
"""The plan's attention in the layer of which `module` is the attention: all that layers call."""


def leave_out_of_graphs() -> None:
    """From now on torch.compile ends a graph before `attend`: a plan differs from pass to pass and calls kernels."""
    global attend
    disable: Any = torch.compiler.disable
    attend = disable(_attend_by_plan)


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """NotImplementedError where one is neither None nor harmless: leaving it out would give wrong numbers."""
    if unknown := [name for name, value in arguments.items() if value is not None and name not in HARMLESS]:
        raise NotImplementedError(f"attention with {', '.join(unknown)} is not what ours computes")


AttentionInterface.register(ATTENTION, _attend)
