"""The checks, those first on which the others depend or which decide the most.

Importing this imports all that they need but what starts CUDA, so that each of them can be a fork that has it already.
"""

from __future__ import annotations

import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from gpu_checks import decoding, kernels, machine, processes, steps, training
from gpu_checks.running import Check

CHECKS = [
    Check("environment", 60, machine.environment),
    Check("ceilings", 30, machine.ceilings),
    Check("train", 100, steps.train),
    Check("attention", 60, kernels.attention),
    Check("kernels", 120, kernels.kernels),
    Check("recorded", 60, decoding.recorded),
    Check("decoding", 120, decoding.decoding),
    Check("grpo_step", 150, steps.grpo_step),
    Check("training", 90, training.training),
    Check("shared_prompts", 40, training.shared_prompts),
    Check("branches", 40, training.branches),
    Check("long_rows", 90, training.long_rows),
    Check("sft", 40, training.sft),
    Check("skewed", 60, decoding.skewed),
    Check("output_layer", 30, kernels.output_layer),
    Check("choosing", 30, decoding.choosing),
    Check("ipc", 60, processes.ipc),
    Check("one_rank", 60, processes.one_rank),
    Check("gpu_tests", 120, machine.gpu_tests),
    Check("two_ranks", 120, steps.two_ranks),
    Check("trl_step", 120, steps.trl_step),
    Check("variants", 90, training.variants),
    Check("smollm2", 150, steps.smollm2),
]
"""Each with the most seconds that it may take."""
