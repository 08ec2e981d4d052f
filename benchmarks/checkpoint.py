"""A checkpoint's pause: state copied and written behind the next steps, against written, hashed and flushed at once.

    python benchmarks/checkpoint.py [--gib 1] [--rounds 5] [--directory DIRECTORY]

A model and its optimizer on one rank, in float32: weights, masters and two moments are what a checkpoint holds. Both
ways write the same files with the same hashes into the same file system, in turn; medians. `at once` is how checkpoints
were written before. `behind` is the store and the threads of a run; the time until its checkpoint is complete is
measured with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from command_line import parse_arguments
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.checkpoint.draft import Draft
from tandem.checkpoint.store import CheckpointStore, damage
from tandem.config.training import FsdpTrainingConfig
from tandem.files import sync_tree, write_text
from tandem.training.fsdp import FsdpEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.workers.saving import BackgroundWrite

COPIES = 4
"""Of each weight: the model directory, its master, two moments."""


def engine_of(gib: float) -> FsdpEngine:
    hidden = 512
    per_layer = 4 * hidden * hidden + 3 * hidden * 4 * hidden
    layers = max(1, round(gib * 2**30 / 4 / COPIES / per_layer))
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    return FsdpEngine(Qwen2ForCausalLM(config), FsdpTrainingConfig(), AdamWConfig())


def folders(directory: Path) -> None:
    for part in ("model", "state"):
        (directory / part).mkdir(parents=True)


def at_once(engine: FsdpEngine, target: Path) -> float:
    """Seconds of the pause in which everything is written. Copying, which it did not need, is not counted."""
    folders(target)
    files = engine.save(target)
    start = time.perf_counter()
    for file in files:
        file.write()
    sealed = Draft(target).complete()
    write_text(target / "manifest.json", json.dumps({"step": 0, "files": sealed}))
    sync_tree(target)
    return time.perf_counter() - start


def behind(engine: FsdpEngine, store: CheckpointStore, step: int) -> tuple[float, float]:
    """Seconds of the pause, and until the checkpoint is complete."""
    start = time.perf_counter()
    with store.write(step) as draft:
        folders(draft.directory)
        write = BackgroundWrite(engine.save(draft.directory), draft.directory, 0)
        draft.seals.append(write.seals)
        draft.checks.append(write.check)
    pause = time.perf_counter() - start
    store.finish()
    return pause, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    arguments = parse_arguments(parser, gib=0.01, rounds=1)
    engine = engine_of(arguments.gib)
    before, pauses, complete = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        (Path(folder) / "run").mkdir()
        store = CheckpointStore(Path(folder) / "run", keep_last=1)
        first, _ = behind(engine, store, 1)  # takes the memory for the copies
        for step in range(2, 2 + arguments.rounds):
            before.append(at_once(engine, Path(folder) / "at_once"))
            shutil.rmtree(Path(folder) / "at_once")
            pause, whole = behind(engine, store, step)
            pauses.append(pause)
            complete.append(whole)
        latest = store.latest()
        assert latest is not None and damage(latest) is None
        size = sum(path.stat().st_size for path in latest.rglob("*") if path.is_file())
    old, new = statistics.median(before), statistics.median(pauses)
    print(f"{size / 2**30:.2f} GiB in {torch.get_num_threads()} threads, medians of {arguments.rounds} rounds in turn")
    print(f"pause, written at once       {old:7.3f} s")
    print(f"pause, written behind        {new:7.3f} s   {old / new:.1f}x shorter; the first one {first:.3f} s")
    print(f"behind: until it is complete {statistics.median(complete):7.3f} s")


if __name__ == "__main__":
    main()
