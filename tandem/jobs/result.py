"""What a run directory holds, for a program: metrics as a table, the best value, where the models are."""

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from tandem.config.paths import absolute
from tandem.errors import UserError
from tandem.jobs.runs import MetricExtremes, best_of, state_of, stored_trainer
from tandem.signals import StopReason
from tandem.stored import read_pointer
from tandem.tracking.jsonl import each_record, read_metrics
from tandem.types import StepMetrics


class Best(NamedTuple):
    """The best value that a run has reached."""

    metric: str
    """`trainer.best_metric`, or else a validation's accuracy, reward or loss, or else the reward."""
    value: float
    step: int


class Run:
    """A run directory, read anew at each question: `tandem.train` returns one, `tandem.Run("runs/first")` opens one."""

    directory: Path
    stopped_by: StopReason | None
    """What stopped this process's part before the last step: a signal, or what a callback gave as its reason. None: it
    reached its last step, or the directory was only opened."""

    def __init__(self, directory: Path | str, stopped_by: StopReason | None = None) -> None:
        """Raises UserError where `directory` is no run."""
        self.directory = absolute(Path(directory))
        self.stopped_by = stopped_by
        if not (self.directory / "config.yaml").is_file():
            raise UserError(f"{self.directory}: not a run (no config.yaml)")

    @property
    def state(self) -> str:
        """running, finished, stopped, failed or killed, as `tandem runs` says."""
        return state_of(self.directory)

    @property
    def finished(self) -> bool:
        """It has reached its last step."""
        return self.state == "finished"

    @property
    def metrics(self) -> pa.Table:
        """A row a step, by step; a column a metric, null where a step has none of it. `.to_pandas()` where pandas is
        installed. docs/metrics.md says what they are."""
        records = self._records()
        names = dict.fromkeys(name for record in records for name in record if name != "step")
        columns: dict[str, pa.Array] = {"step": pa.array([record["step"] for record in records], pa.int64())}
        columns |= {name: pa.array([record.get(name) for record in records], pa.float64()) for name in names}
        return pa.table(columns)

    @property
    def final(self) -> StepMetrics:
        """The metrics of the last step, `step` among them; empty before the first."""
        return self._measured().last

    @property
    def best(self) -> Best | None:
        """None where nothing of the kind was measured."""
        found = best_of(self._measured(), stored_trainer(self.directory))
        return None if found is None else Best(*found)

    @property
    def model(self) -> Path:
        """The model of the newest checkpoint, a Hugging Face directory. Raises UserError where there is none yet."""
        return self._model("latest")

    @property
    def best_model(self) -> Path:
        """That of the checkpoint where `trainer.best_metric` was best. Raises UserError where there is none."""
        return self._model("best")

    def __repr__(self) -> str:
        best = self.best
        reached = f", best {best.metric} {best.value:.4g} at step {best.step}" if best else ""
        return f"<Run {self.directory}: {self.state} at step {self.final.get('step', 0):.0f}{reached}>"

    def _measured(self) -> MetricExtremes:
        return MetricExtremes(each_record(self.directory / "metrics.jsonl"))

    def _records(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory / "metrics.jsonl")

    def _model(self, pointer: str) -> Path:
        named = self.directory / "checkpoints" / pointer
        if not named.exists():
            mend = "give trainer.best_metric to keep the best one" if pointer == "best" else "it saves at its end"
            raise UserError(f"{self.directory}: has no {pointer} checkpoint; {mend}")
        return read_pointer(named) / "model"
