"""Reward functions that processes import, in a module that imports nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def share_of_fours(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    return [text.count("4") / 8 for text in completions]
