"""Every small file of a run and of a model, damaged in every way, before every command that reads it: the answer is
exit status 0, or 2 with one message that names the file; never a traceback, and never a changed file."""

from __future__ import annotations

import json
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tandem.checkpoint.fork import fork_of
from tandem.cli import main
from tandem.config import yaml12
from tandem.config.load import load_config
from tandem.config.model import ModelConfig
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.jobs.push import checkpoint_of, model_card
from tandem.jobs.result import Run
from tandem.jobs.run import find_start
from tandem.models.loading import load_policy, load_tokenizer, stop_token_ids
from tandem.tracking.trajectories import read_groups, staleness_of
from tests.conftest import ROOT

DEEP = 20_000
WHOLE: dict[str, bytes] = {
    "empty": b"",
    "spaces": b" \n\n",
    "random bytes": random.Random(0).randbytes(300),
    "not UTF-8": b'{"step": 1, "x": "\xff\xfe"}\n',
    "NUL bytes": bytes(400),
    "null": b"null\n",
    "list": b"[]\n",
    "text": b'"x"\n',
    "words": b"there is something else here\n",
    "mapping": b"{}\n",
    "number": b"5\n",
    "NaN": b"NaN\n",
    "beyond floats": b"1e999\n",
    "5,000 digits": b"9" * 5000,
    "deep lists": b"[" * DEEP,
    "deep mappings": b'{"a":' * DEEP,
    "deep and closed": b"[" * 500 + b"]" * 500,
    "aliases": b"a: &a [x, x]\n" + b"".join(
        f"{new}: &{new} [{', '.join(['*' + old] * 40)}]\n".encode()
        for old, new in zip("abcdefg", "bcdefgh", strict=True)
    ),
    "in itself": b"&a {x: *a}\n",
    "control characters": b"\x1b[2J\x07\n",
}  # fmt: skip
"""Another content for a whole file."""
VALUES: dict[str, Any] = {
    "null": None, "number": 7, "negative": -7, "huge": 10**30, "fraction": 0.5, "NaN": float("nan"), "text": "x",
    "list": [], "mapping": {}, "nested": {"a": [{"b": None}]}, "truth": True, "NUL": "\0",
}  # fmt: skip
"""Another value for each key of a JSON object, or of sections of YAML."""


