"""Whole steps of `tandem train`, and of TRL beside it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from gpu_checks.figures import Bench, Skipped
from gpu_checks.machine import ROOT
from gpu_checks.measuring import GIB, device_of, dtype_of, let_go
from gpu_checks.models import config_of, model_of
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.planning.phases import phase_peaks
from tandem.tracking.jsonl import read_metrics

_REWARD = """
def parity(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)
"""
"""Of half of all answers: so groups are informative."""
_SMOLLM2 = ROOT / "models/smollm2-135m-instruct"


@dataclass(frozen=True)
class Sizes:
    """Of a GRPO step on a model with random weights."""

    prompts: int
    group_size: int
    prompt: int
    longest: int
    mean: int
    """Of an answer, were there no longest one: lengths are geometric, for each token ends it with the same chance."""


def train(bench: Bench) -> None:
    """`tandem train` on prompts of sort4, three steps: that it runs, and how far trainer and engine disagree."""
    figures = _sort4(bench, "one process", {})
    bench.report_all([(name, value, "") for name, value in figures.items()])


def two_ranks(bench: Bench) -> None:
    """`tandem train` as in `train` with two ranks, NCCL between them: rewards and gradients beside those of one."""
    if not bench.small and torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")
    one, two = (_sort4(bench, case, {"cluster": {"type": "local", "ranks": n}}) for case, n in (("one", 1), ("two", 2)))
    for name, value in two.items():
        bench.report(name, value, "", "two ranks")
        bench.report(name, one[name], "", "one rank")


def _sort4(bench: Bench, case: str, more: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of the third step, seconds of the whole program."""
    folder = bench.work / f"sort4 {case}"
    _sort4_task().make(folder, seed=0)
    (folder / "parity.py").write_text(_REWARD)  # a model that knows nothing earns nothing by sorting
    config = {
        "model": {"path": str(folder / "model"), "dtype": str(dtype_of(bench)).removeprefix("torch.")},
        "data": {"train_files": [str(folder / "train.jsonl")], "prompts_per_step": 16, "max_prompt_tokens": 16},
        "algorithm": {"type": "grpo", "group_size": 8},
        "generation": {"max_response_tokens": 8},
        "reward": {"functions": [f"{folder}/parity.py:parity"]},
        "trainer": {"run_dir": str(folder / "run"), "steps": 3, "eval_every": 0},
        **more,
    }
    begun = time.monotonic()
    metrics = _tandem(bench, folder / "config.yaml", config)
    names = ("rollout/mismatch_kl", "rollout/mismatch_max", "actor/grad_norm", "reward/mean", "time/step_s")
    found = {name: metrics[-1][name] for name in names if name in metrics[-1]}
    return {**found, "seconds of the program": time.monotonic() - begun}


def _sort4_task() -> Any:
    spec = spec_from_file_location("sort4_task", ROOT / "examples/sort4/task.py")
    assert spec is not None and spec.loader is not None
    task = module_from_spec(spec)
    spec.loader.exec_module(task)
    return task


def _tandem(bench: Bench, path: Path, config: Mapping[str, Any], *arguments: str) -> list[Mapping[str, float]]:
    """Run it; the metrics of its steps. JSON is YAML."""
    path.write_text(json.dumps(config))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if bench.small else {}
    environment = {**os.environ, **hidden, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "-m", "tandem", "train", str(path), *arguments], env=environment, check=True)
    return read_metrics(Path(config["trainer"]["run_dir"]) / "metrics.jsonl")


def grpo_step(bench: Bench) -> None:
    """A GRPO step, 64 prompts x 8 answers of very different lengths, Qwen3-0.6B's shape: where its time goes."""
    sizes = Sizes(4, 4, 16, 24, 120) if bench.small else Sizes(64, 8, 256, 1024, 320)
    config = _grpo(bench, sizes, steps=4)
    path = bench.work / "grpo.yaml"
    last = _tandem(bench, path, config)[-2:]  # the first ones make pinned memory and recordings

    def mean(name: str) -> float:
        return fmean(metrics.get(name, 0.0) for metrics in last)

    step, generation, update = (mean(f"time/{stage}_s") for stage in ("step", "generation", "update"))
    answered = sizes.prompts * sizes.group_size * mean("response_length/mean")
    bench.report("a step", step, "s")
    bench.report("mean answer", mean("response_length/mean"), "tokens")
    bench.report("tokens, prompts too", mean("perf/tokens_per_s"), "tokens/s")
    bench.report("decoded tokens", answered / generation, "tokens/s")
    for name in ("generation", "preparation", "update", "publish", "reward"):
        bench.report("share of the step", mean(f"time/{name}_s") / step, "", name)
    rest = step - generation - update - mean("time/preparation_s")
    bench.report("share of the step", rest / step, "", "neither generation nor training")
    bench.report("publish", mean("time/publish_s"), "s")
    bench.report("rollout/mismatch_kl", mean("rollout/mismatch_kl"))
    _report_plan(bench, path, last[-1])


_PHASES = {"generation": ("generation",), "training": ("forward", "backward", "step"), "publish": ("publish",)}


