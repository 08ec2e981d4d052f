"""Scores -> advantages, log-probs -> loss: pure tensors, one short file an algorithm."""

from typing import Any, cast

from tandem.algorithms.base import Algorithm
from tandem.algorithms.baselines import GPG, OPO, RLOO, MaxRL, ReinforcePlusPlusBaseline
from tandem.algorithms.gdpo import GDPO
from tandem.algorithms.grpo import GRPO
from tandem.algorithms.otb import OTB
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.algorithms.ppo import PPO
from tandem.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from tandem.algorithms.remax import ReMax
from tandem.config.algorithms import AlgorithmConfig
from tandem.errors import UserError
from tandem.files import load_named

ALGORITHMS: dict[str, type[PolicyGradient[Any]]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "dppo"), GRPO),
    "rloo": RLOO,
    "opo": OPO,
    "gpg": GPG,
    "maxrl": MaxRL,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "gdpo": GDPO,
    "otb": OTB,
    "remax": ReMax,
    "ppo": PPO,
}


def make_algorithm(config: AlgorithmConfig, max_response_tokens: int) -> Algorithm:
    """The algorithm that `algorithm.type` names; `max_response_tokens` is the divisor of `fixed_length`."""
    kind: Any = ALGORITHMS.get(config.type) or load_named(config.type, "algorithm")
    if not (isinstance(kind, type) and issubclass(kind, PolicyGradient)):
        raise UserError(f"algorithm {config.type!r}: there is no such subclass of tandem.algorithms.PolicyGradient")
    return cast(type[PolicyGradient[Any]], kind)(config, max_response_tokens)
