"""The fake step against the real allocator, and the formulas against the fake step."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tandem.config.training import FsdpTrainingConfig
from tandem.planning.fsdp_memory import FsdpSizes, phases
from tandem.planning.model_shape import shape_of
from tandem.planning.trace.pretend import compiler
from tandem.planning.trace.step import FakeRun, Loss, extrapolated, make_engine, micro_batch, on_meta_device, trace
from tandem.planning.trace.trace_report import answers_to
from tests.optimizers import OPTIMIZERS

DENSE = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}  # fmt: skip
TIED = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
MIXTURE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip
SMALL = {**DENSE, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 320,
         "vocab_size": 3000, "num_hidden_layers": 3}  # fmt: skip

CHECKPOINTED = {"activation_checkpointing": True, "reduce_once": False}
LONG, SHORT = (5120, 5120, 5120), (500, 500)


def the_run(directory: Path, config: dict[str, Any], layers: int = 3, **fields: Any) -> FakeRun:
    directory = directory / f"{config['model_type']}-{config['hidden_size']}"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    given: dict[str, Any] = {"prompt_tokens": 1024, "answer_tokens": LONG, "ranks": 8, "training": CHECKPOINTED}
    return FakeRun(directory=str(directory), layers=layers, **{**given, **fields})


CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "checkpointing": (DENSE, 3, {}),
    "five layers": (DENSE, 5, {}),
    "eight layers": (DENSE, 8, {}),
    "one tile": (DENSE, 2, {"answer_tokens": (5120, 2560)}),
    "no checkpointing, shard_size": (DENSE, 2, {"training": {"reduce_once": False, "shard_size": 2}}),
    "selective": (DENSE, 2, {"training": {"activation_checkpointing": "selective", "optimizer_offload": True}}),
    "reduce_once, cpu_offload": (DENSE, 2, {"training": {**CHECKPOINTED, "reduce_once": True, "cpu_offload": True}}),
    "cpu_offload, context": (DENSE, 2, {"training": {**CHECKPOINTED, "cpu_offload": True, "context_parallel": 4}}),
    "short rows": (DENSE, 2, {"answer_tokens": SHORT}),
    "lora": (DENSE, 2, {"lora": {"rank": 16}}),
    "critic": (DENSE, 2, {"value_head": True}),
    "critic, lora": (DENSE, 2, {"value_head": True, "lora": {"rank": 16}}),
    "tied, short rows": (TIED, 2, {"answer_tokens": SHORT}),
    "one rank": (TIED, 2, {"ranks": 1, "training": {}}),
    "mixture": (MIXTURE, 2, {"ranks": 64}),
    "mixture, no checkpointing": (MIXTURE, 2, {"ranks": 64, "training": {"reduce_once": False}}),
    "mixture, frozen": (MIXTURE, 2, {"learns": False}),
}
OF_OPTIMIZERS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {}
for name in OPTIMIZERS:
    chosen, offload = {"optimizer": {"type": name}}, {**CHECKPOINTED, "optimizer_offload": True}
    OF_OPTIMIZERS |= {
        name: (DENSE, 2, chosen),
        f"{name}, offload": (DENSE, 2, {**chosen, "training": offload}),
        f"{name}, one rank": (TIED, 2, {**chosen, "ranks": 1, "training": {}}),
    }
CASES |= OF_OPTIMIZERS
BY_NIGHT = {
    "eight layers", "reduce_once, cpu_offload", "short rows", "critic", "tied, short rows", "one rank",
    "mixture, no checkpointing", "mixture, frozen", *OF_OPTIMIZERS,
}  # fmt: skip
"""Cases of what others have each by itself, and those whose formulas are sums of few terms."""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The fake step of a case, on CUDA tensors; all of its tier are run at the first call."""
    if compiler() is None:
        pytest.skip("fake CUDA tensors need a C++ compiler")

    @cache
    def all_of_them(by_night: bool) -> dict[str, dict[str, Any]]:
        directory = tmp_path_factory.mktemp("models")
        cases = [case for case in CASES if (case in BY_NIGHT) == by_night]
        runs = [
            the_run(directory, config, layers, **fields) for config, layers, fields in (CASES[case] for case in cases)
        ]
        command = [sys.executable, "-m", "tandem.planning.trace.step"]
        asked = json.dumps([asdict(run) for run in runs])
        printed = subprocess.run(command, input=asked, text=True, stdout=subprocess.PIPE, check=True).stdout
        return dict(zip(cases, map(json.loads, printed.splitlines()), strict=True))

    return lambda case: all_of_them(case in BY_NIGHT)[case]


