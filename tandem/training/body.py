"""Packed token ids -> hidden states, and the check that a model family can be run this way."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tandem.errors import UserError
from tandem.models.attention import PackedRows
from tandem.types import IntArray


def packed_hidden_states(model: PreTrainedModel, token_ids: IntArray, offsets: IntArray) -> torch.Tensor:
    """Final hidden states `[N, hidden]` of rows packed head to tail, as if each row were alone."""
    return _run(model.base_model, token_ids, offsets)[0][0]


def check_packed_hidden_states(model: PreTrainedModel) -> None:
    """UserError for a family whose rows see one another when packed, or that cannot run packed at all."""
    token_ids, offsets = np.arange(8, dtype=np.int32), np.array([0, 5, 8])
    try:
        packed = packed_hidden_states(model, token_ids, offsets)
        alone = packed_hidden_states(model, token_ids[5:], offsets[1:] - 5)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"{_family(model)} does not run on packed rows: {error}") from error
    bound = 1e-4 if packed.dtype == torch.float32 else 0.05
    if not (packed[5:] - alone).abs().max() <= bound * alone.abs().max():
        raise UserError(f"{_family(model)} lets packed rows see one another; use a family with causal attention only")


def check_output_layer(model: PreTrainedModel) -> None:
    """UserError unless logits are the output layer's, applied to the final hidden states, and nothing else.

    Some families scale or soft-cap around that layer. Small logits would hide it, so the layer's result is replaced by
    large known ones for one pass.
    """
    token_ids, offsets = np.arange(4, dtype=np.int32), np.array([0, 4])
    layer: Any = model.get_output_embeddings()
    seen: list[torch.Tensor] = []

    def substitute(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], logits: torch.Tensor) -> torch.Tensor:
        seen.append(inputs[0])
        return torch.linspace(-100, 100, logits.shape[-1], device=logits.device).to(logits.dtype).expand_as(logits)

    hidden = packed_hidden_states(model, token_ids, offsets)
    hook = layer.register_forward_hook(substitute)
    try:
        logits = _run(model, token_ids, offsets)[0][0]
    finally:
        hook.remove()
    wanted = substitute(layer, (hidden,), logits)
    if len(seen) < 2 or not torch.allclose(seen[0][0], hidden, rtol=1e-2) or not torch.equal(logits, wanted):
        raise UserError(
            f"{_family(model)} scales or soft-caps around its output layer, which log-probs computed in chunks do not "
            "follow; use a family whose logits are the output layer's own"
        )


def _run(module: Any, token_ids: IntArray, offsets: IntArray) -> Any:
    device = module.device
    positions = np.arange(len(token_ids)) - np.repeat(offsets[:-1], np.diff(offsets))
    return module(
        torch.from_numpy(token_ids)[None].to(device),
        position_ids=torch.from_numpy(positions)[None].to(device),
        attention_plan=PackedRows(offsets, device),
        use_cache=False,
        return_dict=False,
    )


def _family(model: PreTrainedModel) -> str:
    return f"model type {model.config.model_type}"
