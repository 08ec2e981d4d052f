"""Where a run stood when a checkpoint was written: `state/run.json` in it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.files import write_text

_FILE = "state/run.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a resumed run, or one that branches off, needs to know of it."""

    step: int
    """The last step, of the training loop."""
    total_steps: int
    """How many the run was to have, which learning-rate schedules depend on."""
    training: str
    """`training.type`: whose optimizer state this is."""
    best: dict[str, Any]
    """The best value so far, as `jobs/best.py` has it."""
    optimizers: dict[str, str] = field(default_factory=dict)
    """Their `type` by the model's directory in a checkpoint, where it is not adamw."""

    def write(self, checkpoint: Path) -> None:
        write_text(checkpoint / _FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        """UserError when `checkpoint` is none, or that of another version of Tandem."""
        try:
            return cls(**json.loads((checkpoint / _FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{checkpoint}: not a checkpoint of this version of Tandem ({error})") from None
