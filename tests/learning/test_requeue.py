"""A job that its scheduler stops saves, tells so by its exit status, and goes on elsewhere as if undisturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT
from tests.learning.test_resume_layouts import largest_difference
from tests.programs import TANDEM, Program

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

STEPS, HELD_AFTER = 6, 3
REWARD = """
import time
from pathlib import Path

scored = 0

def digits(completion):
    global scored
    scored += 1
    end = time.monotonic() + 300
    while scored > {answers} and Path(__file__).with_name("hold").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return sum(map(str.isdigit, completion)) / 8
"""
"""The run does not get beyond HELD_AFTER steps while there is a file `hold`."""


@pytest.fixture
def recipe(grpo_config: Path, sort4: Path) -> Path:
    """A configuration with relative paths, of the directory that it lies in."""
    directory = grpo_config.parent
    tree = yaml.safe_load(grpo_config.read_text())
    answers = tree["data"]["prompts_per_step"] * tree["algorithm"]["group_size"]
    (directory / "reward.py").write_text(REWARD.format(answers=HELD_AFTER * answers))
    tree["data"] |= {"train_files": [os.path.relpath(sort4 / "train.jsonl", directory)]}
    tree["reward"] = {"functions": ["reward.py:digits"], "workers": 1}
    tree["trainer"] = {"run_dir": "run", "steps": STEPS}
    grpo_config.write_text(yaml.safe_dump(tree))
    return grpo_config


def start(directory: Path, *arguments: str) -> Program:
    return Program(
        [TANDEM, "train", *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: Program) -> tuple[int, str]:
    """Exit status and output."""
    output = process.communicate(timeout=300)[0]
    return process.returncode, output


def wait_for_step(process: Program, run: Path, step: int) -> None:
    while len(read_metrics(run / "metrics.jsonl")) < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def descendants(process: int) -> Iterator[int]:
    """The process and all that it has started, and what these have."""
    yield process
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == process:
                yield from descendants(int(stat.parent.name))


def send_to_all(process: int, number: signal.Signals, times: int = 1) -> int:
    """As a scheduler does that signals all processes of a job; how many there were."""
    everything = [*descendants(process)]
    for one in everything * times:
        with suppress(ProcessLookupError):
            os.kill(one, number)
    return len(everything)


def assert_same_run(run: Path, undisturbed: Path) -> float:
    """The largest relative difference of any metric."""
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [*range(1, STEPS + 1)]
    worst, where = largest_difference(run, undisturbed, range(1, STEPS + 1))
    assert worst < 1e-4, where
    return worst


@pytest.mark.parametrize("cluster", ["local", pytest.param("ray", marks=pytest.mark.nightly)])
def test_a_requeued_job_goes_on_elsewhere(
    cluster: str,
    recipe: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SIGTERM to all processes of two ranks, twice; resumed on one rank, with another time-out and address, from
    another working directory."""
    here, elsewhere = recipe.parent, tmp_path_factory.mktemp("elsewhere")
    status, output = ended(start(here, recipe.name, "trainer.run_dir=undisturbed"))
    assert status == 0, output
    (here / "hold").touch()
    job = start(here, recipe.name, f"cluster.type={cluster}", "cluster.ranks=2", "--resume", "run")
    wait_for_step(job, here / "run", HELD_AFTER)
    if cluster == "local":
        assert send_to_all(job.pid, signal.SIGTERM, times=2) >= 5  # controller, fork server, ranks, reward worker
    else:  # Ray's own daemons end at SIGTERM, so it is for the controller and for what runs our code
        for one in descendants(job.pid):
            if one == job.pid or b"rank" in Path(f"/proc/{one}/cmdline").read_bytes():
                os.kill(one, signal.SIGTERM)
    (here / "hold").unlink()
    status, output = ended(job)
    assert status == 143, output
    assert "SIGTERM: stopping after this step" in output and "stopped; continue with --resume" in output
    done = len(read_metrics(here / "run/metrics.jsonl"))
    assert HELD_AFTER <= done < STEPS
    assert (here / "run/checkpoints/latest").read_text().strip() == f"step_{done:06d}"
    assert (here / "run/report.html").exists()

    changed = ["cluster.ranks=1", "cluster.timeout_s=600"]
    if cluster == "ray":
        nodes: Cluster = request.getfixturevalue("ray_nodes")
        changed.append(f"cluster.address={nodes.address}")
    status, output = ended(start(elsewhere, "--resume", str(here / "run"), *changed))
    assert status == 0, output
    assert f"resuming after step {done}" in output
    assert "last start: cluster.ranks: 2 -> 1" in output and "last start: cluster.timeout_s: 1800.0 -> 600" in output
    assert ("last start: cluster.address: null ->" in output) == (cluster == "ray")
    worst = assert_same_run(here / "run", here / "undisturbed")
    with capsys.disabled():
        moved = "2 ranks -> 1, other address and time-out"
        print(f"\nrequeue, {cluster}: {moved}: {STEPS} steps, largest relative difference {worst:.1e}")


