"""Activations that are computed again in the backward pass rather than kept: Chen et al. 2016, arXiv:1604.06174."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.errors import UserError

_KEPT = (
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""Kernels whose outputs and log-sum-exps are kept where checkpointing is selective: nothing else in a layer takes time
that grows with the square of a row's length. Attention by plain products has no kernel of its own and runs again."""


def checkpointed_layers(model: PreTrainedModel, selective: bool = False) -> Sequence[nn.Module]:
    """The layers that recompute their activations within `checkpointing`. UserError for a family without them."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not (model.supports_gradient_checkpointing and layers):
        raise UserError(
            f"training.activation_checkpointing: transformers cannot checkpoint {type(model).__name__}; leave it out"
        )
    how: dict[str, Any] = {"use_reentrant": False}
    if selective:
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(how)
    return layers


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def checkpointing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """transformers checkpoints a layer in training mode.

    The modules in it stay in eval mode: there routers (phimoe's) draw no noise, in no pass other than in the others.
    """
    for layer in layers:
        layer.training = True
    yield
    for layer in layers:
        layer.training = False
