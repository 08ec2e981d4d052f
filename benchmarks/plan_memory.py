"""Peaks by cause of the real engine on fake tensors, whole models: 7B on 8 ranks, 32B and 30B-A3B on 64; and four that
prime-rl publishes, against its trainer rebuilt (`prime_rl_memory.py`). No GPU; some CPU minutes.

    python benchmarks/plan_memory.py [steps | published]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from command_line import parse_arguments

from tandem.planning.fsdp_memory import FsdpSizes, phases
from tandem.planning.model_shape import shape_of
from tandem.planning.trace.step import FakeRun, extrapolated
from tandem.planning.trace.trace_report import run_fake

GIB = 2**30
QWEN: dict[str, Any] = {"tie_word_embeddings": False, "max_position_embeddings": 40960}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {**QWEN, "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
    "Qwen2.5-32B": {**QWEN, "model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064},
    "Qwen3-30B-A3B": {**QWEN, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "vocab_size": 151936},
}  # fmt: skip
RANKS = {"Qwen2.5-7B": 8, "Qwen2.5-32B": 64, "Qwen3-30B-A3B": 64}
PROMPT, ANSWERS = 1024, (5120, 5120, 5120)
"""Tokens of a micro-batch: 16,384 less the last ones."""
PUBLISHED = {("0.6b", 1, 16384): 12.5, ("0.6b", 1, 65536): 19.6, ("4b", 8, 16384): 17.1, ("4b", 8, 65536): 36.1}
"""GiB that prime-rl's repository prints, reserved by the allocator: size, GPUs, tokens."""
LAYERS = {"0.6b": 28, "4b": 36}


def steps(first: int | None) -> Iterator[str]:
    """The engine's step: checkpointed layers, gradients summed after each micro-batch, bfloat16."""
    yield "| model | ranks | phase | fake step GiB | by cause | formula |"
    yield "| --- | --- | --- | --- | --- | --- |"
    with tempfile.TemporaryDirectory() as directory:
        for name, config in islice(MODELS.items(), first):
            (Path(directory) / "config.json").write_text(json.dumps(config))
            training = {"activation_checkpointing": True, "reduce_once": False}
            run = FakeRun(directory, PROMPT, ANSWERS, ranks=RANKS[name], training=training)
            (found,) = run_fake([run])
            tokens = PROMPT + sum(ANSWERS) - len(ANSWERS)
            engine = FsdpSizes(
                shape_of(config), RANKS[name], tokens=tokens, predicted=sum(ANSWERS), checkpointing=True
            )  # fmt: skip
            for phase, memory in phases(engine).items():
                if peak := found["peaks"].get(phase, {}).get("total"):
                    causes = found["peaks"][phase]["by_cause"].items()
                    named = ", ".join(
                        f"{cause} {size / GIB:.1f}"
                        for cause, size in sorted(causes, key=lambda x: -x[1])
                        if size > GIB / 20
                    )
                    off = f"{memory.total / peak - 1:+.1%}"
                    yield f"| {name} | {RANKS[name]} | {phase} | {peak / GIB:.2f} | {named} | {off} |"


def published(first: int | None) -> Iterator[str]:
    """From 3 and 6 layers."""
    yield "| prime-rl, Qwen3 | GPUs | tokens | published GiB | rebuilt | |"
    yield "| --- | --- | --- | --- | --- | --- |"
    script = Path(__file__).with_name("prime_rl_memory.py")
    for (size, world, tokens), reserved in islice(PUBLISHED.items(), first):
        totals = {}
        for layers in (3, 6):
            command = [sys.executable, str(script), size, str(world), str(tokens), str(layers)]
            totals[layers] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        whole = extrapolated(totals, LAYERS[size]) / GIB
        off = whole / reserved - 1
        yield f"| {size} | {world} | {tokens:,} | {reserved} | {whole:.2f} | {off:+.1%} |"
        assert abs(off) < 0.1


if __name__ == "__main__":
    parts = {"steps": steps, "published": published}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=list(parts), help="default: both")
    parser.add_argument("--first", type=int, help="so many models of each part; default: all")
    asked = parse_arguments(parser, first=1)
    for part in [asked.part] if asked.part else parts:
        for line in parts[part](asked.first):
            print(line, flush=True)
