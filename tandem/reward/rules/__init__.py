"""Reward functions that come with Tandem, and which data sources they are for."""

from collections.abc import Mapping

_GSM8K, _MATH = "tandem.reward.rules.gsm8k:strict", "tandem.reward.rules.math:boxed"
_LETTER, _CODE = "tandem.reward.rules.choice:letter", "tandem.reward.rules.code:unit_tests"
_EVALPLUS, _IFEVAL = "tandem.reward.rules.code:evalplus", "tandem.reward.rules.ifeval:strict"
BUILT_IN: Mapping[str, str] = {
    **dict.fromkeys(("gsm8k", "openai/gsm8k"), _GSM8K),
    **dict.fromkeys(
        ("math", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "aime", "hiyouga/geometry3k"), _MATH
    ),
    "math_dapo": "tandem.reward.rules.math:dapo",
    **dict.fromkeys(("aqua_rat", "hellaswag", "puzzlevqa"), _LETTER),
    **dict.fromkeys(("mbpp", "openai_humaneval"), _CODE),
    **dict.fromkeys(("evalplus/humanevalplus", "evalplus/mbppplus"), _EVALPLUS),
    "google/IFEval": _IFEVAL,
    **dict.fromkeys(("squad", "hotpotqa", "musique"), "tandem.reward.rules.qa:exact_match"),
}
"""`data_source` -> reference of its reward function, for runs that leave `reward.functions` empty."""
CHECKS: Mapping[str, str] = {
    _CODE: "tandem.reward.rules.code:check",
    _EVALPLUS: "tandem.reward.rules.code:check",
    _IFEVAL: "tandem.reward.rules.ifeval:check",
}
"""Reward function -> what is called once before the run with its arguments; raises UserError."""