@pytest.fixture(scope="module")
def finished(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, which has ended, and `sound`, a second one that no case touches."""
    folder = tmp_path_factory.mktemp("damaged")
    rows = folder / "rows.jsonl"
    rows.write_text("".join((sort4 / "train.jsonl").read_text().splitlines(keepends=True)[:16]))
    tree = yaml.safe_load((ROOT / "recipes/sort4_grpo.yaml").read_text())
    shutil.copytree(sort4 / "model", folder / "model")
    tree["model"]["path"] = str(folder / "model")
    tree["data"] |= {"train_files": [str(rows)], "val_files": [str(rows)], "prompts_per_step": 2}
    tree["data"]["cache"] = {"directory": str(folder / "cache")}
    tree["reward"] = {"functions": [f"{ROOT}/examples/sort4/reward.py:compute_score"]}
    tree["generation"] |= {"max_response_tokens": 4}
    run = folder / "runs/run"
    tree["trainer"] = {"run_dir": str(run), "steps": 4, "eval_every": 4, "keep_last": 1, "best_metric": "reward/mean"}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", str(folder / "config.yaml")]) == 0
    (run / "trackers").mkdir()
    (run / "trackers/tensorboard.json").write_text('{"id": "0123456789abcdef", "step": 2}\n')
    (run / "summary.json").write_text('{"before": {"pass@1": 0.36}, "after": {"pass@1": 0.94}}\n')
    sound = folder / "runs/sound"
    sound.mkdir()
    (sound / ".lock").touch()
    (sound / "config.yaml").write_text("trainer: {steps: 3}\n")
    (sound / "ended").write_text("stopped\n")
    return folder


def test_aliases_that_stand_for_more_than_memory_holds_are_refused() -> None:
    with pytest.raises(yaml12.YAMLError, match="more than 1,000,000 values"):
        yaml12.read(WHOLE["aliases"].decode())
    with pytest.raises(yaml12.YAMLError, match="recursive node"):
        yaml12.read(WHOLE["in itself"].decode())


def ask_run(folder: Path) -> int:
    """What a program asks of a run directory."""
    run = Run(folder / "runs/run")
    assert repr(run) and bool(run.metrics.num_rows) == bool(run.final) == bool(run.best)
    assert run.model.parent.parent == run.best_model.parent.parent
    return 0


def load_model(folder: Path) -> int:
    config = ModelConfig(path=folder / "runs/run")
    stop_token_ids(config, load_tokenizer(config))
    load_policy(config)
    return 0


def read_saved(folder: Path) -> int:
    path = folder / "runs/run/trajectories/step_000004.parquet"
    staleness_of(path)
    return 0 if read_groups(path, 1) else 2


def write_card(folder: Path) -> int:
    run = folder / "runs/run"
    return 0 if model_card(run, checkpoint_of(run, "latest"), "ada/sort") else 2


def import_configuration(folder: Path) -> int:
    made = folder.parent / "imported.yaml"
    made.unlink(missing_ok=True)
    return main(["import", "verl", str(folder / "runs/run/config.yaml"), "--out", str(made)])


def begin(*overrides: str, branch: bool = False) -> Callable[[Path], int]:
    """What a run does before its first step, of the checkpoint that it starts from."""

    def read(folder: Path) -> int:
        given = [override.format(folder / "runs/run") for override in overrides]
        config = load_config(TrainConfig, folder / "config.yaml", given)
        if branch:
            found = fork_of(config)
            assert found is not None
            found.check_sound()
        else:
            assert find_start(config, resume=True) is not None
        return 0

    return read


def command(*words: str) -> Callable[[Path], int]:
    return lambda folder: main([word.format(folder) for word in words])


NEW = "trainer.run_dir={0}/new"
COMMANDS: dict[str, Callable[[Path], int]] = {
    "runs": command("runs", "{0}"),
    "report": command("report", "{0}/runs/run"),
    "Run": ask_run,
    "resume --dry-run": command("train", "--resume", "{0}/runs/run", "--dry-run"),
    "resume": begin(),
    "train model.path": command("train", "{0}/config.yaml", "model.path={0}/runs/run", NEW, "--dry-run"),
    "train branch_from": command("train", "{0}/config.yaml", "trainer.branch_from={0}/runs/run", NEW, "--dry-run"),
    "branch": begin("trainer.branch_from={0}", "trainer.run_dir={0}/../new", branch=True),
    "eval": command("eval", "{0}/runs/run", "generation.max_response_tokens=2"),
    "eval --against": command(
        "eval", "{0}/runs/run", "--against", "{0}/runs/run/validation/step_000004.parquet",
        "generation.max_response_tokens=2",
    ),
    "plan": command("plan", "{0}/runs/run"),
    "plan --calibrate": command("plan", "{0}/config.yaml", "--search", "--calibrate", "{0}/runs/run"),
    "data show": command("data", "show", "{0}/runs/run/config.yaml"),
    "simulate": command("simulate", "{0}/config.yaml", "--from", "{0}/runs/run"),
    "load": load_model,
    "trajectories": read_saved,
    "card": write_card,
    "import": import_configuration,
}  # fmt: skip
OF_RUN = ("config.yaml", "ended", ".lock", "metrics.jsonl", "checkpoints/latest", "state/run.json")
OF_MODEL = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
FILES: dict[str, tuple[str, ...]] = {
    "runs": (*OF_RUN, "environment.json"),
    "report": ("config.yaml", "metrics.jsonl", "environment.json", "summary.json", "trajectories/step_000004.parquet"),
    "Run": (*OF_RUN, "checkpoints/best"),
    "resume --dry-run": ("config.yaml", ".started.yaml", "metrics.jsonl", "checkpoints/latest", "../../rows.jsonl"),
    "resume": ("checkpoints/latest", "manifest.json", "state/run.json", "state/rl.json"),
    "train model.path": ("checkpoints/latest", *(f"model/{name}" for name in OF_MODEL)),
    "train branch_from": ("checkpoints/latest", "state/run.json"),
    "branch": ("checkpoints/latest", "manifest.json", "state/run.json", "model/config.json"),
    "eval": ("config.yaml", "checkpoints/latest", *(f"model/{name}" for name in OF_MODEL), "../../rows.jsonl"),
    "eval --against": ("validation/step_000004.parquet",),
    "plan": ("config.yaml", "model of config/config.json"),
    "plan --calibrate": ("config.yaml", "metrics.jsonl", "environment.json"),
    "data show": ("config.yaml", "../../rows.jsonl"),
    "simulate": ("config.yaml", "metrics.jsonl", "trajectories/step_000004.parquet"),
    "load": tuple(f"model/{name}" for name in OF_MODEL),
    "trajectories": ("trajectories/step_000004.parquet",),
    "card": ("config.yaml", "metrics.jsonl", "checkpoints/latest", "model/config.json"),
    "import": ("config.yaml",),
}
"""What each command reads, below the run; `model/`, `state/` and `manifest.json` are of its checkpoint."""
Damage = tuple[str, Callable[[], bytes]]
"""A name, and what is then in the file."""
CASES = [(name, file) for name, files in FILES.items() for file in files]


def place(folder: Path, file: str) -> Path:
    run = folder / "runs/run"
    if file.startswith(("model/", "state/", "manifest.json")):
        return run / "checkpoints/step_000004" / file
    return folder / "model" / file.partition("/")[2] if file.startswith("model of config/") else run / file


def damages(path: Path) -> Iterator[Damage]:
    content = path.read_bytes()
    yield "cut", lambda: content[: len(content) // 2]
    yield "cut at its end", lambda: content[:-3]
    yield "more", lambda: content + b"\n]}x: 1: 2"
    yield "bytes in the middle", lambda: content[: len(content) // 2] + b"\xff\0\xfe" + content[len(content) // 2 :]
    for name, other in WHOLE.items():
        yield name, partial(bytes, other)
    if path.suffix in (".json", ".yaml"):
        yield from of_values(content, path.suffix == ".json")
    elif path.suffix == ".jsonl":
        *lines, last = content.splitlines()
        for name, record in of_values(last, True):
            yield f"last line: {name}", lambda record=record: b"\n".join([*lines, record(), b""])
    elif path.suffix == ".parquet":
        yield from of_columns(path)


def of_values(content: bytes, is_json: bool) -> Iterator[Damage]:
    tree: dict[str, Any] = json.loads(content) if is_json else yaml12.read(content.decode())

    def written(changed: Mapping[str, Any]) -> Callable[[], bytes]:
        return lambda: (json.dumps(changed) if is_json else yaml12.write(changed)).encode()

    yield "a key too much", written({**tree, "more": {"a": 1}})
    for key in tree:
        yield f"without {key}", written({name: value for name, value in tree.items() if name != key})
        for name, value in VALUES.items():
            yield f"{key}: {name}", written({**tree, key: value})
        if isinstance(tree[key], dict) and not is_json:
            for inner in tree[key]:
                for name in ("number", "text", "list", "mapping", "NaN"):
                    yield f"{key}.{inner}: {name}", written({**tree, key: {**tree[key], inner: VALUES[name]}})


def of_columns(path: Path) -> Iterator[Damage]:
    table = pq.ParquetFile(path).read()

    def written(changed: Callable[[], pa.Table]) -> Callable[[], bytes]:
        def write() -> bytes:
            sink = pa.BufferOutputStream()
            pq.write_table(changed(), sink)
            return sink.getvalue().to_pybytes()

        return write

    yield "no rows", written(lambda: table.slice(0, 0))
    yield "a row", written(lambda: table.slice(0, 1))
    for place, name in enumerate(table.column_names):
        yield f"without {name}", written(partial(table.remove_column, place))
        for kind in ("x", 7, None, [1, 2]):
            yield f"{name}: {kind}", written(partial(table.set_column, place, name, pa.array([kind] * len(table))))


def of_all(folder: Path) -> dict[str, str]:
    """Every file, and what is in it."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "report.html")
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in paths}


