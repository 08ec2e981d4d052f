"""A step on 512 rows with a picture of 512 x 512 pixels each, against rows of text with as many tokens.

Run: python benchmarks/pictures.py [--rows N] [--side PIXELS] [--rounds N] [--workdir DIR]

The tiny Qwen2.5-VL of examples/tiles, untrained, GRPO with two samples a prompt, one CPU thread, float32. Both kinds of
rows are runs of two steps with all their ordinary outputs, in processes of their own, in turn; the figures are those of
the second step (the first one has other rows), and the reading of the rows is apart. What the controller sends to
the worker and gets back is pickled, as between processes, and counted. `pixels` is what the same pictures would be as
float32 patches, which is what an image processor makes of them.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from command_line import parse_arguments

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SIDE_OF_A_TOKEN, SAMPLES = 28, 2
KINDS = {"pictures": [], "pictures_frozen": ["model.vision_tower=frozen"], "text": []}
"""Kinds of rows, and what their runs say besides."""
REWARD = "def lower(completion):\n    return sum(map(str.islower, completion)) / 8\n"


def tokens_of(side: int) -> int:
    return (side // SIDE_OF_A_TOKEN) ** 2


def make(directory: Path, rows: int, side: int) -> None:
    """The model, and rows of both kinds: a picture and a letter, or as many letters."""
    from examples.tiles.task import make as make_tiles
    from examples.tiles.task import write_rows

    make_tiles(directory / "tiles")
    (directory / "reward.py").write_text(REWARD)
    (directory / "shown").mkdir()
    write_rows(directory / "pictures.jsonl", _picture_rows(directory, rows, side))
    drawn, letters = np.random.default_rng(1), list(string.ascii_lowercase)
    length = tokens_of(side) + 3  # with what stands before and after a picture, and the letter
    texts = ("".join(drawn.choice(letters, length)) for _ in range(rows))
    write_rows(directory / "text.jsonl", ({"prompt": [{"role": "user", "content": text}]} for text in texts))


def _picture_rows(directory: Path, rows: int, side: int) -> Iterator[dict[str, Any]]:
    from PIL import Image

    drawn = np.random.default_rng(0)
    for number in range(rows):
        coarse = Image.fromarray(drawn.integers(0, 256, (16, 16, 3), np.uint8))
        name = f"shown/{number}.png"
        coarse.resize((side, side), Image.Resampling.NEAREST).save(directory / name)
        yield {"prompt": [{"role": "user", "content": "<image>?"}], "images": [name]}


def overrides_of(directory: Path, kind: str, rows: int, side: int) -> list[str]:
    """What a run of two steps changes of the recipe, but for its directory."""
    return [
        f"model.path={directory}/tiles/model", f"data.train_files=[{directory}/{kind.partition('_')[0]}.jsonl]",
        "data.val_files=[]", f"data.prompts_per_step={rows // 2}", f"data.max_prompt_tokens={tokens_of(side) + 64}",
        f"data.images.max_pixels={side * side}", f"data.images.directory={directory}/store",
        f"algorithm.group_size={SAMPLES}", f"reward.functions=['{directory}/reward.py:lower']",
        "trainer.steps=2", "trainer.eval_every=0", *KINDS[kind],
    ]  # fmt: skip


def run(directory: Path, kind: str, rows: int, side: int) -> dict[str, float]:
    """Two steps on `rows` rows of a kind."""
    import torch

    from tandem.cluster.inline import InlineCluster
    from tandem.config.load import load_config
    from tandem.config.tree import TrainConfig
    from tandem.controller.placement import Placement, pools_of
    from tandem.data.dataset import RLHFDataset
    from tandem.jobs.inputs import read_inputs
    from tandem.jobs.rl import RlJob
    from tandem.jobs.run import claim_run_dir, run_job
    from tandem.reward.manager import RewardManager
    from tandem.tracking.jsonl import read_metrics

    class CountingCluster(InlineCluster):
        """Pickles what goes to the worker and what comes back, as between processes."""

        carried = 0

        def submit(self, name: str, method: str, calls: Any) -> Any:
            self.carry(calls)
            answer = super().submit(name, method, calls)
            self.carry(answer.get())
            return answer

        def carry(self, value: Any) -> None:
            self.carried += len(pickle.dumps(value))

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as run_dir:
        overrides = [*overrides_of(directory, kind, rows, side), f"trainer.run_dir={run_dir}"]
        config = load_config(TrainConfig, ROOT / "recipes/tiles_grpo.yaml", overrides)
        start = time.process_time()
        inputs = read_inputs(config, RLHFDataset)
        reading = time.process_time() - start
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cluster = CountingCluster()
        marks: list[tuple[float, int]] = []
        with claim_run_dir(config), closing(RewardManager(config.reward, config.trainer.seed)) as reward:
            job = RlJob(config, inputs, Placement(cluster, pools_of(config)), reward)
            step = job.step

            def measured_step(number: int) -> dict[str, float]:
                begin = time.process_time(), cluster.carried
                metrics = step(number)
                marks.append((time.process_time() - begin[0], cluster.carried - begin[1]))
                return metrics

            job.step = measured_step
            run_job(config, lambda _: job)
        records = read_metrics(Path(run_dir) / "metrics.jsonl")
    cpu_s, carried = marks[-1]
    return {
        "step_cpu_s": cpu_s,
        "bytes_a_row": carried / (rows // 2),
        "reading_cpu_ms_a_row": 1e3 * reading / rows,
        "prompt_tokens": records[-1]["prompt_length/mean"],
        "mib_above_reading": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def in_own_process(directory: Path, kind: str, arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", kind, "--workdir", str(directory)]
    command += ["--rows", str(arguments.rows), "--side", str(arguments.side)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} failed\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="of a step")
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workdir", type=Path, help="keeps the rows; default: a temporary directory")
    parser.add_argument("--run", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parse_arguments(parser, rows=8, side=56, rounds=1)
    if arguments.run:
        print(json.dumps(run(arguments.workdir, arguments.run, 2 * arguments.rows, arguments.side)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = (arguments.workdir or Path(temporary)).resolve()
        if not (directory / "text.jsonl").exists():
            directory.mkdir(parents=True, exist_ok=True)
            make(directory, 2 * arguments.rows, arguments.side)
        rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for number in range(arguments.rounds):
            for kind in sorted(KINDS, reverse=bool(number % 2)):
                rounds[kind].append(in_own_process(directory, kind, arguments))
                print(kind, {name: round(value, 2) for name, value in rounds[kind][-1].items()}, flush=True)
    medians = {kind: {name: median(one[name] for one in found) for name in found[0]} for kind, found in rounds.items()}
    ratios = {
        kind: median(
            one["step_cpu_s"] / text["step_cpu_s"] for one, text in zip(rounds[kind], rounds["text"], strict=True)
        )
        for kind in ("pictures", "pictures_frozen")
    }
    pixels = tokens_of(arguments.side) * SIDE_OF_A_TOKEN**2 * 3 * 2 * 4  # a picture is doubled in time
    figures = {f"{kind}_{name}": round(value, 2) for kind, of in medians.items() for name, value in of.items()}
    print(
        json.dumps(
            {
                "benchmark": "pictures",
                "figures": {**figures, "pixels_bytes_a_row": pixels},
                "baseline": {"name": "rows of text with as many tokens", "step_cpu_s": medians["text"]["step_cpu_s"]},
                "ratio": {kind: round(ratio, 2) for kind, ratio in ratios.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
