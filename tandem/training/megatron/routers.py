"""Routers of a mixture of experts: choices that are counted, or given; losses that keep experts busy and logits small.

The losses are sums over tokens with weights for the whole pass; Megatron-Core's own are means of what each rank holds.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from tandem.training.megatron.packed_rows import PackedSeqPlan


class Router(TopKRouter):
    """The routing of one layer."""

    plan: PackedSeqPlan
    """The routing of the pass under way."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.router_replay = SimpleNamespace(get_replay_topk=self._choose)
        self.chosen: Any = 0
        """`[experts]`: tokens that chose each, padding left out, since this was last set to 0."""

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        probs, chosen = super().routing(logits)
        if not (self.training and torch.is_grad_enabled()):
            return probs, chosen
        real = ~self._own(self.plan.padding)
        counts = chosen[real].sum(0)
        self.chosen = self.chosen + counts
        if any(self.plan.coefficients):
            probs = MoEAuxLossAutoScaler.apply(probs, self._loss(logits.flatten(0, 1)[real].float(), counts))
        return probs, chosen

    def _loss(self, logits: Tensor, counts: Tensor) -> Tensor:
        """experts * sum of tokens' probabilities * share of all tokens' choices (Fedus et al. 2021, equation 4), and
        the squares of log sum exp logits (Zoph et al. 2022, equation 5): this rank's part of the micro-batch."""
        balancing, smallness = self.plan.coefficients
        counts = counts.float()
        dist.all_reduce(counts, group=self.tp_cp_group)
        busy = (logits.softmax(-1).sum(0) * counts / counts.sum().clamp(min=1)).sum() * len(counts)
        return balancing * busy + smallness * logits.logsumexp(-1).square().sum()

    def _choose(self, scores: Tensor, top_k: int, groups: Any, group_top_k: Any, choose: Any) -> tuple[Tensor, Tensor]:
        """(scores, numbers) of the experts of each token."""
        if self.plan.experts is None:
            return choose(scores, top_k, groups, group_top_k)
        experts = self._own(self.plan.experts)[:, self.layer_number - 1]
        return scores.gather(1, experts), experts

    def _own(self, column: Tensor) -> Tensor:
        """The tokens of a context-parallel rank that this tensor-parallel rank holds."""
        shared = self.config.sequence_parallel
        return column.chunk(self.tp_group.size())[self.tp_group.rank()] if shared else column


def tell_routers(stage: Any) -> None:
    """Have each layer hand its router the plan of the pass, also when it is recomputed."""
    for layer in stage.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.register_forward_pre_hook(_tell, with_kwargs=True)


def _tell(layer: Any, args: Any, options: dict[str, Any]) -> None:
    layer.mlp.router.plan = options["packed_seq_params"]


def expert_load(stages: Sequence[Any], config: Any, device: torch.device) -> dict[str, float]:
    """Tokens of the busiest and the idlest expert over the mean, mean over layers, since it was last asked."""
    if not config.num_moe_experts:
        return {}
    counts = torch.zeros(config.num_layers, config.num_moe_experts, device=device)
    for router in (module for stage in stages for module in stage.modules() if isinstance(module, Router)):
        counts[router.layer_number - 1] += router.chosen
        router.chosen = 0
    dist.all_reduce(counts)
    counts = counts[counts.sum(1) > 0]
    shares = counts / counts.mean(1, keepdim=True)
    return {"expert_load/max": float(shares.amax(1).mean()), "expert_load/min": float(shares.amin(1).mean())}
