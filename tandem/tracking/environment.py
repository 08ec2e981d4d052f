"""environment.json: what a run ran on and with."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import tandem
from tandem.files import write_text


def write_environment(run_dir: Path, seed: int) -> None:
    """Write `environment.json` into `run_dir`."""
    write_text(run_dir / "environment.json", json.dumps(describe_environment(seed), indent=1) + "\n")


def describe_environment(seed: int) -> dict[str, Any]:
    """Git revision, packages, hardware, seed and command line; what cannot be found out is None."""
    return {
        "git_revision": _git_revision(Path(tandem.__file__).parent),
        "command": sys.argv,
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": _gpus(),
        "packages": dict(sorted((found.metadata["Name"], found.version) for found in distributions())),
    }


def _git_revision(package: Path) -> str | None:
    """The commit of the checkout that `package` is part of, with `+changes` if it differs from that commit."""
    if _output("git", "-C", str(package), "ls-files", "__init__.py") != "__init__.py":
        return None  # installed, perhaps inside somebody else's checkout
    changed = _output("git", "-C", str(package), "status", "--porcelain", "--untracked-files=no", ".")
    return f"{_output('git', '-C', str(package), 'rev-parse', 'HEAD')}{'+changes' if changed else ''}"


def _cpu_model() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or None


def _gpus() -> list[str]:
    """`name, memory, driver` of each NVIDIA GPU."""
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def _output(*command: str) -> str | None:
    """What `command` prints; None if it is not installed, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
