"""Callbacks of a run, what a run returns, and objects in the place of files."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import tandem
from tandem.cli import main
from tandem.models import loading
from tandem.tracking.jsonl import read_metrics
from tests.scoring import share_of_fours


class Noting(tandem.Callback):
    """Notes what it is told, and stops or fails at a step."""

    def __init__(self, stop_at: int = 0, fail_at: int = 0) -> None:
        self.stop_at, self.fail_at = stop_at, fail_at
        self.told: list[tuple[Any, ...]] = []

    def on_step(self, run: tandem.RunControl, step: int, metrics: tandem.StepMetrics) -> None:
        self.told.append(("step", step, metrics["reward/mean"]))
        self.frozen = gc.get_freeze_count()
        if step == self.stop_at:
            run.stop("enough")
        if step == self.fail_at:
            raise KeyError("mine")

    def on_eval(self, run: tandem.RunControl, step: int, metrics: tandem.StepMetrics) -> None:
        assert all(name.startswith(("val/", "time/")) for name in metrics), metrics
        self.told.append(("eval", step))

    def on_save(self, run: tandem.RunControl, step: int, checkpoint: Path) -> None:
        assert (checkpoint / "model" / "config.json").is_file() and (checkpoint / "manifest.json").is_file()
        self.told.append(("save", step))


def settings(config: Path, *overrides: str) -> tandem.TrainConfig:
    return tandem.load_config(tandem.TrainConfig, config, overrides)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_callbacks_are_told_of_everything_and_the_result_is_what_the_run_wrote(grpo_config: Path) -> None:
    callback = Noting()
    config = settings(grpo_config, "trainer.eval_every=2", "trainer.save_every=2", "trainer.best_metric=reward/mean")
    run = tandem.train(config, callbacks=[callback])
    records = read_metrics(config.trainer.run_dir / "metrics.jsonl")
    steps = [("step", record["step"], record["reward/mean"]) for record in records if record["step"]]
    assert [one for one in callback.told if one[0] == "step"] == steps
    assert [one for one in callback.told if one[0] == "eval"] == [("eval", 0), ("eval", 2), ("eval", 3)]
    saved = [step for what, step, *_ in callback.told if what == "save"]
    assert saved == sorted({*saved}) and {2, 3} <= {*saved}
    assert run.finished and run.stopped_by is None and run.directory == config.trainer.run_dir
    assert run.metrics["step"].to_pylist() == [0, 1, 2, 3]
    assert run.metrics["reward/mean"].to_pylist() == [None, *(reward for _, _, reward in steps)]
    assert run.final["step"] == 3 and run.final["reward/mean"] == steps[-1][2]
    assert run.best == ("reward/mean", max(reward for *_, reward in steps), run.best.step)
    assert run.metrics["reward/mean"][run.best.step].as_py() == run.best.value
    assert (run.model / "config.json").is_file() and run.best_model.parent.name == f"step_{run.best.step:06d}"
    assert "finished at step 3" in repr(tandem.Run(run.directory))
    assert callback.frozen > 0 and gc.get_freeze_count() == 0, "what a run keeps from the search is searched after it"


class Looking(tandem.Callback):
    """Whether the model of the run before is still there."""

    def __init__(self, models: list[weakref.ref[Any]]) -> None:
        self.models, self.alive = models, [True]

    def on_step(self, run: tandem.RunControl, step: int, metrics: tandem.StepMetrics) -> None:
        gc.collect()
        self.alive = [model() is not None for model in self.models]


@pytest.mark.usefixtures("nothing_frozen")
def test_a_run_does_not_keep_the_model_of_the_one_before(
    grpo_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[Any]] = []
    load = loading.load_model

    def noting(*arguments: Any) -> Any:
        model = load(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr("tandem.training.fsdp.load_model", noting)
    gc.disable()  # nothing is found before the next run asks
    try:
        for number in range(2):
            looking = Looking(models)
            overrides = ("trainer.steps=1", f"trainer.run_dir={tmp_path / str(number)}")
            tandem.train(settings(grpo_config, *overrides), callbacks=[looking])
    finally:
        gc.enable()
    assert looking.alive == [False, True]


def test_a_callback_stops_the_run_which_goes_on_later(grpo_config: Path) -> None:
    run = tandem.Trainer(grpo_config, callbacks=[Noting(stop_at=1)]).fit()
    assert run.stopped_by == "enough" and run.state == "stopped" and not run.finished
    assert run.metrics.num_rows == 1 and run.model.parent.name == "step_000001"
    run = tandem.Trainer(settings(grpo_config, "trainer.resume=true")).fit()
    assert run.finished and run.metrics.num_rows == 3


def test_what_a_callback_raises_ends_the_run_with_its_name(grpo_config: Path, tmp_path: Path) -> None:
    with pytest.raises(
        tandem.CallbackFailed, match=r"(?s)callback Noting.on_step failed at step 2\n.*KeyError: 'mine'"
    ):
        tandem.train(settings(grpo_config), callbacks=[Noting(fail_at=2)])
    assert tandem.Run(tmp_path / "run").state == "failed"


def test_supervised_runs_have_callbacks_too(sort4: Path, tmp_path: Path) -> None:
    class Losses(tandem.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_step(self, run: tandem.RunControl, step: int, metrics: tandem.StepMetrics) -> None:
            self.losses.append(metrics["sft/loss"])

    rows = [{"prompt": f"{number} ", "completion": "2"} for number in range(8)]
    config = tandem.load_config(
        tandem.SftConfig,
        {
            "model.path": sort4 / "model",
            "data": {"train_files": rows, "rows_per_step": 4},
            "trainer": {"run_dir": tmp_path / "sft", "steps": 2},
        },
    )
    callback = Losses()
    assert tandem.train(config, callbacks=[callback]).final["sft/loss"] == callback.losses[1]


@pytest.mark.parametrize("as_table", [False, True])
def test_objects_become_files_with_which_the_run_goes_on(
    grpo_config: Path, tmp_path: Path, as_table: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    scale = 2.0

    def scaled(completion: str, ground_truth: str, hint: str) -> float:
        assert hint == "sorted"
        return scale * len(completion)

    tree = yaml.safe_load(grpo_config.read_text())
    rows = [{"prompt": f"{n}=", "answer": str(n), "hint": "sorted"} for n in range(8)]
    tree["data"] |= {"train_files": pa.Table.from_pylist(rows) if as_table else rows, "val_files": []}
    tree |= {"reward": {"functions": [{"function": scaled, "weight": 0.5}, share_of_fours]}}
    run = tandem.train({**tree, "trainer.steps": 1})
    stored = yaml.safe_load((run.directory / "config.yaml").read_text())
    written = run.directory / "objects" / ("data.train_files.parquet" if as_table else "data.train_files.jsonl")
    assert stored["data"]["train_files"] == [str(written)]
    assert stored["reward"]["functions"] == [
        {
            "function": f"{run.directory}/objects/scaled.pkl:scaled",
            "weight": 0.5,
            "arguments": {},
            "score_together": None,
        },
        "tests.scoring:share_of_fours",
    ]
    if as_table:
        assert pq.read_table(written).to_pylist() == rows
    assert run.final["reward/scaled"] > 1 and not math.isnan(run.final["reward/share_of_fours"])
    assert main(["train", "--resume", str(run.directory), "trainer.steps=2"]) == 0
    assert run.metrics.num_rows == 2 and run.final["reward/scaled"] > 1


def test_tools_may_be_objects(grpo_config: Path, tmp_path: Path) -> None:
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        return f"rain in {city}"

    config = tandem.load_config(
        tandem.TrainConfig,
        {**yaml.safe_load(grpo_config.read_text()), "conversation": {"environment": {"tools": [weather]}}},
    )
    assert config.conversation is not None
    assert config.conversation.environment.tools == [f"{tmp_path}/run/objects/weather.pkl:weather"]  # type: ignore


class Callable:
    def __call__(self, completion: str) -> float:
        return 0.0


UNPICKLED = (_ for _ in ())


def refers_to_a_generator(completion: str) -> float:
    return float(next(UNPICKLED))


refers_to_a_generator.__module__ = "__main__"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"reward.functions": [lambda completion: 1.0]}, "reward.functions: a <lambda> has no name"),
        ({"reward.functions": [Callable()]}, "is neither a function nor a class"),
        ({"reward.functions": [refers_to_a_generator]}, "refers_to_a_generator cannot be written to a file"),
        ({"data.train_files": [3, 4]}, "data.train_files: row 1 is a int; give a dict of columns"),
        ({"data.train_files": [{"prompt": "1="}, {"prompt": b"2="}]}, "data.train_files: row 2: Object of type bytes"),
        ({"data.train_files": 7}, "data.train_files: int is neither files nor rows"),
        ({"trainer": 3, "trainer.steps": 3}, "'trainer.steps', but trainer is 3, which has no keys"),
        ({"trainer": {"steps": 3}, "reward.functions": [main]}, r"trainer.run_dir: field required"),
        ({"trainer": {"steps": 3}, "data.val_files": [{"prompt": "1="}]}, "objects are written to trainer.run_dir"),
        ({3: 4}, "3 is no key"),
        ({"trainer.stepz": 4}, "did you mean trainer.steps"),
    ],
)
def test_what_is_no_file_and_becomes_none_is_told(
    grpo_config: Path, tmp_path: Path, changed: dict[Any, Any], told: str
) -> None:
    with pytest.raises(tandem.UserError, match=told):
        tandem.train({**yaml.safe_load(grpo_config.read_text()), **changed})
    assert not (tmp_path / "run/config.yaml").exists()


def test_objects_of_another_run_stay(grpo_config: Path, tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    tree = yaml.safe_load(grpo_config.read_text())
    with pytest.raises(tandem.UserError, match="holds another run"):
        tandem.train({**tree, "data.train_files": [{"prompt": "1="}]})
    assert not (tmp_path / "run/objects").exists()


def test_only_a_run_is_opened_as_one(tmp_path: Path) -> None:
    with pytest.raises(tandem.UserError, match="not a run"):
        tandem.Run(tmp_path)
