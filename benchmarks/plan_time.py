"""Published step times beside those that planning predicts, each model's by constants fitted without it.

    python benchmarks/plan_time.py      (no GPU; a minute)

Rows: NeMo-RL's documentation, docs/about/performance-summary.md as of v0.4, v0.5 and v0.6 (commits 9dbd9adc9, cff17f83b
and the one of 2026-11), degrees and shares of GPUs from the recipes it links; stages: NeMo-RL's blog of v0.3, table 1.
GRPO, whole steps in seconds. Steps off: none, generation and training take turns on all GPUs; else they are on GPUs
apart. Not fitted here are the constants of decoding, which come from inter-token latencies of vLLM on H100 GPUs, and
those of new weights, which are published times of these alone: NeMo-RL's pull request 638 for engines on the same
devices (DeepSeek-V3: 55 s, of which 20 s offload), 2808 for engines apart (30B to 671B).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import fmean
from typing import Any

from command_line import parse_arguments

from tandem.planning.decode_cost import DecodeCost, generation_s, steady_generation_s
from tandem.planning.hardware import CARDS
from tandem.planning.model_shape import ModelShape, shape_of
from tandem.planning.passes import Passes
from tandem.planning.time import CONSTANTS, Constants, ParallelDims, StepTime, Workload

ROWS = """0.4 H100 L8 on 4096 1060 16 2048 512 1 1,1,1,2 97.7
0.4 H100 L8 1 4096 1129 16 2048 512 1 1,1,1,2 74.6
0.4 H100 DSV3 on 1536 745 256 512 512 32 1,1,16,16 154
0.4 H100 DSV3 1 1536 744 512 512 512 32 1,1,16,16 77.9
0.4 H100 Q235 on 8192 5671 128 512 512 16 2,2,16,8 506
0.4 H100 Q235 1 8192 5691 256 512 512 8 4,1,16,8 241
0.4 H100 Q30 on 4096 3154 32 2048 512 4 2,1,8,1 225
0.4 H100 Q30 1 4096 3158 32 2048 512 4 2,1,8,1 244
0.4 H100 Q32 on 4096 3206 32 2048 512 4 4,1,1,4 393
0.4 H100 Q32 1 4096 3207 64 2048 512 4 4,1,1,4 215
0.5 H100 L8 on 4096 1019 16 2048 512 1 1,1,1,2 92.8
0.5 H100 L8 1 4096 1123 16 2048 512 1 1,1,1,1 64.8
0.5 H100 DSV3 on 1536 744 256 512 512 32 1,1,16,16 134
0.5 H100 DSV3 1 1536 738 512 512 512 32 1,1,16,16 64.9
0.5 H100 Q235 on 8192 5700 128 512 512 16 2,2,16,8 431
0.5 H100 Q235 1 8192 5707 256 512 512 8 4,1,16,8 203
0.5 H100 Q30 on 4096 3196 32 2048 512 2 1,1,8,1 198
0.5 H100 Q30 1 4096 3201 32 2048 512 2 1,1,8,2 154
0.5 H100 Q32 on 4096 3251 32 2048 512 4 4,1,1,4 376
0.5 H100 Q32 1 4096 3252 64 2048 512 4 4,1,1,4 200
0.6 H100 DSV3 on 1536 701 256 512 512 32 1,1,16,16 134
0.6 H100 DSV3 on 1536 697 512 512 512 32 1,1,16,16 111
0.6 H100 DSV3 1 1536 710 512 512 512 32 1,1,16,16 64.1
0.6 H100 Q235 on 8192 5698 128 512 512 16 2,2,16,8 395
0.6 H100 Q235 on 8192 5713 256 512 512 16 2,2,16,8 312
0.6 H100 Q235 1 8192 5721 256 512 512 8 4,1,16,8 231
0.6 H100 Q30 on 4096 3203 32 2048 512 2 1,1,8,1 192
0.6 H100 Q30 1 4096 3201 32 2048 512 2 1,1,8,2 152
0.6 H100 Q30 8 4096 3206 192 2048 512 2 1,1,8,1 34.5
0.5 GB200 L8 on 4096 1066 8 2048 512 1 1,1,1,1 91.0
0.5 GB200 L8 1 4096 1107 8 2048 512 1 1,1,1,1 71.1
0.5 GB200 DSV3 on 1536 996 128 512 512 32 1,1,16,8 128
0.5 GB200 DSV3 1 1536 994 256 512 512 16 1,1,16,8 64.5
0.5 GB200 Q235 on 8192 5711 64 512 512 8 2,2,16,4 332
0.5 GB200 Q235 1 8192 5711 128 512 512 8 4,1,16,4 268
0.5 GB200 Q30 on 4096 3198 16 2048 512 1 1,1,16,1 232
0.5 GB200 Q30 1 4096 3204 32 2048 512 1 1,1,16,1 136
0.5 GB200 Q32 on 4096 3253 16 2048 512 1 2,1,1,1 381
0.5 GB200 Q32 1 4096 3258 32 2048 512 1 2,1,1,1 210
0.6 GB200 DSV3 on 1536 711 128 512 512 32 1,1,16,8 108
0.6 GB200 DSV3 on 1536 700 256 512 512 32 1,1,16,8 98.7
0.6 GB200 DSV3 1 1536 708 256 512 512 16 1,1,16,8 61.7
0.6 GB200 Q235 on 8192 5709 64 512 512 8 2,2,16,4 286
0.6 GB200 Q235 on 8192 5693 128 512 512 8 2,2,16,4 345
0.6 GB200 Q235 1 8192 5705 128 512 512 8 4,1,16,4 278
0.6 GB200 Q30 on 4096 3199 16 2048 512 1 1,1,16,1 221
0.6 GB200 Q30 1 4096 3197 16 2048 512 1 1,1,16,1 301"""
"""Release, card, model, steps off, longest row, mean row, GPUs, rows a step, rows an optimizer step, tensor parallelism
of generation, tensor, context, expert and pipeline parallelism of training, seconds a step."""
STAGES = """L8 945 8 1 1,1,1,1 28 5 58 18 112
L70 548 64 4 4,1,1,4 28 14 84 18 147
Q32 3433 64 4 4,1,1,2 63 7 96 40 213
Q30 3401 64 4 2,1,8,1 50 12 78 23 167"""
"""Model, mean row, GPUs, tensor parallelism of generation, degrees of training; seconds of training, of new weights, of
generation, of log-probs, of the step. 2,048 rows of 4,096 tokens at most, 512 an optimizer step."""
PROMPT_TOKENS = 150
"""The mean prompt: an estimate, nobody published it."""
RECOMPUTES = ("L8", "L70", "Q235", "DSV3")

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
_QWEN_EXPERTS = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "L8": {
        **_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336,
    },
    "L70": {
        **_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
    },
    "Q32": {
        "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "hidden_size": 5120,
        "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600,
    },
    "Q30": {
        **_QWEN_EXPERTS, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "intermediate_size": 6144, "moe_intermediate_size": 768,
    },
    "Q235": {
        **_QWEN_EXPERTS, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
        "intermediate_size": 12288, "moe_intermediate_size": 1536,
    },
    "DSV3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 128, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
}  # fmt: skip
"""The published config.json files' numbers."""