@pytest.mark.nightly
def test_the_script_of_the_page(recipe: Path) -> None:
    """docs/runs.md's job script, where `scontrol` writes down what it is asked."""
    here = recipe.parent
    script = next(block for block in (ROOT / "docs/runs.md").read_text().split("```sh\n") if "#SBATCH" in block)
    script = script.partition("```")[0].replace("CONFIG.yaml", f"{recipe.name} trainer.steps=1000")
    (here / "job.sh").write_text(script.replace("RUN", "run"))
    (here / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {here}/asked\n")
    (here / "scontrol").chmod(0o755)
    environment = {"PATH": f"{here}:{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    for start in range(2):
        before = len(read_metrics(here / "run/metrics.jsonl"))
        job = subprocess.Popen(["bash", "job.sh"], cwd=here, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
        while len(read_metrics(here / "run/metrics.jsonl")) < before + 2:
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=120) == 0
        assert (here / "asked").read_text() == "requeue 17\n" * (start + 1)


def test_ctrl_c_stops_after_the_step_in_hand_and_twice_at_once(recipe: Path) -> None:
    here = recipe.parent
    job = start(here, recipe.name, "trainer.steps=1000")
    wait_for_step(job, here / "run", 2)
    job.send_signal(signal.SIGINT)
    status, output = ended(job)
    assert status == 130, output
    assert "stopped; continue with --resume" in output
    done = len(read_metrics(here / "run/metrics.jsonl"))
    assert (here / "run/checkpoints/latest").read_text().strip() == f"step_{done:06d}"

    (here / "reward.py").write_text("import time\ndef digits(completion):\n    time.sleep(20)\n    return 1.0\n")
    job = start(here, recipe.name, "--resume", "run", "trainer.steps=1000")
    while "Ctrl-C again" not in (line := job.stdout.readline()):  # type: ignore[union-attr]
        if "resuming after step" in line:
            time.sleep(1)
            job.send_signal(signal.SIGINT)
    job.send_signal(signal.SIGINT)
    status, output = ended(job)
    assert status == 130 and "stopped at once, without a checkpoint" in output
    assert (here / "run/ended").read_text() == "stopped\nCtrl-C twice\n"
    assert len(read_metrics(here / "run/metrics.jsonl")) == done


def test_a_run_that_still_runs_is_not_resumed_beside_itself(recipe: Path) -> None:
    here = recipe.parent
    job = start(here, recipe.name, "trainer.steps=1000")
    wait_for_step(job, here / "run", 1)
    status, output = ended(start(here, "--resume", "run"))
    assert status == 2 and f"process {job.pid} on" in output and "is running this run" in output, output
    job.kill()
    ended(job)
    status, output = ended(start(here, "--resume", "run", "trainer.steps=2"))
    assert status == 0, output
