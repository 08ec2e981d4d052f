"""Every benchmark runs: with `--small`, as a program, in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.sandbox.build import make_sandbox
from tests.conftest import ROOT
from tests.unit.test_benchmark_help import PROGRAMS, SIDES

VLLM = ROOT / ".venv-vllm/bin/python"
DATA = ROOT.parent / "shared/data"
SEARCH = [DATA / f"multihop_search/hotpotqa_{file}" for file in ("corpus.jsonl.gz", "100.jsonl")]
SMOLLM2 = [ROOT / f"models/smollm2-135m-instruct/{file}" for file in ("config.json", "model.safetensors")]
ARGUMENTS = {
    "search_recall": [str(path) for path in SEARCH],
    "code_sandbox": ["--data", str(DATA)],
    "smollm2_lm_eval": [str(DATA)],
}
NEEDS: dict[str, list[Path]] = {
    "code_sandbox": [DATA / "humaneval", DATA / "mbpp"],
    "search_recall": SEARCH,
    "smollm2": SMOLLM2,
    "smollm2_lm_eval": [*SMOLLM2, ROOT / ".venv-lm-eval/bin/python", DATA / "hellaswag"],
    "vllm_throughput": [VLLM],
}


@pytest.mark.nightly
@pytest.mark.parametrize("program", [path.stem for path in PROGRAMS if path.stem not in SIDES])
def test_a_benchmark_runs(program: str) -> None:
    if missing := [path for path in NEEDS.get(program, []) if not path.exists()]:
        pytest.skip(f"needs {', '.join(map(str, missing))}")
    if program == "code_sandbox":
        try:
            make_sandbox()
        except UserError as error:
            pytest.skip(f"no sandbox on this machine: {error}")
    python = VLLM if program == "vllm_throughput" else sys.executable
    command = [str(python), f"benchmarks/{program}.py", "--small", *ARGUMENTS.get(program, [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-8000:]
    assert ended.stdout.strip()
