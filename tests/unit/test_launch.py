"""The files in launch/: what they start is a command that Tandem takes, and what they name is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tests.conftest import ROOT

LAUNCH = ROOT / "launch"


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm and Ray write down how they are called: one argument a line in `called`."""
    programs = {
        "scontrol": 'printf "localhost\\nlocalhost\\n"',
        "srun": 'exec "$@"',
        "ray": f'printf "%s\\n" "$RAY_AUTH_MODE" "${{#RAY_AUTH_TOKEN}}" "$@" > {tmp_path}/called',
    }
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_AUTH_TOKEN": ""}


def _trained(command: list[str], config: Path) -> TrainConfig:
    """The configuration that `tandem train …` reads."""
    assert command[:2] == ["tandem", "train"] and command[2] == str(config)
    return load_config(TrainConfig, config, command[3:])


def test_slurm(stand_ins: dict[str, str], grpo_config: Path, tmp_path: Path) -> None:
    given = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    command = [str(LAUNCH / "slurm.sh"), str(grpo_config), "trainer.seed=7"]
    subprocess.run(command, env=stand_ins | given, check=True)
    called = (tmp_path / "called").read_text().splitlines()
    assert called[:2] == ["token", "64"]
    assert called[2:8] == ["symmetric-run", "--address", "127.0.0.1:6379", "--min-nodes", "2", "--"]
    config = _trained(called[8:], grpo_config)
    assert config.cluster.type == "ray" and config.cluster.address == "127.0.0.1:6379"
    assert config.placement.pools == {"main": [4, 4]} and config.trainer.resume and config.trainer.seed == 7
    bare = subprocess.run(command[:1], env=stand_ins | given, capture_output=True, text=True, check=False)
    assert bare.returncode == 2 and "usage: sbatch" in bare.stderr


def test_skypilot(stand_ins: dict[str, str], grpo_config: Path, tmp_path: Path) -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert (ROOT / task["envs"]["CONFIG"]).exists()
    given = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_TASK_ID": "sky-1", "CONFIG": str(grpo_config), "CHECKPOINTS": "s3://bucket/run",
    }  # fmt: skip
    subprocess.run(["bash", "-c", task["run"]], env=stand_ins | given, check=True)
    called = (tmp_path / "called").read_text().splitlines()
    assert called[:5] == ["token", "64", "symmetric-run", "--address", "10.0.0.1:6379"]
    config = _trained(called[called.index("--") + 1 :], grpo_config)
    assert config.placement.pools == {"main": [8, 8]} and config.trainer.checkpoint_url == "s3://bucket/run"
    extras = re.findall(r"\.\[([\w,]+)\]", task["setup"])[0].split(",")
    assert set(extras) <= set(_project()["optional-dependencies"])


def test_kuberay(grpo_config: Path) -> None:
    """Its schema is the operator's; here: that its parts fit each other and the command."""
    spec = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]
    command = shlex.split(spec["entrypoint"])
    assert command[2] == "/config/CONFIG.yaml"
    assert _trained([*command[:2], str(grpo_config), *command[3:]], grpo_config).trainer.resume
    cluster = spec["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    for group in (cluster["headGroupSpec"], workers):
        pod: dict[str, Any] = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    (pinned,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert cluster["rayVersion"] == pinned


def test_the_image() -> None:
    lines = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    arguments = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if line.startswith("ARG "))
    assert arguments["TORCH"] in (ROOT / "constraints.txt").read_text().splitlines()
    assert set(arguments["EXTRAS"].split(",")) <= set(_project()["optional-dependencies"])
    for line in lines:
        if line.startswith("COPY "):
            assert all((ROOT / source).exists() for source in line.split()[1:-1])


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
