"""Scores -> advantages, log-probs -> loss: pure tensors, one short file an algorithm."""

from tandem.algorithms.base import Algorithm
from tandem.algorithms.grpo import GRPO
from tandem.algorithms.ppo import PPO
from tandem.config.tree import AlgorithmConfig, GRPOConfig


def make_algorithm(config: AlgorithmConfig, max_response_tokens: int) -> Algorithm:
    """The algorithm that `algorithm.type` names; `max_response_tokens` is the divisor of `fixed_length`."""
    return GRPO(config, max_response_tokens) if isinstance(config, GRPOConfig) else PPO(config, max_response_tokens)