def sizes_of(case: str) -> FsdpSizes:
    """The case as formulas take it."""
    config, layers, fields = CASES[case]
    training = FsdpTrainingConfig(**fields.get("training", CHECKPOINTED))
    answers = fields.get("answer_tokens", LONG)
    engine = FsdpSizes(
        shape_of({**config, "num_hidden_layers": layers}),
        ranks=fields.get("ranks", 8),
        learns=fields.get("learns", True),
        value_head=fields.get("value_head", False),
        tokens=1024 + sum(answers) - len(answers),
        predicted=sum(answers),
        shard_size=training.shard_size,
        cpu_offload=training.cpu_offload,
        optimizer_offload=training.optimizer_offload,
        checkpointing=training.activation_checkpointing is not False,
        keeps_attention=training.activation_checkpointing == "selective",
        context_parallel=training.context_parallel,
        lora_rank=fields.get("lora", {}).get("rank", 0),
        optimizer=FsdpTrainingConfig(optimizer=fields.get("optimizer", {})).optimizer,
    )
    return replace(engine, reduce_once=training.sums_gradients_once(engine.learning))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] if case in BY_NIGHT else []) for case in CASES]
)
def test_formulas_are_within_five_percent_of_the_fake_step(case: str, traced: Callable[[str], Any]) -> None:
    expected = phases(sizes_of(case))
    off = {
        phase: expected[phase].total / peak["total"] - 1
        for phase, peak in traced(case)["peaks"].items()
        if phase in expected and peak["total"] > 2**20
    }
    assert set(off) >= {"forward"}
    assert all(abs(error) < 0.05 for error in off.values()), off


@pytest.mark.nightly
def test_three_and_five_layers_tell_what_eight_take(traced: Callable[[str], Any]) -> None:
    three, five, eight = (traced(case)["peaks"] for case in ("checkpointing", "five layers", "eight layers"))
    for phase in ("forward", "backward", "step", "publish"):
        whole = extrapolated({3: three[phase]["total"], 5: five[phase]["total"]}, 8)
        assert abs(whole / eight[phase]["total"] - 1) < 0.01, phase


def made_of_a_pass(peak: Any) -> dict[str, int]:
    """How many large storages of activations and logits were alive at once, by the line that made them."""
    return {f"{cause} {line}": count for cause, line, _, count in peak["sites"] if cause in ("activations", "logits")}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_nothing_that_a_layer_made_outlives_the_next_but_its_output(phase: str, traced: Callable[[str], Any]) -> None:
    three, five = (made_of_a_pass(traced(case)["peaks"][phase]) for case in ("checkpointing", "five layers"))
    more = {line: count - three.get(line, 0) for line, count in five.items() if count > three.get(line, 0)}
    kept = {} if phase == "forward" else {next(line for line in more if "lean.py" in line and "_layer" in line): 2}
    assert more == kept


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_nothing_of_a_tile_of_the_head_outlives_the_next(phase: str, traced: Callable[[str], Any]) -> None:
    one, two = (made_of_a_pass(traced(case)["peaks"][phase]) for case in ("one tile", "checkpointing"))
    of_head = {line: count for line, count in two.items() if "head.py" in line}
    assert of_head
    assert of_head == {line: one[line] for line in of_head}


@pytest.mark.parametrize(("prompt", "longest", "tokens"), [(16, 8, 16384), (1024, 2048, 16384), (1, 16384, 16384)])
def test_a_traced_micro_batch_has_as_many_tokens_as_it_may(prompt: int, longest: int, tokens: int) -> None:
    answers = answers_to(prompt, longest, tokens)
    assert prompt + sum(answer - 1 for answer in answers) == tokens
    assert max(answers) == longest


def test_a_row_that_is_longer_is_traced_alone() -> None:
    assert answers_to(prompt=100, longest=50, tokens=120) == (50,)


@pytest.mark.parametrize("case", ["checkpointing", "mixture", "cpu_offload, context"])
def test_attention_is_a_flash_kernel_and_never_masked(case: str, traced: Callable[[str], Any]) -> None:
    operations = traced(case)["operations"]
    assert operations["aten._flash_attention_forward.default"]
    assert not [name for name in operations if "scaled_dot_product" in name or "_safe_softmax" in name]


SWITCHES = [
    *(pytest.param(switch, marks=pytest.mark.nightly) for switch in ({}, {"activation_checkpointing": True})),
    {"activation_checkpointing": "selective"},
]


@pytest.mark.parametrize("training", SWITCHES, ids=str)
def test_the_fake_step_is_what_the_allocator_says(training: dict[str, Any], tmp_path: Path) -> None:
    """On a CPU, in every phase."""
    run = the_run(tmp_path, SMALL, ranks=1, device="cpu", dtype="float32", training=training,
                  prompt_tokens=60, answer_tokens=(150, 90))  # fmt: skip
    expected = {phase: peak.total for phase, peak in trace(run).items() if phase != "operations"}
    model = on_meta_device(run, Path(run.directory))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):  # what is not filled may hold NaN
        nn.init.normal_(tensor, std=0.02)
    engine = make_engine(run, model)
    batch = [micro_batch(run), micro_batch(run)]
    for phase, call in {
        "forward": lambda: engine.forward(batch),
        "backward": lambda: engine.forward_backward(batch, Loss()),
        "step": engine.optimizer_step,
    }.items():
        before = held_by(engine)
        assert abs(expected[phase] / (before + most_allocated(call)) - 1) < 0.01, phase


def held_by(engine: Any) -> int:
    """Bytes of weights, their gradients, and the optimizer's state."""
    parameters = list(engine.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    tensors = [*parameters, *gradients, *engine.model.buffers(), *engine._optimizer._state().values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def most_allocated(call: Callable[[], object]) -> int:
    """How many bytes more than before the CPU's allocator had given out at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
