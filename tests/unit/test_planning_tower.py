"""Models that see pictures: their parameters, the fake step of their towers, and the formulas against it."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from typer.testing import CliRunner

from examples.tiles.task import make_config, make_tokenizer
from tandem.cli import app
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.models.tower import _KEPT_BYTES
from tandem.planning.fsdp_memory import FsdpSizes, Memory, phases
from tandem.planning.model_shape import shape_of
from tandem.planning.phases import HostMemory, hosts
from tandem.planning.tower_memory import KEPT_FEATURES, KEPT_PIXELS
from tandem.planning.tower_shape import TOWERS
from tandem.planning.trace.pretend import compiler
from tandem.planning.trace.step import FakeRun, Loss, fake_tower, make_engine, micro_batch, on_meta_device, trace
from tests.picture_families import NEEDS_FEATURES
from tests.pictures import FAMILIES
from tests.unit.test_planning_trace import held_by, most_allocated

ROOT = Path(__file__).parents[2]
TEXT = {
    "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 20_000,
    "intermediate_size": 3072, "num_hidden_layers": 2, "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}  # fmt: skip
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 1280, "hidden_size": 8192, "in_chans": 3},
    "qwen2_5_vl": {"hidden_size": 1280, "in_chans": 3, "intermediate_size": 3456, "out_hidden_size": 5120},
    "qwen3_vl": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560},
    "qwen3_vl_moe": {"out_hidden_size": 2048},
}
"""Towers with most of transformers' defaults left out."""


def config(family: str, **vision: Any) -> dict[str, Any]:
    """Two layers of text and of vision in the widths of a published size."""
    tower = {"depth": 2, "num_heads": 16, **vision}
    if family == "qwen2_vl":
        tower |= {"embed_dim": 1280, "hidden_size": 1024}
    else:
        tower |= {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 1024}
    tower |= {"fullatt_block_indexes": [1]} if family == "qwen2_5_vl" else {}
    tower |= {"deepstack_visual_indexes": [0]} if family == "qwen3_vl" else {}
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    return {"model_type": family, "text_config": TEXT, "vision_config": tower, "tie_word_embeddings": True, **ids}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family: str) -> None:
    whole = make_config(family, make_tokenizer())
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(whole)
    for published in (whole.to_dict(), _as_text_was_published(whole.to_dict())):
        shape = shape_of(published)
        assert shape.tower is not None and shape.tied
        assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
        tower: Any = model.model.visual
        assert shape.tower.parameters == sum(parameter.numel() for parameter in tower.parameters())
        assert shape.tower.layer == sum(parameter.numel() for parameter in tower.blocks[0].parameters())
        assert shape.layer(0) == sum(
            parameter.numel() for parameter in model.model.language_model.layers[0].parameters()
        )


def _as_text_was_published(whole: dict[str, Any]) -> dict[str, Any]:
    """Qwen2-VL and Qwen2.5-VL: the text's numbers beside those of the whole."""
    if whole["model_type"] == "qwen3_vl":
        return whole
    text = {name: value for name, value in whole["text_config"].items() if name != "model_type"}
    return {**text, **{name: value for name, value in whole.items() if name != "text_config"}}


@pytest.mark.parametrize("family", TOWERS)
def test_what_published_files_leave_out_is_transformers_default(family: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    text = TEXT if family in FAMILIES else {**TEXT, **experts}
    given = {"text_config": text, "vision_config": PUBLISHED[family], "tie_word_embeddings": False}
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **given))
    shape = shape_of({"model_type": family, **given})
    tower = shape.tower
    assert tower is not None
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert tower.parameters == sum(parameter.numel() for parameter in model.model.visual.parameters())


CHECKPOINTED = {"activation_checkpointing": True}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "checkpointing": ("qwen2_vl", {}),
    "no checkpointing": ("qwen2_5_vl", {"training": {}}),
    "deeper features": ("qwen3_vl", {"training": {}}),
    "little text": ("qwen2_5_vl", {"answer_tokens": (50, 50)}),
    "frozen": ("qwen3_vl", {"vision_tower": "frozen"}),
    "reference": ("qwen2_vl", {"learns": False}),
}
BY_NIGHT = ("no checkpointing", "reference")
PROMPT, PICTURE, ANSWERS = 4296, 4096, (2000, 2000)


