"""Whether a tokenizer and the model's own files name the same token as the end of an answer."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase


def end_mismatch(directory: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What is said of a model directory whose `config.json` or `generation_config.json` names other ends of sequence
    than the tokenizer; None where they agree, or name none."""
    own: Any = tokenizer.eos_token_id
    for name in ("config.json", "generation_config.json"):
        ends = _ends(directory / name)
        if ends and own not in ends:
            told = "none" if own is None else f"{tokenizer.eos_token!r} ({own})"
            spelled = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)!r} ({end})" for end in sorted(ends))
            return (
                f"the tokenizer's end of sequence is {told}, and that of {directory / name} {spelled}: a run stops at "
                "any of them, and other programs may not; change eos_token of tokenizer_config.json, or eos_token_id"
            )
    return None


def ends_of_answers(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's end of sequence, and those that the generation configuration
    beside it names, or where there is none the model's."""
    directory, own = Path(tokenizer.name_or_path), tokenizer.eos_token_id
    file = directory / "generation_config.json"
    named = _ends(file if file.is_file() else directory / "config.json")
    return frozenset({*named, *([own] if isinstance(own, int) else [])})


def _ends(file: Path) -> set[int]:
    """The ids that a file of a model directory names; none where it is not there, or names none."""
    try:
        described: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    if not isinstance(described, dict):
        return set()
    named: Any = described.get("eos_token_id", (described.get("text_config") or {}).get("eos_token_id"))
    return {end for end in (named if isinstance(named, list) else [named]) if is_token_id(end)}


def is_token_id(value: Any) -> bool:
    """Tokenizers number their tokens with 32 bits."""
    return type(value) is int and 0 <= value < 2**31