@contextmanager
def replaced(path: Path, content: bytes | None) -> Iterator[None]:
    """Meanwhile the file holds that; None: it is a directory."""
    before = path.read_bytes()
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.rmdir() if content is None else path.unlink()
        path.write_bytes(before)


def wrong(name: str, folder: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with a command's answer."""
    before = of_all(folder)
    capsys.readouterr()
    try:
        status: Any = COMMANDS[name](folder)
        printed = capsys.readouterr()
        said = printed.err + printed.out
    except UserError as error:  # what a program is told
        status, said = 2, str(error)
    except Exception:  # noqa: BLE001 - whatever it is, it is a failure of the case
        return traceback.format_exc(limit=-4)
    if of_all(folder) != before:
        return f"it changed {dict(of_all(folder).items() ^ before.items())}"
    if status not in (0, 2):
        return f"exit status {status}: {said}"
    names = (path.name, str(path.parent), "step_000004", "data.train_files", f"--from {folder}/runs/run")
    if "Traceback" in said or "\x1b" in said or (status == 2 and not any(one in said for one in names)):
        return f"it said {said}"
    if name == "runs" and "runs/sound  stopped" not in said:
        return f"the other run is hidden: {said}"
    return None


def check(name: str, file: str, folder: Path, capsys: pytest.CaptureFixture[str], most: int) -> int:
    """How many damages of a file were tried before a command: a directory in its place, and so many others at most."""
    path, failures = place(folder, file), list[str]()
    others: list[tuple[str, Callable[[], bytes | None]]] = list(damages(path))
    random.Random(f"{name} {file}").shuffle(others)
    tried = [("a directory", lambda: None), *others[:most]]
    for damage, content in tried:
        with replaced(path, content()):
            problem = wrong(name, folder, path, capsys)
        failures += [f"{name}, {file}, {damage}: {problem}"] if problem else []
    assert not failures, f"{len(failures)} of {len(tried)}\n" + "\n".join(failures[:20])
    return len(tried)


@pytest.mark.parametrize(("name", "file"), CASES)
def test_some_damage_of_each_file_before_each_command(
    name: str, file: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(name, file, finished, capsys, 5) == 6


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "file"), CASES)
def test_every_damage_of_each_file_before_each_command(
    name: str, file: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(name, file, finished, capsys, 150) > 24


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize(("name", "file"), CASES)
def test_files_that_may_not_be_read(name: str, file: str, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place(finished, file)
    with replaced(path, b""):
        path.chmod(0)
        problem = wrong(name, finished, path, capsys)
        path.chmod(0o600)
    assert not problem, problem
