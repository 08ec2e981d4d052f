"""Kills a process while a checkpoint is written behind the back of the steps that follow. Prints what it left.

    python kill_while_written.py DIRECTORY KILLS SEED

The child trains two ranks of a model, so to speak: each step sets every number to its own, and is saved by the same
store and threads as in a run, with files that are written slowly. It goes on with a run that was killed, or begins one.
A program of its own: it forks after the expensive imports, which only a process without threads may do.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.numpy import load_file
from safetensors.torch import save as serialized

import tandem.models.storage
from tandem.checkpoint.store import CheckpointStore
from tandem.models.storage import TensorFile
from tandem.training.copies import HostCopies
from tandem.workers.saving import BackgroundWrite

RANKS, NAMES, SIZE, PARTS, PART_S, STEPS_BETWEEN = 2, ("weights", "moments"), 5_000, 10, 0.001, 5


def write_slowly(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    whole = serialized(tensors, metadata=metadata)
    with path.open("wb", buffering=0) as file:
        for part in range(PARTS):
            file.write(whole[len(whole) * part // PARTS : len(whole) * (part + 1) // PARTS])
            time.sleep(PART_S)


def train(run: Path, told: int) -> None:
    """Never returns. Writes a byte for each save that has begun."""
    torch.set_num_threads(1)
    tandem.models.storage.save_file = write_slowly
    os.fsync = lambda _: None  # the kernel outlives the process: nothing need reach the disk
    run.mkdir(exist_ok=True)
    store = CheckpointStore(run, 2)
    latest = store.latest()
    step = 0 if latest is None else int(latest.name[5:])
    ranks = [({name: torch.zeros(SIZE) for name in NAMES}, HostCopies()) for _ in range(RANKS)]
    while True:
        step += 1
        for state, _ in ranks:
            for tensor in state.values():
                tensor.fill_(step)
        store.check()
        if step % STEPS_BETWEEN == 0:
            save(store, step, ranks)
            os.write(told, b".")
        time.sleep(0.001)


def save(store: CheckpointStore, step: int, ranks: list[tuple[dict[str, torch.Tensor], HostCopies]]) -> None:
    with store.write(step, None if step % 2 else step) as draft:
        for rank, (state, copies) in enumerate(ranks):
            copied = {name: copies.copy(name, tensor) for name, tensor in state.items()}
            files = [TensorFile(draft.directory / f"{name}_{rank}.safetensors", {name: copied[name]}) for name in NAMES]
            write = BackgroundWrite(files, draft.directory, rank)
            draft.seals.append(write.seals)
            draft.checks.append(write.check)


def killed(run: Path, saves: int, delay_s: float) -> None:
    """A child that is killed so long after so many saves have begun."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(run, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    for _ in range(saves):
        assert select.select([ours], [], [], 60)[0] and os.read(ours, 1), "it ended by itself"
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    os.close(ours)


def check(run: Path) -> tuple[int, bool]:
    """The step of the latest checkpoint, which verifies, and whether the kill came while one was written."""
    cut_short = any(path.name.startswith(".step") for path in (run / "checkpoints").iterdir())
    latest = CheckpointStore(run, 2).latest()
    assert latest is not None, "a second save begins when the first is complete"
    step, files = int(latest.name[5:]), sorted(latest.glob("*.safetensors"))
    assert len(files) == RANKS * len(NAMES)
    for file in files:
        for tensor in load_file(file).values():
            assert (tensor == step).all(), f"{file} is of {sorted({*tensor.tolist()})}"
    return step, cut_short


def main(directory: Path, kills: int, seed: int) -> None:
    rng, before, cut = random.Random(seed), 0, 0
    for kill in range(kills):
        before = 0 if kill % 5 == 0 else before
        run = directory / f"run_{kill // 5}"
        killed(run, rng.randint(2, 3), rng.uniform(0, 0.05))
        step, cut_short = check(run)
        assert step > before, f"kill {kill}: back to step {step}, where {before} was complete"
        before, cut = step, cut + cut_short
    print(f"{kills} kills, {cut} of them while a checkpoint was written: always a verified one")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
