"""`tandem eval`: a model directory and a data set -> validation metrics."""

from __future__ import annotations

from tandem.config import TrainConfig
from tandem.controller.inputs import Inputs
from tandem.controller.resources import best_device
from tandem.controller.validation import evaluate, summarize
from tandem.data.dataset import RLHFDataset
from tandem.generation.native import NativeEngine
from tandem.models.loading import load_policy, stop_token_ids
from tandem.reward.manager import RewardManager
from tandem.types import StepMetrics
from tandem.workers.rollout import RolloutWorker


def evaluate_model(config: TrainConfig, inputs: Inputs[RLHFDataset]) -> StepMetrics:
    """Answer and score `data.val_files` with `model.path`."""
    assert inputs.val is not None
    policy = load_policy(config.model, best_device())
    engine = NativeEngine(policy, max_running=config.generation.max_running, tokenizer=inputs.tokenizer)
    engine.load_weights(0, None)
    stops = stop_token_ids(policy, inputs.tokenizer)
    rollout = RolloutWorker(engine, inputs.tokenizer, config.generation, stops, config.trainer.seed)
    reward = RewardManager(config.reward, config.trainer.seed)
    try:
        prompts = [inputs.val[row] for row in range(len(inputs.val))]
        return summarize(evaluate(rollout, reward, prompts, step=0))
    finally:
        rollout.close()
        reward.close()
