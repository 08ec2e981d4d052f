"""The contract suite of TrainEngine on two ranks at once, which test_contract.py runs by scripts.py in .venv-megatron.

Each rank runs the same tests in the same order, in one layout after another. Leaves DIRECTORY/<layout>.<rank>.txt.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.megatron import engines

SUITE = Path(__file__).parents[1] / "contract" / "test_training.py"
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "cp2": {"context_parallel": 2},
}


class SharedDirectories:
    """Gives a test the same directory on every rank."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Path:
        path = self._directory / re.sub(r"\W+", "-", request.node.name)
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        return path


def world(rank: int, directory: Path, names: Sequence[str], kinds: str) -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    rendezvous = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", rendezvous, timedelta(minutes=20), world_size=2, rank=rank)
    failed = False
    for name in names:
        engines.layout.clear()
        engines.layout.update(LAYOUTS[name])
        with (directory / f"{name}.{rank}.txt").open("w") as told, contextlib.redirect_stdout(told):
            options = ["-p", "no:cacheprovider", "--assert=plain", "-q", "-k", f"megatron and ({kinds})", str(SUITE)]
            failed |= pytest.main(options, plugins=[SharedDirectories(directory / name)]) != pytest.ExitCode.OK
        parallel_state.destroy_model_parallel()
    dist.barrier()
    sys.exit(failed)


def main(directory: str, names: Sequence[str], kinds: str) -> None:
    """`names`: those of the layouts. `kinds`: an expression of pytest, which engines are tested."""
    for hidden in (16, 32):
        for critic in (False, True):
            engines.model_directory(hidden, critic)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=world, args=(rank, Path(directory), names, kinds)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
