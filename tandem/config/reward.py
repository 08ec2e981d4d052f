"""What scores answers."""

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from tandem.config.base import MayChange, PositiveFloat, PositiveInt, Section, Share
from tandem.config.judging import JudgeConfig
from tandem.config.paths import Reference


class RewardFunctionConfig(Section):
    function: Reference
    """`path/to/file.py:function` or `package.module:function`."""
    weight: float = 1.0
    arguments: dict[str, Any] = {}
    """Further arguments of every call, by name."""
    score_together: str | None = None
    """A column, such as `extra_info.problem`: a function of `completions` scores prompts of a step that are alike in it
    in one call."""


def _form(function: object) -> str:
    return "reference" if isinstance(function, str) else "with_options"


RewardFunctionForm = Annotated[
    Annotated[RewardFunctionConfig, Tag("with_options")] | Annotated[Reference, Tag("reference")], Discriminator(_form)
]


class RewardConfig(Section):
    functions: list[RewardFunctionForm] = []
    """Their weighted sum is the reward; empty: what the environment of a conversation gives, or where it gives nothing,
    the function that the built-in table has for the row's `data_source`."""
    environment_weight: float = 1.0
    """Factor of the environment's reward where it is added to that of `functions`."""
    model_weight: float = 1.0
    """Factor of the score of `model.reward_model_path`."""
    judge: JudgeConfig | None = None
    """A generative reward model; default: none, or with `model.judge_path` one with all defaults."""
    timeout_s: MayChange[PositiveFloat] = 30.0
    """For one call."""
    import_timeout_s: MayChange[PositiveFloat] = 300.0
    """For a worker to import the file of one of `functions`."""
    workers: MayChange[PositiveInt] = 2
    max_error_share: MayChange[Share] = 0.2
    """The run stops when a larger share of a step's or validation's answers lost their reward to errors and time-outs,
    or when so many were lost to environments that failed."""
