"""A prompt's own log-probs by the native engine's model: what `Request.prompt_logprobs` asks for."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.generation.sampling import most_probable
from tandem.models.attention import PackedRows
from tandem.types import PromptLogprobs, Request, TopLogprobs

_MOST_LOGITS = 2**27
"""Logits, in numbers, that one pass over the prompt keeps: half a GiB in float32."""


def prompt_logprobs(model: PreTrainedModel, request: Request, vocabulary: int) -> PromptLogprobs:
    """Log softmax(logits) at each token of the prompt but the first, in as many passes as keep the logits small."""
    ids = torch.from_numpy(request.token_ids.astype(np.int64)).to(model.device)
    logprobs = [torch.zeros(0)]
    top_ids = [torch.zeros(0, request.top_logprobs, dtype=torch.int64)]
    top_logprobs = [torch.zeros(0, request.top_logprobs)]
    for place_S in torch.arange(len(ids) - 1, device=ids.device).split(max(1, _MOST_LOGITS // vocabulary)):
        logits_SV = _logits(model, ids, place_S)
        logprobs.append(logits_SV.float().log_softmax(-1).gather(1, ids[place_S + 1, None])[:, 0].cpu())
        if request.top_logprobs:
            token_SK, logprob_SK = most_probable(logits_SV, np.ones(len(place_S)), request.top_logprobs)
            top_ids.append(token_SK.cpu())
            top_logprobs.append(logprob_SK.cpu())
    top = None
    if request.top_logprobs:
        top = TopLogprobs(torch.cat(top_ids).numpy().astype(np.int32), torch.cat(top_logprobs).numpy())
    return PromptLogprobs(torch.cat(logprobs).numpy(), top)


def _logits(model: PreTrainedModel, ids: Tensor, place_S: Tensor) -> Tensor:
    """`[S, V]`, of the tokens after those at `place_S`."""
    plan = PackedRows(np.array([0, len(ids)]), ids.device)
    outputs = model(
        ids[None], position_ids=plan.positions[None], attention_plan=plan, use_cache=False, logits_to_keep=place_S
    )
    return outputs.logits[0]
