"""Where a run stood when a checkpoint was written: `state/run.json` in it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.files import write_text
from tandem.stored import DamagedFile, read_json

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
    """The best value so far, as `jobs/best_checkpoint.py` has it."""
    optimizers: dict[str, str] = field(default_factory=dict)
    """Their `type` by the model's directory in a checkpoint, where it is not adamw."""

    def write(self, checkpoint: Path) -> None:
        write_text(checkpoint / _FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        """Raises DamagedFile where `checkpoint` is none, or that of another version of Tandem."""
        path = checkpoint / _FILE
        if not path.exists():
            raise DamagedFile(checkpoint, f"not a checkpoint of this version of Tandem (no {_FILE})")
        return read_json(path, cls)
