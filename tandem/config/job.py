"""The commands that a configuration may be for."""

from typing import Literal

Job = Literal["train", "sft", "dpo", "reward-model"]
"""`tandem JOB CONFIG.yaml`."""
