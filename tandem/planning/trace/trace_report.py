"""What `tandem plan --trace` prints: fake steps of a configuration's roles, beside the formulas."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tandem.config.cluster import RoleName
from tandem.config.roles import model_roles
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import SftConfig
from tandem.errors import UserError
from tandem.planning.fsdp_memory import phases
from tandem.planning.model_shape import ModelShape, read_shape
from tandem.planning.phases import fsdp_sizes
from tandem.planning.planned import Planned, adapters_of, learning_roles, longest_row
from tandem.planning.trace.pretend import compiler
from tandem.planning.trace.step import FakeRun, extrapolated

_FEW, _MORE = 3, 5
"""Layers of fake steps that the peak of a deeper model is extrapolated from."""


def run_fake(runs: list[FakeRun]) -> list[dict[str, Any]]:
    """In a process of its own, for a torch that pretends to have CUDA does nothing else; the peaks of each by phase."""
    command = [sys.executable, "-m", "tandem.planning.trace.step"]
    asked = json.dumps([asdict(run) for run in runs])
    done = subprocess.run(command, input=asked, text=True, capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise UserError(f"--trace: the fake step failed ({last})")
    return [json.loads(line) for line in done.stdout.splitlines()]


def traced(config: Planned) -> Iterator[str]:
    """A line a phase of each role: bytes of the fake step, and of the formulas."""
    training = config.training
    assert isinstance(training, FsdpTrainingConfig)
    device = "cuda" if compiler() else "cpu"
    if device == "cpu":
        yield "--trace: without a C++ compiler on the CPU's path: its head, and its attention, are not those of a GPU"
    yield "of each role alone, without the other roles, the context and the slack of the table:"
    for role, path in model_roles(config):
        shape, ranks = read_shape(path), sum(config.nodes_of(role))
        whole = _fake_run(config, training, role, path, ranks, device)
        found = _peaks(whole, shape)
        formulas = phases(fsdp_sizes(config, training, role, shape, ranks))
        for phase, memory in formulas.items():
            if found.get(phase):
                total = found[phase]
                yield (
                    f"{role} {phase}: fake step {total / 2**30:.2f} GiB, formulas {memory.total / 2**30:.2f} "
                    f"({memory.total / total - 1:+.1%})"
                )


def _peaks(run: FakeRun, shape: ModelShape) -> Mapping[str, int]:
    if shape.layers <= _MORE or len(set(shape.mixtures)) > 1 or len(set(shape.windows)) > 1:
        (answer,) = run_fake([run])
        return {phase: peak["total"] for phase, peak in answer["peaks"].items()}
    few, more = run_fake([replace(run, layers=_FEW), replace(run, layers=_MORE)])
    return {
        phase: extrapolated({_FEW: peak["total"], _MORE: more["peaks"][phase]["total"]}, shape.layers)
        for phase, peak in few["peaks"].items()
    }


def answers_to(prompt: int, longest: int, tokens: int) -> tuple[int, ...]:
    """Tokens of each of the answers to one prompt, the longest, that fill a micro-batch of `tokens`; one at least.

    No pass computes an answer's last token, which predicts nothing.
    """
    computed = max(1, longest - 1)
    count, rest = divmod(max(tokens - prompt, computed), computed)
    return (*[longest] * count, *([rest + 1] if rest else []))


def _fake_run(
    config: Planned, training: FsdpTrainingConfig, role: RoleName, path: Path, ranks: int, device: str
) -> FakeRun:
    """Micro-batches of the longest prompt and as many of its answers, the longest, as there is room for; with its
    pictures, if a configuration says how many tokens they take."""
    pictures = (config.data.images.max_image_tokens or 0) if read_shape(path).tower else 0
    if pictures and ranks > 1:
        raise UserError("--trace: a fake step shows pictures on one rank only; leave --trace out for the formulas")
    if isinstance(config, SftConfig):
        prompt = min(longest_row(config) - 1, max(1, pictures))
        answer = longest_row(config) - prompt
    else:
        prompt, answer = config.data.max_prompt_tokens, config.generation.max_response_tokens
    learns = role in learning_roles(config)
    lora = adapters_of(config, role)
    return FakeRun(
        directory=str(path),
        prompt_tokens=prompt,
        answer_tokens=answers_to(prompt, answer, training.tokens_per_micro_batch),
        ranks=ranks,
        device=device,
        dtype=config.model.dtype,
        learns=learns,
        value_head=role in ("critic", "reward_model"),
        training=training.model_dump(exclude={"type", "optimizer"}),
        lora=lora.model_dump() if lora else None,
        optimizer=fsdp_sizes(config, training, role, read_shape(path), ranks).optimizer.model_dump(),
        picture_tokens=min(pictures, prompt),
        vision_tower=config.model.vision_tower,
    )
