"""SmolLM2-135M-Instruct in lm-evaluation-harness: through `tandem serve`, and by transformers directly.

    python benchmarks/smollm2_lm_eval.py DATA [--tasks hellaswag aqua_rat gsm8k humaneval] [--limit 100] [--out DIR]

First scripts/smollm2 and scripts/lm-eval-env. DATA holds the published files: hellaswag/*.jsonl.gz,
aqua_rat/test.jsonl, gsm8k/{train.jsonl.gz,test.jsonl}, humaneval/HumanEval.jsonl.gz. Each task asks as the harness's
own does (aqua_rat as AGIEval's), over the first rows of these files; of gsm8k the answer is what stands after `####`,
of humaneval the texts are compared, for the harness runs no code here. Prints for each metric what was found both ways,
with the standard error over rows, and in how many rows the two differ: in log-likelihoods by more than 1e-3, in a text
at all.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from command_line import parse_arguments

ROOT = Path(__file__).parents[1]
HARNESS = ROOT / ".venv-lm-eval/bin/python"
MODEL = ROOT / "models/smollm2-135m-instruct"
PORT = 8127
SHOTS = 5
TASKS = ("hellaswag", "aqua_rat", "gsm8k", "humaneval")
RUN = """
import functools, sys
import lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
sys.argv[0] = "lm_eval"
cli_evaluate()
"""
"""The harness's command, without a look at its own thousands of tasks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("build/lm_eval"))
    arguments = parse_arguments(parser, limit=2)
    out: Path = arguments.out.resolve()
    (out / "tasks").mkdir(parents=True, exist_ok=True)
    for name in arguments.tasks:
        write_task(name, arguments.data, out / "tasks", arguments.limit)
    common = ["--tasks", ",".join(arguments.tasks), "--include_path", str(out / "tasks"), "--log_samples"]
    direct = ["--model", "hf", "--model_args", f"pretrained={MODEL},dtype=float32"]
    direct += ["--batch_size", "1", "--device", "cpu"]
    through = [
        "--model", "local-completions", "--batch_size", "8", "--model_args",
        f"model=smollm2,tokenizer={MODEL},base_url=http://127.0.0.1:{PORT}/v1/completions,max_length=2048",
    ]  # fmt: skip
    seconds = {"direct": harness([*direct, *common, "--output_path", str(out / "direct")])}
    server = serve()
    try:
        seconds["served"] = harness([*through, *common, "--output_path", str(out / "served")])
    finally:
        server.terminate()
        server.wait()
    print(f"direct {seconds['direct']:.0f} s, served {seconds['served']:.0f} s")
    print("| task | rows | metric | served | direct | rows that differ |\n| --- | --- | --- | --- | --- | --- |")
    for name in arguments.tasks:
        report(name, samples(out / "served", name), samples(out / "direct", name))


def serve() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tandem", "serve", str(MODEL), "--name", "smollm2", "--port", str(PORT)]
    server = subprocess.Popen(
        command, env={**os.environ, "TANDEM_API_KEY": "benchmark", "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    while line := server.stdout.readline():
        if b"http://" in line:
            return server
    raise SystemExit("tandem serve ended before it served")


def harness(arguments: list[str]) -> float:
    """Seconds that one command of it took."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "benchmark"}
    start = time.monotonic()
    subprocess.run([HARNESS, "-c", RUN, *arguments], env={**os.environ, **offline}, check=True)
    return time.monotonic() - start


def write_task(name: str, data: Path, folder: Path, limit: int) -> None:
    """Rows and description of a task, as the harness reads them."""
    rows = folder / f"{name}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in list(ROWS[name](data))[:limit]))
    description: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    if name in ("hellaswag", "aqua_rat"):
        description |= {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    else:
        until = (
            ["Question:", "</s>", "<|im_end|>"] if name == "gsm8k" else ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
        )
        description |= {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": until, "max_gen_toks": 256, "do_sample": False, "temperature": 0.0},
            "metric_list": [
                {
                    "metric": "exact_match",
                    "ignore_case": True,
                    "regexes_to_ignore": [",", r"\$", r"(?s).*#### ", r"\.$"],
                }
            ],
        }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(description))


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from map(json.loads, file)


def hellaswag(data: Path) -> Iterator[dict[str, Any]]:
    (path,) = (data / "hellaswag").glob("*.jsonl.gz")
    for row in lines(path):
        asked = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}".replace("  ", " ").strip()
        yield {"text": asked, "choices": [ending.strip() for ending in row["endings"]], "answer": int(row["label"])}


def aqua_rat(data: Path) -> Iterator[dict[str, Any]]:
    for row in lines(data / "aqua_rat/test.jsonl"):
        options = " ".join(f"({option[0]}){option[2:]}" for option in row["options"])
        asked = f"Q: {row['question']} Answer Choices: {options}\nA: Among A through E, the answer is"
        letters = [f"({option[0]})" for option in row["options"]]
        yield {"text": asked, "choices": letters, "answer": "ABCDE".index(row["correct"])}


def gsm8k(data: Path) -> Iterator[dict[str, Any]]:
    """Five solved questions before each; `answer` is what stands after the four signs."""
    shown = [row for row, _ in zip(lines(data / "gsm8k/train.jsonl.gz"), range(SHOTS), strict=False)]
    before = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in shown)
    for row in lines(data / "gsm8k/test.jsonl"):
        yield {"text": f"{before}Question: {row['question']}\nAnswer:", "answer": row["answer"].rpartition("#### ")[2]}


def humaneval(data: Path) -> Iterator[dict[str, Any]]:
    for row in lines(data / "humaneval/HumanEval.jsonl.gz"):
        yield {"text": row["prompt"], "answer": row["canonical_solution"]}


ROWS = {"hellaswag": hellaswag, "aqua_rat": aqua_rat, "gsm8k": gsm8k, "humaneval": humaneval}


def samples(directory: Path, task: str) -> list[dict[str, Any]]:
    """What the harness logged of its newest run."""
    path = max(directory.rglob(f"samples_{task}_*.jsonl"))
    return sorted(lines(path), key=lambda row: row["doc_id"])


def report(task: str, served: list[dict[str, Any]], direct: list[dict[str, Any]]) -> None:
    differ = sum(not same(one["resps"], other["resps"]) for one, other in zip(served, direct, strict=True))
    for metric in served[0]["metrics"]:
        found = [[float(row[metric]) for row in rows] for rows in (served, direct)]
        means = [sum(values) / len(values) for values in found]
        error = (means[0] * (1 - means[0]) / len(served)) ** 0.5
        print(f"| {task} | {len(served)} | {metric} | {means[0]:.3f} ± {error:.3f} | {means[1]:.3f} | {differ} |")


def same(one: Any, other: Any) -> bool:
    """Of responses: numbers within 1e-3, all else equal."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return abs(float(one) - float(other)) <= 1e-3
    except ValueError:
        return bool(one == other)


if __name__ == "__main__":
    main()
