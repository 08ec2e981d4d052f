"""Which checkpoint of a run is the best one: that with the best value of `trainer.best_metric`."""

import math
import re
from typing import Any

from tandem.config.trainer import TrainerConfig
from tandem.errors import UserError
from tandem.types import StepMetrics

_LOWER_IS_BETTER = re.compile(r"(loss|kl|/errors|/timeouts|/not_scored|/unscored)$")


def lower_is_better(metric: str) -> bool:
    return _LOWER_IS_BETTER.search(metric) is not None


class BestValue:
    """The best value so far. It is saved with every checkpoint, so that a resumed run goes on comparing."""

    def __init__(self, trainer: TrainerConfig) -> None:
        self._metric = trainer.best_metric
        by_name = "min" if lower_is_better(trainer.best_metric or "") else "max"
        self._mode = trainer.best_mode or by_name
        self._value: float | None = None
        self.step: int | None = None
        """After which it was measured; None before the first value."""

    def improves(self, metrics: StepMetrics, step: int) -> bool:
        """Takes the value in the metrics of a step if it is better than all before. NaN never is."""
        value = metrics.get(self._metric) if self._metric else None
        if value is None or math.isnan(value):
            return False
        if self._value is not None and (value >= self._value if self._mode == "min" else value <= self._value):
            return False
        self._value, self.step = value, step
        return True

    def stands_at(self, step: int | None) -> None:
        """The checkpoint of the best value is that of `step`; None: it is gone, so the next value is the best."""
        self.step = step
        if step is None:
            self._value = None

    def expect_in(self, metrics: StepMetrics, *, validation: bool) -> None:
        """Raises UserError where the run does not measure the metric: it would never call a checkpoint the best.

        `metrics`: of the first validation, or else of the first step. Each looks for the metrics of its kind only.
        """
        if self._metric and self._metric.startswith("val/") == validation and self._metric not in metrics:
            when = "the first validation" if validation else "the first step"
            names = ", ".join(sorted(name for name in metrics if name.startswith("val/") == validation))
            raise UserError(
                f"trainer.best_metric: {self._metric} is not among the metrics of {when}, so there would be no best "
                f"checkpoint; take one of {names}"
            )

    def state(self) -> dict[str, Any]:
        """What `load_state` needs; plain enough for JSON."""
        return {"metric": self._metric, "mode": self._mode, "value": self._value, "step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; the value of another metric, which a resumed run may name, does not count."""
        if (state["metric"], state["mode"]) == (self._metric, self._mode):
            self._value, self.step = state["value"], state.get("step")
