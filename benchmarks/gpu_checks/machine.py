"""What the machine is, how fast its parts are, and whether the tests marked `gpu` pass on it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers

from gpu_checks.figures import Bench, Machine, Skipped
from gpu_checks.measuring import GIB, copy_rate, device_of, matmul_rate, seconds

ROOT = Path(__file__).parents[2]
_PACKAGES = ("triton", "pydantic", "pyarrow", "typer", "peft", "flash_attn_interface", "flash_attn", "vllm", "trl")
_NEEDED = {"tests/contract/test_sglang.py": "sglang", "tests/megatron/test_gpu.py": "megatron"}
"""Test files that import more than the package itself needs."""


def describe(bench: Bench, commit: str) -> None:
    """The card, and the versions of what computes on it."""
    versions = f"transformers {transformers.__version__}, Triton {_version('triton')}, Python {sys.version.split()[0]}"
    day = datetime.now(UTC).date().isoformat()
    if bench.small:
        bench.send(Machine(day, commit, "a CPU, at sizes that say nothing", torch.__version__, versions))
        return
    if not torch.cuda.is_available():
        raise Skipped("no CUDA device")
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    bench.send(Machine(day, commit, torch.cuda.get_device_name(), torch.__version__, f"driver {driver}, {versions}"))


def environment(bench: Bench) -> None:
    """What is installed, and how much memory is free."""
    for name in _PACKAGES:
        bench.report(name, _version(name))
    if not bench.small:
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
        bench.report("multiprocessors", properties.multi_processor_count)
        bench.report("memory", total / GIB, "GiB")
        bench.report("memory that is free", free / GIB, "GiB")
        bench.report("other GPUs", torch.cuda.device_count() - 1)
    bench.report("CPU cores", len(os.sched_getaffinity(0)))


def _version(name: str) -> str:
    if find_spec(name) is None:
        return "not installed"
    try:
        return str(getattr(importlib.import_module(name), "__version__", "installed"))
    except Exception as error:  # noqa: BLE001 - whatever a package raises when it is imported is what is reported
        return f"does not import: {error}"[:80]


def ceilings(bench: Bench) -> None:
    """How fast the device copies, multiplies and launches."""
    device, launches = device_of(bench), 1000
    bench.report("copy, read and written", copy_rate(bench) / 1e9, "GB/s")
    bench.report("matrix product", matmul_rate(bench) / 1e12, "TFLOP/s")
    numbers = torch.zeros(1024, device=device)

    def launch() -> None:
        for _ in range(launches):
            numbers.add_(1)

    bench.report("a launch", seconds(device, launch, 5) / launches * 1e6, "us")
    if not bench.small:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        bench.report("a node of a CUDA graph", seconds(device, graph.replay, 10) / launches * 1e6, "us")


def gpu_tests(bench: Bench) -> None:
    """The tests marked `gpu` whose packages are installed; without a GPU, that they are collected."""
    if find_spec("pytest") is None:
        raise Skipped("needs pytest")
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    files = [str(path.relative_to(ROOT)) for path in marked]
    missing = {file: package for file, package in _NEEDED.items() if file in files and find_spec(package) is None}
    for file, package in missing.items():
        bench.report("not run", f"needs {package}", case=file)
    here = [file for file in files if file not in missing]
    options = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--quiet"]
    ended = subprocess.run([sys.executable, "-m", "pytest", *options, *here], cwd=ROOT, capture_output=True, text=True)
    print(ended.stdout, ended.stderr)
    counted = re.findall(r"(\d+) (passed|failed|skipped|errors?)", ended.stdout.strip().splitlines()[-1])
    for count, what in counted:
        bench.report(what, int(count), "tests")
    if ended.returncode:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.M)
        raise AssertionError(f"pytest ended with {ended.returncode}: {', '.join(failed)}")