def run_of(directory: Path, case: str) -> FakeRun:
    family, fields = CASES[case]
    directory = directory / family
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(family)))
    given: dict[str, Any] = {"prompt_tokens": PROMPT, "answer_tokens": ANSWERS, "training": CHECKPOINTED}
    return FakeRun(directory=str(directory), picture_tokens=PICTURE, **{**given, **fields})


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The fake step of a case, on CUDA tensors; all of its tier are run at the first call."""
    if compiler() is None:
        pytest.skip("fake CUDA tensors need a C++ compiler")

    @cache
    def all_of_them(by_night: bool) -> dict[str, dict[str, Any]]:
        directory = tmp_path_factory.mktemp("models")
        cases = [case for case in CASES if (case in BY_NIGHT) == by_night]
        asked = json.dumps([asdict(run_of(directory, case)) for case in cases])
        command = [sys.executable, "-m", "tandem.planning.trace.step"]
        printed = subprocess.run(command, input=asked, text=True, stdout=subprocess.PIPE, check=True).stdout
        return dict(zip(cases, map(json.loads, printed.splitlines()), strict=True))

    return lambda case: all_of_them(case in BY_NIGHT)[case]


def expected_of(case: str) -> dict[str, Memory]:
    family, fields = CASES[case]
    answers = fields.get("answer_tokens", ANSWERS)
    engine = FsdpSizes(
        shape_of(config(family)),
        learns=fields.get("learns", True),
        tokens=PROMPT + sum(answers) - len(answers),
        predicted=sum(answers),
        reduce_once=True,
        checkpointing=bool(fields.get("training", CHECKPOINTED)),
        tower_learns=fields.get("vision_tower") != "frozen",
        picture_tokens=PICTURE,
    )
    assert engine.tower is not None
    # A run keeps features of as many pictures as there is room for; the fake one shows a single picture.
    one = Memory(buffers=engine.tower.features())
    return {
        phase: memory + Memory(buffers=one.buffers - memory.buffers) if memory.buffers else memory
        for phase, memory in phases(engine).items()
    }


COMPARED = [(case, phase) for case in CASES for phase in ("forward", "backward", "step")]
for nothing in (("reference", "backward"), ("reference", "step")):
    COMPARED.remove(nothing)
COMPARED.remove(("frozen", "backward"))  # which has no pictures to see: the fake one saw its only picture before


@NEEDS_FEATURES
@pytest.mark.parametrize(
    ("case", "phase"),
    [pytest.param(*pair, marks=[pytest.mark.nightly] if pair[0] in BY_NIGHT else []) for pair in COMPARED],
)
def test_formulas_are_within_five_percent_of_the_fake_step(
    case: str, phase: Any, traced: Callable[[str], dict[str, Any]]
) -> None:
    """Of all, and of activations within ten."""
    expected, peak = expected_of(case)[phase], traced(case)["peaks"][phase]
    assert abs(expected.total / peak["total"] - 1) < 0.05, (expected, peak["by_cause"])
    if phase != "step":
        assert abs(expected.activations / peak["by_cause"]["activations"] - 1) < 0.1, (expected, peak["by_cause"])


@NEEDS_FEATURES
def test_attention_of_towers_is_a_flash_kernel(traced: Callable[[str], dict[str, Any]]) -> None:
    operations = traced("little text")["operations"]
    assert operations["aten._scaled_dot_product_flash_attention.default"]
    assert not [name for name in operations if "_safe_softmax" in name]


@NEEDS_FEATURES
@pytest.mark.parametrize("training", [{}, pytest.param(CHECKPOINTED, marks=pytest.mark.nightly)], ids=str)
def test_the_fake_step_is_what_the_allocator_says(training: dict[str, Any], tmp_path: Path) -> None:
    """On a CPU, with a picture, in both passes; where its patches stand is not counted, which is little but here."""
    whole = make_config("qwen2_5_vl", make_tokenizer()).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(whole))
    run = FakeRun(str(tmp_path), 150, (150, 90), device="cpu", dtype="float32", training=training, picture_tokens=120)
    expected = {phase: peak.total for phase, peak in trace(run).items() if phase != "operations"}
    model = on_meta_device(run, tmp_path)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor, std=0.02)
    with fake_tower(run, model, tmp_path) as tower:
        engine = make_engine(run, model, tower)
        batch = [micro_batch(run), micro_batch(run)]
        for phase, call in {
            "forward": lambda: engine.forward(batch),
            "backward": lambda: engine.forward_backward(batch, Loss()),
        }.items():
            before = held_by(engine)
            assert abs(expected[phase] / (before + most_allocated(call)) - 1) < 0.02, phase


def test_the_command_reads_them_and_says_what_it_does_not_count(tmp_path: Path) -> None:
    whole = config("qwen2_5_vl", depth=32)
    AutoConfig.for_model(**whole).save_pretrained(tmp_path)
    given = ["plan", str(ROOT / "recipes/gsm8k_grpo.yaml"), f"model.path={tmp_path}", "model.dtype=bfloat16"]
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 0, shown.output
    assert "not counted: what pictures take" in shown.output
    told = [*given, "data.images.max_image_tokens=900", "--search"]
    trained, frozen = (CliRunner().invoke(app, [*told, f"model.vision_tower={how}"]) for how in ("train", "frozen"))
    assert trained.exit_code == frozen.exit_code == 0
    assert "not counted" not in trained.output
    assert _seconds(trained.output) > _seconds(frozen.output), "a tower that learns sees pictures in every pass"


def test_what_towers_keep_of_pictures_in_host_memory(tmp_path: Path) -> None:
    """As many bytes as `tandem/models/tower.py` keeps: of each role's pixels, of the native engine's, of features."""
    assert KEPT_PIXELS == KEPT_FEATURES == _KEPT_BYTES
    AutoConfig.for_model(**config("qwen2_5_vl", depth=32)).save_pretrained(tmp_path)

    def host(*overrides: str) -> HostMemory:
        given = [f"model.path={tmp_path}", "model.dtype=bfloat16", "cluster.ranks=2", *overrides]
        (found,) = hosts(load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", given))
        return found

    shown, vllm = "data.images.max_image_tokens=900", "generation={type: vllm}"
    frozen = "model.vision_tower=frozen"
    assert (host().pictures, host(shown).pictures, host(shown, vllm).pictures) == (0, 3 * _KEPT_BYTES, 2 * _KEPT_BYTES)
    assert host(shown).models - host().models == _KEPT_BYTES, "the reference's features"
    assert host(shown, frozen).models - host(frozen).models == 2 * _KEPT_BYTES, "and the policy's"


def _seconds(output: str) -> float:
    line = next(line for line in output.splitlines() if "as it is:" in line)
    return float(line.split("as it is: ")[1].split(" s:")[0])
