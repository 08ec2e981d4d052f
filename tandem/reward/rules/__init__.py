"""Reward functions that come with Tandem, and which data sources they are for."""

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {
    "gsm8k": "tandem.reward.rules.gsm8k:strict",
    "openai/gsm8k": "tandem.reward.rules.gsm8k:strict",
    "openai_humaneval": "tandem.reward.rules.code:unit_tests",
    "mbpp": "tandem.reward.rules.code:unit_tests",
}
"""`data_source` -> reference of its reward function, for runs that leave `reward.functions` empty."""
CHECKS: Mapping[str, str] = {"tandem.reward.rules.code:unit_tests": "tandem.reward.rules.code:check"}
"""Reward function -> what is called once before the run with its arguments; raises UserError."""