@cache
def shape(name: str) -> ModelShape:
    return shape_of(CONFIGS[name])


@dataclass(frozen=True)
class Row:
    """A published step."""

    release: str
    card: str
    model: str
    steps_off: int
    workload: Workload
    layout: ParallelDims
    generating: int
    """GPUs, of which as many as `tensor` are an engine."""
    tensor: int
    measured: float
    stages: Mapping[str, float]

    @property
    def gpus(self) -> int:
        return self.layout.gpus + (self.generating if self.steps_off else 0)


def _workload(model: str, longest: int, mean: float, rows: int, update_rows: int) -> Workload:
    return Workload(
        rows, mean - PROMPT_TOKENS, longest - PROMPT_TOKENS, PROMPT_TOKENS, optimizer_steps=rows // update_rows,
        micro_batch_tokens=longest, recompute=model in RECOMPUTES,
    )  # fmt: skip


def _layout(gpus: int, degrees: str) -> ParallelDims:
    return ParallelDims(gpus, *map(int, degrees.split(",")))


def rows() -> list[Row]:
    found: list[Row] = []
    for line in ROWS.splitlines():
        release, card, model, off, longest, mean, gpus, count, update_rows, tensor, degrees, seconds = line.split()
        steps_off = 0 if off == "on" else int(off)
        generating = {0: int(gpus), 1: int(gpus) // 2, 8: 64}[steps_off]
        training = int(gpus) - (generating if steps_off else 0)
        workload = _workload(model, int(longest), float(mean), int(count), int(update_rows))
        found.append(
            Row(release, card, model, steps_off, workload, _layout(training, degrees), generating, int(tensor),
                float(seconds), {})
        )  # fmt: skip
    return found


def stage_rows() -> list[Row]:
    found: list[Row] = []
    for line in STAGES.splitlines():
        model, mean, gpus, tensor, degrees, update, _, generation, log_probs, seconds = line.split()
        stages = {"update": float(update), "generation": float(generation), "log_probs": float(log_probs)}
        workload = _workload(model, 4096, float(mean), 2048, 512)
        layout = _layout(int(gpus), degrees)
        found.append(Row("0.3", "H100", model, 0, workload, layout, int(gpus), int(tensor), float(seconds), stages))
    return found


def predicted(row: Row, constants: Constants) -> StepTime:
    """Log-probs are the policy's and the reference's."""
    passes = Passes(shape(row.model), CARDS[row.card], row.layout, row.workload, constants)
    forward = passes.forward_s()
    size = 2 * passes.shape.parameters
    publish = size / (constants.sent_refit_bytes_per_s if row.steps_off else constants.own_refit_bytes_per_s)
    return StepTime(
        generation=_decoding_s(row, constants),
        log_probs=forward,
        reference=forward,
        update=passes.update_s(),
        publish=publish,
        switch=0.0 if row.steps_off else constants.switch_s,
    )


def _decoding_s(row: Row, constants: Constants) -> float:
    """The recipes leave engines 0.6 of the memory where they share it, 0.8 elsewhere."""
    card = CARDS[row.card]
    decoder = DecodeCost(shape(row.model), card, row.tensor)
    free = (0.8 if row.steps_off else 0.6) * card.memory_bytes - 2e9 - 2 * decoder.shape.parameters / row.tensor
    free = max(free, 0.02 * card.memory_bytes)
    alone = generation_s(decoder, row.workload, row.generating, free, constants)
    if row.steps_off <= 1:
        return alone
    steady = steady_generation_s(decoder, row.workload, row.generating, free, row.steps_off, constants)
    return steady + max(0.0, alone - steady) / row.steps_off


def seconds(row: Row, constants: Constants) -> float:
    stages = predicted(row, constants)
    return stages.beside if row.steps_off else stages.total


BOUNDS = {
    "matmul_share": (0.2, 0.75),
    "mixture_pass_s": (1e-4, 1e-2),
    "distant_s": (1e-6, 4e-4),
    "switch_s": (1.0, 40.0),
}
"""The constants that are fitted here, and between what."""
START = replace(CONSTANTS, **{name: math.sqrt(low * high) for name, (low, high) in BOUNDS.items()})
"""Not the shipped constants, which have seen all rows."""


def deviation(constants: Constants, steps: Sequence[Row], staged: Sequence[Row]) -> float:
    """Sum of the absolute logarithms of predicted to published; a published stage counts half a step."""
    total = sum(abs(math.log(seconds(row, constants) / row.measured)) for row in steps)
    for row in staged:
        stages = predicted(row, constants)
        found = {
            "update": stages.update,
            "generation": stages.generation,
            "log_probs": stages.log_probs + stages.reference,
        }
        total += 0.5 * sum(abs(math.log(found[stage] / row.stages[stage])) for stage in row.stages)
    return total


def fit(steps: Sequence[Row], staged: Sequence[Row]) -> Constants:
    """One constant after another, by steps that shrink, until none helps: the least sum of absolute logarithms."""
    best, least, stride = START, deviation(START, steps, staged), 4.0
    while stride > 1.01:
        improved = False
        for name, (low, high) in BOUNDS.items():
            for factor in (stride, 1 / stride):
                value = min(high, max(low, getattr(best, name) * factor))
                tried = replace(best, **{name: value})
                if (found := deviation(tried, steps, staged)) < least - 1e-4:
                    best, least, improved = tried, found, True
        if not improved:
            stride = stride**0.5
    return best


@dataclass(frozen=True)
class Comparison:
    row: Row
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.measured - 1


def mean_error(compared: Sequence[Comparison]) -> float:
    return fmean(abs(each.error) for each in compared)


def compare(of: Sequence[Row], constants: Constants) -> list[Comparison]:
    return [Comparison(row, seconds(row, constants)) for row in of]


def leave_one_model_out() -> list[Comparison]:
    """Of the H100 rows: each predicted by constants that no row or stage of its model has touched."""
    of = [row for row in rows() if row.card == "H100"]
    staged = stage_rows()
    found: list[Comparison] = []
    for model in dict.fromkeys(row.model for row in of):
        constants = fit([row for row in of if row.model != model], [row for row in staged if row.model != model])
        found += compare([row for row in of if row.model == model], constants)
    return found


def table(compared: Sequence[Comparison]) -> str:
    lines = ["| release | card | model | steps off | GPUs | published s | predicted s | off |", "|" + " --- |" * 8]
    for each in compared:
        row = each.row
        lines.append(
            f"| {row.release} | {row.card} | {row.model} | {row.steps_off} | {row.gpus} | {row.measured:g} "
            f"| {each.predicted:.1f} | {each.error:+.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse_arguments(parser)
    of = rows()
    h100, other = ([row for row in of if (row.card == "H100") == wanted] for wanted in (True, False))
    fitted = fit(h100, stage_rows())
    print(f"{len(fields(Constants))} constants, of which {len(BOUNDS)} are fitted here:")
    for name in BOUNDS:
        print(f"  {name}: {getattr(fitted, name):.4g} (tandem/planning/time.py has {getattr(CONSTANTS, name):.4g})")
    left_out = leave_one_model_out()
    print("\nH100, each model by constants fitted without it\n" + table(left_out))
    for model in CONFIGS:
        if its := [each for each in left_out if each.row.model == model]:
            print(f"{model}: mean error {mean_error(its):.1%}")
    print(f"leave one model out, mean error: {mean_error(left_out):.1%}")
    print(f"in sample, mean error: {mean_error(compare(h100, fitted)):.1%}")
    early = fit([row for row in h100 if row.release < "0.6"], stage_rows())
    late = compare([row for row in h100 if row.release == "0.6"], early)
    print(f"v0.6 by constants fitted on what came before, mean error: {mean_error(late):.1%}")
    print("\nGB200, the constants of H100 and its own data sheet\n" + table(compare(other, fitted)))
    print(f"mean error: {mean_error(compare(other, fitted)):.1%}")


if __name__ == "__main__":
    main()
