"""Trackers on their real packages, offline or in files: a run, killed and resumed, is read back."""

from __future__ import annotations

import http.server
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.endpoint import wait_until

PROGRAM = Path(__file__).with_name("tracked_program.py")
KEY = "x" * 40
OFFLINE = {
    "wandb": {"mode": "offline", "project": "sorting", "tags": ["small"]},
    "mlflow": {"experiment": "sorting", "tags": {"size": "small"}},
    "swanlab": {"mode": "offline", "project": "sorting"},
    "trackio": {"project": "sorting"},
}


def run_program(run: Path, tracking: dict[str, Any], *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status, and what was printed."""
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_API_KEY": KEY,
    }  # offline it is not needed
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(run), json.dumps(tracking), *arguments],
        env={**os.environ, **quiet, "HOME": str(run.parent), "TRACKIO_DIR": str(run.parent / "trackio"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def read(reader: str, *arguments: object) -> Any:
    """What a program prints, in a process of its own: the packages warn when they are imported."""
    command = [sys.executable, "-W", "ignore", "-c", reader, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 4, killed when the trackers had taken 3; resumed after step 2, to step 5."""
    run = tmp_path_factory.mktemp("tracked") / "killed"
    installed = {name: {**given, "samples_every": 2} for name, given in OFFLINE.items() if find_spec(name)}
    if not installed:
        pytest.skip("no tracker is installed here")
    status, printed = run_program(run, installed, "0", "4", "kill")
    assert status == -9, printed
    status, printed = run_program(run, installed, "2", "5")
    assert status == 0 and "Traceback" not in printed, printed
    return run


@pytest.fixture
def read_back(run: Path, request: pytest.FixtureRequest) -> Path:
    if not (run / "trackers" / f"{request.param}.json").exists():
        pytest.skip(f"{request.param} is not installed here; scripts/trackers-env has all")
    return run


@pytest.mark.parametrize("read_back", ["wandb"], indirect=True)
def test_wandb_has_each_step_once_under_one_id(read_back: Path) -> None:
    from tandem.tracking.trackers.wandb import offline_history

    run_id = json.loads((read_back / "trackers/wandb.json").read_text())["id"]
    files = sorted(read_back.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2, "one a process"
    rows = [row for path in files for row in offline_history(path)]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row.get("reward/mean") for row in rows] == [None, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert [row.get("val/sort4/acc/mean@4") for row in rows] == [0, None, 0.02, None, 0.04, None]
    assert all(math.isnan(row["actor/kl"]) for row in rows[1:])
    tables = [sorted({name.partition(".")[0] for name in row if "samples" in name}) for row in rows]
    both = ["samples", "validation_samples"]
    with_pictures = sorted([*both, *(f"{name}_pictures" for name in both)])
    assert tables == [["validation_samples"], [], both, [], with_pictures, []]
    # Weights & Biases copies files in a process of its own, which may outlive the run's, and names them by the step
    # that it knows of then. A process that was killed may have left its table of a step that the next one repeats.
    wait_until(lambda: {2, 4} <= tables_by_step(read_back).keys())
    of_steps = tables_by_step(read_back)
    assert all(table["columns"] == ["step", "prompt", "answer", "reward", "advantage"] for table in of_steps.values())
    assert of_steps[2]["data"] == [[2, "1+1=", "2", 1.0, 0.5], [2, "1+2=", "3", 0.5, -0.5]]
    assert [row.get("samples_pictures.count") for row in rows] == [None] * 4 + [3, None]
    pictures = partial(read_back.glob, "wandb/offline-run-*/files/media/images/samples_pictures_*")
    wait_until(lambda: len({path.name for path in pictures()}) == 2)  # alike pictures are one file


def tables_by_step(run: Path) -> dict[int, Any]:
    """The tables of samples that there are."""
    files = run.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    return {table["data"][0][0]: table for table in (json.loads(path.read_text()) for path in files)}


@pytest.mark.parametrize("read_back", ["wandb"], indirect=True)
def test_wandb_is_told_configuration_and_environment(read_back: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    from tandem.tracking.trackers.wandb import log_entries

    path = sorted(read_back.glob("wandb/offline-run-*/run-*.wandb"))[0]
    (record,) = [r.run for r in map(Record.FromString, log_entries(path.read_bytes())) if r.HasField("run")][:1]
    config = {item.key: json.loads(item.value_json) for item in record.config.update}
    assert config["trainer"] == {"steps": 5} and config["client"] == {"api_key": "***"}
    assert config["environment"]["git_revision"] == "abc"
    assert (record.project, record.display_name, list(record.tags)) == ("sorting", "killed", ["small"])


@pytest.mark.parametrize("read_back", ["mlflow"], indirect=True)
def test_mlflow_has_each_step_once_in_one_run(read_back: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    reader = (
        "import json, sys; from mlflow import MlflowClient; client = MlflowClient(tracking_uri=sys.argv[1])\n"
        "place = client.get_experiment_by_name('sorting').experiment_id\n"
        "(run,) = client.search_runs([place])\n"
        "points = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]\n"
        "          for name in ('reward/mean', 'val/sort4/acc/mean_at_4', 'actor/kl', 'reward/part_1199')}\n"
        "files = [f.path for d in ('', 'samples') for f in client.list_artifacts(run.info.run_id, d)]\n"
        "text = {n: open(client.download_artifacts(run.info.run_id, n)).read() for n in files if '.' in n}\n"
        "print(json.dumps([run.info.status, run.info.run_name, run.data.params, run.data.tags, points, files, text]))\n"
    )
    status, name, parameters, tags, points, files, texts = read(reader, read_back / "mlflow")
    assert (status, name, tags["size"]) == ("FINISHED", "killed", "small")
    assert parameters == {"trainer.steps": "5", "model.path": "/models/small", "client.api_key": "***"}
    assert points["reward/mean"] == [[step, step / 10] for step in range(1, 6)]
    assert points["val/sort4/acc/mean_at_4"] == [[0, 0], [2, 0.02], [4, 0.04]]
    assert (
        [step for step, _ in points["reward/part_1199"]] == [step for step, _ in points["actor/kl"]] == [1, 2, 3, 4, 5]
    )
    assert [file for file in files if file.startswith("samples/")] == [
        "samples/step_000002.json",
        "samples/step_000004.json",
    ]
    assert json.loads(texts["samples/step_000002.json"])["data"][0] == ["1+1=", "2", 1.0, 0.5]
    assert json.loads(texts["environment.json"])["git_revision"] == "abc" and "***" in texts["config.yaml"]


@pytest.mark.parametrize("read_back", ["swanlab"], indirect=True)
def test_swanlab_has_each_value_once_under_one_id(read_back: Path) -> None:
    run_id = json.loads((read_back / "trackers/swanlab.json").read_text())["id"]
    folders = sorted(read_back.glob(f"swanlab/run-*-{run_id}"))
    assert len(folders) == 2, "one a process"
    reader = (
        "import json, sys, pathlib; from tandem.tracking.trackers.swanlab import offline_records as records\n"
        "files = map(pathlib.Path, sys.argv[1:])\n"
        "print(json.dumps([[r.step, r.key, r.value.number if hasattr(r.value, 'number') else None]\n"
        "                  for file in files for r in records(file)]))\n"
    )
    values = read(reader, *(folder / f"run-{run_id}.swanlab" for folder in folders))
    assert len({(step, key) for step, key, _ in values}) == len(values)
    found = {name: sorted([step, value] for step, key, value in values if key == name) for _, name, _ in values}
    assert found["reward/mean"] == [[step, step / 10] for step in range(1, 6)]
    assert [step for step, _ in found["reward/part_1199"]] == [step for step, _ in found["actor/kl"]] == [1, 2, 3, 4, 5]
    assert found["val/sort4/acc/mean@4"] == [[0, 0.0], [2, 0.02], [4, 0.04]]
    assert [step for step, _ in found["samples"]] == [2, 4]
    assert [step for step, _ in found["validation_samples"]] == [0, 2, 4]
    config = (folders[1] / "files/config.yaml").read_text()
    assert "***" in config and "git_revision: abc" in config


@pytest.mark.parametrize("read_back", ["trackio"], indirect=True)
def test_trackio_has_each_step_once_in_one_run(read_back: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(read_back.parent / "trackio"))
    reader = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as storage\n"
        "(run,) = storage.get_runs('sorting')\n"
        "rows = storage.get_logs('sorting', run)\n"
        "kept = [{n: v for n, v in row.items() if 'part_' not in n and n != 'timestamp'} for row in rows]\n"
        "print(json.dumps([run, kept, storage.get_run_config('sorting', run)]))\n"
    )
    name, rows, config = read(reader)
    assert name == f"killed-{json.loads((read_back / 'trackers/trackio.json').read_text())['id'][:6]}"
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row.get("reward/mean") for row in rows] == [None, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert [row.get("val/sort4/acc/mean@4") for row in rows] == [0, None, 0.02, None, 0.04, None]
    assert all(math.isnan(row["actor/kl"]) for row in rows[1:])
    assert [row["step"] for row in rows if "samples" in row] == [2, 4]
    assert rows[2]["samples"]["_value"][0] == {"prompt": "1+1=", "answer": "2", "reward": 1.0, "advantage": 0.5}
    assert config["client"] == {"api_key": "***"} and config["environment"]["git_revision"] == "abc"


def test_no_secret_is_in_any_file_but_the_users_own(run: Path) -> None:
    holding = [path for path in run.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert [path.name for path in holding] == ["config.yaml"], "of the run directory, where the user has written it"
    assert [path for path in run.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []


class _Refusing(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"errors": [{"message": "user is not logged in"}]}')

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a server that knows nobody."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


KEYS = {
    "wandb": [("", "no API key is set"), ("abc", "must have 40+ characters"), (KEY, "user is not logged in")],
    "swanlab": [(None, "No API key provided"), (KEY, "check if the provided API key is correct")],
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_tried_before_the_run(tmp_path: Path, refusing: str, name: str) -> None:
    if not find_spec(name):
        pytest.skip(f"{name} is not installed here; scripts/trackers-env has all")
    run, variable = tmp_path / "run", f"{name.upper()}_API_KEY"
    address = {"WANDB_BASE_URL": refusing, "SWANLAB_API_HOST": refusing}
    for key, said in KEYS[name]:
        given = {} if key is None else {variable: key}
        status, printed = run_program(run, {name: {"mode": "online"}}, "0", "1", **address, **given)
        assert status == 1 and f"tracking.{name}: " in printed and said in printed and variable in printed, printed
        assert not (run / "metrics.jsonl").exists()


def test_servers_that_are_down_stop_no_run(tmp_path: Path) -> None:
    down = {"mlflow": {"uri": "http://127.0.0.1:9", "close_timeout_s": 0.5}}
    if not find_spec("mlflow"):
        pytest.skip("mlflow is not installed here")
    status, printed = run_program(tmp_path / "run", down, "0", "3")
    assert status == 0 and printed.count("tracking.mlflow: ") == 1 and "no step is there" in printed, printed
    status, printed = run_program(tmp_path / "run", {"mlflow": {"close_timeout_s": 300.0}}, "3", "3")
    assert status == 0 and printed == ""
    assert json.loads((tmp_path / "run/trackers/mlflow.json").read_text())["step"] == 3, "it has caught up"
