"""TensorBoard event files, written without torch or TensorFlow."""

from __future__ import annotations

import time
from pathlib import Path

from tandem.errors import UserError
from tandem.types import StepMetrics


class TensorBoardTracker:
    """One scalar a metric. A resumed run's first step hides what the earlier event files say of it and later steps."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UserError(
                f"tracking.tensorboard: the tensorboard package cannot be imported ({error}); "
                f"install it with: pip install 'tandem-rl[tensorboard]'"
            ) from error
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(directory))
        self._started = False

    def log(self, step: int, metrics: StepMetrics) -> None:
        if not self._started:
            self._add(step, session_log=self._events.SessionLog(status=self._events.SessionLog.START))
            self._started = True
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **what: object) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **what))