def _report_plan(bench: Bench, path: Path, metrics: Mapping[str, float]) -> None:
    """`tandem plan`'s peak of each phase, less its allowances for context and gaps, beside what was allocated."""
    found = phase_peaks(load_config(TrainConfig, path, []), _card_bytes(bench))
    for phase, planned in _PHASES.items():
        memories = [moment.memory for moment in found if moment.phase in planned]
        if not memories:
            continue
        gib = max(memory.total - memory.context - memory.slack for memory in memories) / GIB
        bench.report("peak, planned", gib, "GiB", phase)
        if (measured := metrics.get(f"perf/peak_memory_gib/{phase}")) is not None:
            bench.report("peak", measured, "GiB", phase)
            bench.report("planned by allocated", gib / measured, "", phase)


def _card_bytes(bench: Bench) -> int:
    return 80 * 2**30 if bench.small else torch.cuda.get_device_properties(0).total_memory


def _grpo(bench: Bench, sizes: Sizes, steps: int) -> dict[str, Any]:
    """A configuration, and beside it its model, data and reward."""
    model, data, reward = _model(bench, sizes.mean), bench.work / "letters.jsonl", bench.work / "parity.py"
    draw = random.Random(0)
    rows = ("".join(draw.choices("abcdefgh", k=sizes.prompt)) for _ in range(512))
    lines = ({"prompt": row, "data_source": "letters", "ground_truth": "none"} for row in rows)
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    reward.write_text(_REWARD)
    return {
        "model": {"path": str(model), "dtype": str(dtype_of(bench)).removeprefix("torch.")},
        "data": {
            "train_files": [str(data)], "prompts_per_step": sizes.prompts, "max_prompt_tokens": sizes.prompt,
        },
        "algorithm": {"type": "grpo", "group_size": sizes.group_size},
        "generation": {"max_response_tokens": sizes.longest},
        "training": {"optimizer": {"lr": 1e-7}},
        "reward": {"functions": [f"{reward}:parity"]},
        "trainer": {"run_dir": str(bench.work / f"run {bench.name}"), "steps": steps, "eval_every": 0},
    }  # fmt: skip


def _model(bench: Bench, tokens: int) -> Path:
    """Random weights, and a tokenizer of about `tokens` tokens: as the others are never drawn, one of them ends a row
    with a chance of 1 / `tokens`."""
    folder = bench.work / f"model {tokens}"
    if (folder / "model.safetensors").exists():
        return folder
    tokenizer = _sort4_task().build_tokenizer()
    tokenizer.model_max_length = 4096
    tokenizer.add_tokens([f"<{number}>" for number in range(tokens - len(tokenizer))])
    config = config_of(
        "tiny" if bench.small else "Qwen3-0.6B", max_position_embeddings=4096, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = model_of(config, device_of(bench), dtype_of(bench))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    let_go(device_of(bench))
    return folder


def trl_step(bench: Bench) -> None:
    """A GRPO step of TRL and one of ours: the same model and prompts, answers of 128 tokens but for a few that end."""
    missing = [name for name in ("trl", "datasets", "accelerate") if find_spec(name) is None]
    if missing:
        raise Skipped(f"needs {', '.join(missing)}: scripts/gpu --wheels lists TRL's wheels")
    from gpu_checks.trl_side import seconds_of_steps

    sizes = Sizes(4, 4, 16, 8, 500) if bench.small else Sizes(16, 8, 128, 128, 20_000)
    config = _grpo(bench, sizes, steps=4)
    ours = _tandem(bench, bench.work / "beside_trl.yaml", config)[1:]
    mine = fmean(metrics["time/step_s"] for metrics in ours)
    bench.report("a step", mine, "s", "Tandem")
    bench.report("mean answer", fmean(metrics["response_length/mean"] for metrics in ours), "tokens", "Tandem")
    theirs, length = seconds_of_steps(bench, config)
    bench.report("a step", theirs, "s", "TRL")
    bench.report("mean answer", length, "tokens", "TRL")
    bench.report("faster by", theirs / mine, "x")


def smollm2(bench: Bench) -> None:
    """SmolLM2-135M-Instruct learns sums by GRPO: validation before and after."""
    if not _SMOLLM2.exists():
        raise Skipped("needs models/smollm2-135m-instruct, which scripts/smollm2 makes")
    if bench.small:
        raise Skipped("takes minutes without a GPU: recipes/smollm2_sums.yaml")
    data = bench.work / "sums"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "examples/smollm2/sums.py", str(data)], cwd=ROOT, env=environment, check=True)
    config: dict[str, Any] = {
        "model": {"path": str(_SMOLLM2), "dtype": "bfloat16"},
        "data": {
            "train_files": [str(data / "train.jsonl")], "val_files": [str(data / "val.jsonl")],
            "prompts_per_step": 64, "max_prompt_tokens": 64,
        },
        "algorithm": {"type": "grpo", "group_size": 8},
        "generation": {"max_response_tokens": 16, "max_running": 512},
        "training": {"optimizer": {"lr": 1e-5, "warmup_steps": 5}},
        "reward": {"functions": [f"{ROOT}/examples/smollm2/sums.py:compute_score"]},
        "trainer": {"run_dir": str(bench.work / "run smollm2"), "steps": 60, "eval_every": 20},
    }  # fmt: skip
    metrics = _tandem(bench, bench.work / "smollm2.yaml", config)
    for at in metrics:
        for name, value in at.items():
            if name.startswith("val/") and name.endswith("mean@1"):
                bench.report(name, value, "", f"after {at['step']:.0f} steps")
    later = metrics[len(metrics) // 2 :]
    for name in ("time/step_s", "time/generation_s", "time/update_s", "perf/tokens_per_s", "rollout/mismatch_kl"):
        bench.report(name, fmean(at[name] for at in later if name in at), "", "second half")
