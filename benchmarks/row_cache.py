"""The start of a run on many rows: tokenised and kept in memory; tokenised into the cache (cold); from there (warm).

Rows are short (about 40 tokens) and made here, with columns as verl has them. Each case is a process of its own, whose
seconds are those of making the data set, without imports. `anonymous_mib`: memory of its own that the process has
gained by then, and again after it has read rows of the whole file; `file_mib`: pages of libraries and of the mapped
file, which the system takes back when it needs them. `cold_over_warm` and `memory_over_warm` are ratios of seconds.

    .venv/bin/python benchmarks/row_cache.py --rows 1000000 --format parquet
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from command_line import parse_arguments

CASES = {"memory": "null", "cold": "cache", "warm": "cache"}
_BATCH = 50_000
_READ = 100_000
"""So many rows are read, from the first to the last of the file."""


def rows(count: int) -> Iterator[dict[str, Any]]:
    drawn = random.Random(0)
    for number in range(count):
        one, other = drawn.randrange(10**6), drawn.randrange(10**6)
        yield {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {one} + {other}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(one + other)},
            "extra_info": {"index": number, "split": "train"},
        }


def write(path: Path, count: int) -> None:
    made = rows(count)
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in made)
        return
    batch = [next(made) for _ in range(min(_BATCH, count))]
    schema = pa.Table.from_pylist(batch).schema
    with pq.ParquetWriter(path, schema) as writer:
        while batch:
            writer.write_table(pa.Table.from_pylist(batch, schema))
            batch = list(islice(made, _BATCH))


def write_tokenizer(directory: Path) -> None:
    """Bytes, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate(["<eos>", *characters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(directory)


def measure(path: Path, tokenizer_directory: Path, cache: Path | None, workers: int | None) -> dict[str, float]:
    from transformers import AutoTokenizer

    from tandem.config.data import DataConfig
    from tandem.data.dataset import RLHFDataset
    from tandem.data.sampler import Sampler

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.encode("warm")
    config = DataConfig.model_validate(
        {"cache": {"directory": cache, "files_from_mib": 0 if cache else None, "workers": workers}}
    )
    before, start = memory_mib()["RssAnon"], time.perf_counter()
    dataset = RLHFDataset([path], tokenizer, config)
    kinds = len(dataset.kinds)
    Sampler(len(dataset), 128, shuffle=True, seed=0).row(0)
    found = {"seconds": round(time.perf_counter() - start, 2), "rows": len(dataset), "kinds": kinds}
    after = memory_mib()
    found |= {"anonymous_mib": after["RssAnon"] - before, "file_mib": after["RssFile"]}
    start = time.perf_counter()
    read = range(0, len(dataset), max(1, len(dataset) // _READ))
    tokens = sum(len(dataset[row].token_ids) for row in read)
    found |= {"reading_us": round((time.perf_counter() - start) / len(read) * 1e6), "tokens_a_row": tokens // len(read)}
    after = memory_mib()
    return found | {"anonymous_mib_after": after["RssAnon"] - before, "file_mib_after": after["RssFile"]}


def memory_mib() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if line.startswith("Rss")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--format", choices=["parquet", "jsonl"], default="parquet")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--tokenizer", type=Path, help="A model directory; default: bytes.")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parse_arguments(parser, rows=1000)
    if args.one:
        path, tokenizer, cache = args.one
        print(json.dumps(measure(Path(path), Path(tokenizer), None if cache == "null" else Path(cache), args.workers)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / f"rows.{args.format}"
        write(path, args.rows)
        tokenizer = args.tokenizer or folder / "tokenizer"
        if args.tokenizer is None:
            write_tokenizer(tokenizer)
        print(f"{path.name}: {path.stat().st_size / 2**20:,.0f} MiB", flush=True)
        seconds: dict[str, float] = {}
        for case in args.cases:
            cache = "null" if CASES[case] == "null" else str(folder / "cache")
            command = [sys.executable, __file__, "--one", str(path), str(tokenizer), cache]
            command += ["--workers", str(args.workers)] if args.workers else []
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            seconds[case] = found["seconds"]
            print(json.dumps({"case": case, **found}), flush=True)
        for case in ("cold", "memory"):
            if case in seconds and "warm" in seconds:
                print(json.dumps({f"{case}_over_warm": round(seconds[case] / seconds["warm"], 1)}), flush=True)


if __name__ == "__main__":
    main()
