"""The section `data.mixture`: several sets of training rows, and how often each is drawn from."""

from fractions import Fraction
from math import gcd, lcm
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from tandem.config.base import PositiveFloat, Section
from tandem.config.paths import DataPaths

LONGEST_PERIOD = 100_000
SetName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]
"""It names metrics."""


class TrainSetConfig(Section):
    """One set of a mixture."""

    files: DataPaths = Field(min_length=1)
    """As `data.train_files`."""
    weight: PositiveFloat = 1.0
    """Its share of the rows is its weight over the sum of all weights, exactly."""


def whole_weights(weights: list[float]) -> list[int]:
    """The smallest whole numbers in the proportion of decimal fractions: .5, .3 and .2 are 5, 3 and 2."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return [weight // gcd(*whole) for weight in whole]


def _check(mixture: dict[str, TrainSetConfig]) -> dict[str, TrainSetConfig]:
    weights = whole_weights([one.weight for one in mixture.values()]) if mixture else []
    if sum(weights) > LONGEST_PERIOD:
        raise ValueError(
            f"the weights are {':'.join(map(str, weights))} as whole numbers, whose sum is more than "
            f"{LONGEST_PERIOD:,}; round them"
        )
    return mixture


MixtureConfig = Annotated[dict[SetName, TrainSetConfig], AfterValidator(_check)]
