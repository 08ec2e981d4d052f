"""Terms on how an answer is written, to be weighed against what it says."""

import re


def format(completion: str, pattern: str = r"(?s)\s*<think>.+</think>\s*<answer>[^<]+</answer>\s*") -> float:
    """1 when the whole completion matches the regular expression, else 0."""
    return float(re.fullmatch(pattern, completion) is not None)


def length(completion: str, free_characters: int, most_characters: int) -> float:
    """0 up to `free_characters`, then falling linearly to -1 at `most_characters` and beyond."""
    if not free_characters < most_characters:
        raise ValueError(f"free_characters {free_characters} must be less than most_characters {most_characters}")
    return -min(1.0, max(0.0, (len(completion) - free_characters) / (most_characters - free_characters)))
