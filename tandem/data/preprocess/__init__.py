"""Published raw files -> parquet, one module a kind of data set; `convert.py` reads and writes."""

from collections.abc import Mapping

from tandem.data.preprocess import benchmarks, code, hh, math, multiple_choice, pictures, questions
from tandem.data.preprocess.convert import ToRows

CONVERTERS: Mapping[str, ToRows] = {
    "aime": benchmarks.aime,
    "aqua": multiple_choice.aqua,
    "geo3k": pictures.geo3k,
    "gsm8k": math.gsm8k,
    "hellaswag": multiple_choice.hellaswag,
    "hh": hh.hh,
    "hotpotqa": questions.questions("hotpotqa"),
    "humaneval": code.humaneval,
    "humanevalplus": benchmarks.humanevalplus,
    "ifeval": benchmarks.ifeval,
    "math": math.competition_math,
    "math500": benchmarks.math500,
    "mbpp": code.mbpp,
    "mbppplus": benchmarks.mbppplus,
    "musique": questions.questions("musique"),
    "puzzlevqa": pictures.puzzlevqa,
    "squad": questions.questions("squad"),
}
"""Name in `tandem data NAME` to what makes its rows."""
