"""Why engine and trainer disagree: each suspect is a frozen model that has the fault on purpose."""

from typing import Any

import numpy as np

from tandem.config.model import ModelConfig
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import pictures_of
from tandem.controller.placement import Placement
from tandem.controller.pools import Role
from tandem.controller.roles import Policy
from tandem.types import Batch, FloatArray
from tandem.workers.training import TrainSpec, TrainWorker

LARGEST_AND_MEAN = {"float32": (1e-3, 1e-4), "bfloat16": (1.0, 0.03)}
"""What two log-probs of one token may differ by, at most and on average, by `model.dtype`."""
_ROUNDING = 3
"""Two computations in bfloat16 differ from float32 by amounts of this ratio at most."""
_WORST = 5


def difference(batch: Batch, trainer: FloatArray) -> tuple[float, float]:
    """The largest and the mean distance between the engine's log-probs and the trainer's."""
    assert batch.tokens.rollout_logprobs is not None
    apart = np.abs(trainer - batch.tokens.rollout_logprobs)[batch.loss_mask]
    return float(apart.max()), float(apart.mean())


def explain_logprobs(config: TrainConfig, placement: Placement, batch: Batch, trainer: FloatArray) -> str:
    """The fault by which the log-probs of an engine, which has the weights from the start, would be right."""
    temperature = config.generation.temperature
    suspects = {
        f"the trainer's log-probs are not those at generation.temperature {temperature}": temperature,
        f"the engine's log-probs are at temperature 1, not at {temperature}": 1.0,
    }
    found = difference(batch, trainer)[1]
    for cause, suspected in suspects.items():
        if difference(batch, _logprobs_at_the_start(config, placement, batch, suspected))[1] < 0.5 * found:
            return cause
    other = "bfloat16" if config.model.dtype == "float32" else "float32"
    of_other = _logprobs_at_the_start(config, placement, batch, temperature, other)
    rounded = np.abs(of_other - trainer)[batch.loss_mask].mean()
    if rounded / _ROUNDING < found < rounded * _ROUNDING:
        return f"dtype mismatch: the engine computes in {other}, or rounds as much"
    return "the engine holds other weights than the trainer, or computes another model"


def explain_publish(config: TrainConfig, placement: Placement, batch: Batch, trainer: FloatArray) -> str:
    """The fault by which the log-probs of an engine that got new weights would be right."""
    before = _logprobs_at_the_start(config, placement, batch, config.generation.temperature)
    if difference(batch, before)[1] < 0.5 * difference(batch, trainer)[1]:
        without = ", by a model without its adapters" if config.model.lora else ""
        return f"the publish does nothing: the engine answers by the weights from before the step{without}"
    if config.model.lora:
        return "the publish leaves other weights in the engine than the model's with its adapters merged in"
    return "the publish leaves other weights in the engine than it was given"


def worst_tokens(tokenizer: Any, batch: Batch, trainer: FloatArray) -> str:
    """The tokens whose log-probs differ most, one a line."""
    rollout = batch.tokens.rollout_logprobs
    assert rollout is not None
    places = np.argsort(-np.abs(trainer - rollout))[:_WORST]
    lines = [
        f"row {batch.row_of_token[i]} token {i - batch.response_offsets[batch.row_of_token[i]]} "
        f"{tokenizer.decode([batch.response_ids[i]])!r}: engine {rollout[i]:.5f}, trainer {trainer[i]:.5f}"
        for i in places
    ]
    return "\n".join(["; the worst tokens:", *lines])


def _logprobs_at_the_start(
    config: TrainConfig, placement: Placement, batch: Batch, temperature: float, dtype: str | None = None
) -> FloatArray:
    """By a frozen model with the weights that the actor starts from."""
    model: ModelConfig = config.model.model_copy(update={"dtype": dtype or config.model.dtype})
    spec = TrainSpec(model, config.training, temperature=temperature, pictures=pictures_of(config))
    return placement.group(Role.RefPolicy, Policy, TrainWorker, spec, name="suspect").logprobs(batch).get()
