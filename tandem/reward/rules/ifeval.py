"""Instruction following (IFEval, Zhou et al. 2023, arXiv:2311.07911): are all instructions of the prompt kept?

The checks of its 25 instructions are the authors', as lm-evaluation-harness keeps them.
"""

import importlib.util
import json
from typing import Any

from tandem.errors import UserError
from tandem.reward.rules.own_words import Turns, own_words


def strict(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, turns: Turns = ()
) -> dict[str, Any]:
    """1 when the answer keeps every instruction, the protocol's prompt-level strict accuracy; else 0.

    `loose` is the same of the best of eight readings, without the first or last line, or asterisks; `instructions` and
    `instructions_loose` are shares of the prompt's instructions. `ground_truth` is JSON of prompt, instruction_id_list
    and kwargs. Raises LookupError where sentences are to be counted and nltk lacks `punkt_tab`.
    """
    from lm_eval.tasks.ifeval.utils import process_results  # pyright: ignore[reportMissingImports]

    row = {"key": 0, **json.loads(ground_truth)}
    answer = own_words(solution_str, turns).rpartition("</think>")[2].strip()
    found = process_results(row, [answer])
    kept, kept_loosely = found["inst_level_strict_acc"], found["inst_level_loose_acc"]
    return {
        "score": float(all(kept)),
        "acc": float(all(kept)),
        "loose": float(all(kept_loosely)),
        "instructions": sum(kept) / len(kept),
        "instructions_loose": sum(kept_loosely) / len(kept_loosely),
    }


def check() -> None:
    """Before a run: raises UserError where the checks are missing."""
    if any(importlib.util.find_spec(name) is None for name in ("lm_eval", "langdetect", "immutabledict")):
        raise UserError(
            "the IFEval reward needs lm-evaluation-harness; pip install -e '.[ifeval]' in a clone of Tandem"
        )
