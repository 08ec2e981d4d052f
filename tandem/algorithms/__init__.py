"""Scores -> advantages, log-probs -> loss: pure tensors. The algorithms themselves are in `builtin`, one a file."""

from typing import Any, cast

from tandem.algorithms.base import Algorithm as Algorithm
from tandem.algorithms.policy_gradient import PolicyGradient as PolicyGradient
from tandem.config.algorithms import OwnAlgorithmConfig, PolicyGradientConfig
from tandem.discovery import class_named
from tandem.errors import UserError
from tandem.files import load_named


def make_algorithm(config: PolicyGradientConfig, max_response_tokens: int) -> Algorithm:
    """The algorithm that `algorithm.type` names; `max_response_tokens` is the divisor of `fixed_length`."""
    if isinstance(config, OwnAlgorithmConfig):
        own = _own_algorithm(config.type)
        try:
            return own(config, max_response_tokens)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"algorithm {config.type!r} cannot be made: {type(error).__name__}: {error}") from error
    kind: type[PolicyGradient[Any]] = class_named("tandem.algorithms.builtin", config.type, PolicyGradient)
    return kind(config, max_response_tokens)


def _own_algorithm(reference: str) -> type[PolicyGradient[Any]]:
    kind: Any = load_named(reference, "algorithm")
    if not (isinstance(kind, type) and issubclass(kind, PolicyGradient)):
        raise UserError(f"algorithm {reference!r}: there is no such subclass of tandem.algorithms.PolicyGradient")
    return cast(type[PolicyGradient[Any]], kind)
