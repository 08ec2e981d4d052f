"""Every layout of Megatron-Core against FSDP's engine at one rank: what the models say, and how they train."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is in .venv-megatron (scripts/megatron-env) only", allow_module_level=True)

from tests.megatron.conftest import RunScript
from tests.megatron.layouts import CRITIC, QUICK, WHOLE, Plan, Runs, name_of

Case = tuple[Any, ...]


def cases(runs: Runs) -> list[Case]:
    return [(ranks, name_of(layout), model) for ranks in runs for layout, models in runs[ranks] for model in models]


def layouts(plan: Plan) -> list[Case]:
    return [(ranks, name_of(layout)) for ranks in plan.runs for layout, _ in plan.runs[ranks]]


def memory(plan: Plan) -> list[Case]:
    return [(ranks, layout, model) for ranks in plan.measured for layout, model in plan.measured[ranks]]


def marked(whole: list[Case], quick: list[Case]) -> list[Any]:
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.nightly) for case in whole]


CASES = marked(cases(WHOLE.runs), cases(QUICK.runs))
AGAIN = marked(cases(WHOLE.resumed), cases(QUICK.resumed))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def findings(run_script: RunScript, nightly: bool, directory: Path) -> dict[int, Any]:
    assert run_script("layouts", str(directory), nightly) == 0
    return {ranks: torch.load(directory / f"{ranks}.pt") for ranks in (WHOLE if nightly else QUICK).runs}


def on_disk(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers holds all experts of a layer in two tensors; directories and other engines name each one."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if matched := re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up|down)_proj", name):
            for number, expert in enumerate(tensor):
                kinds = ("gate_proj", "up_proj") if matched[2] == "gate_up" else ("down_proj",)
                for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                    named[f"{matched[1]}.{number}.{kind}.weight"] = part
        else:
            named[name] = tensor
    return named


@pytest.mark.parametrize(("ranks", "layout", "model"), CASES)
def test_three_steps_equal_those_of_fsdp_at_one_rank(
    findings: dict[int, Any], ranks: int, layout: str, model: str
) -> None:
    found, wanted = findings[ranks][layout, model], findings[1]["fsdp", model]
    assert found["said"].keys() == wanted["said"].keys()
    for place, values in wanted["said"].items():
        assert found["said"][place] == pytest.approx(values, abs=1e-5), place
    for ours, theirs in zip(found["steps"], wanted["steps"], strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-5)
    trained = on_disk(wanted["weights"])
    assert found["weights"].keys() == trained.keys()
    for name, tensor in found["weights"].items():
        torch.testing.assert_close(
            tensor, trained[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name} {text}"
        )


@pytest.mark.parametrize(("ranks", "layout", "model"), [case for case in CASES if case.values[2] != CRITIC])
def test_what_crosses_a_bridge_in_parts_is_what_is_exported(
    findings: dict[int, Any], ranks: int, layout: str, model: str
) -> None:
    found, wanted = findings[ranks]["bridged", layout, model], findings[ranks][layout, model]["weights"]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=() if ranks in QUICK.losses else pytest.mark.nightly) for ranks in WHOLE.losses]
)
def test_every_loss_with_unequal_numbers_of_micro_batches(findings: dict[int, Any], ranks: int) -> None:
    """Two data-parallel groups, one of which packs its rows in more micro-batches than the other: of one rank each, and
    of two context-parallel ones."""
    wanted, found = findings[1]["losses"], findings[ranks]["losses"]
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert {key: found[name][key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(("ranks", "layout"), marked(layouts(WHOLE), layouts(QUICK)))
def test_every_family_is_exported_as_its_directory_has_it(
    directory: Path, findings: dict[int, Any], ranks: int, layout: str
) -> None:
    found = {key[2]: value for key, value in findings[ranks].items() if key[:2] == ("carried", layout)}
    assert found, "no model can lie so"
    for name, weights in found.items():
        wanted = load_file(directory / name / "model.safetensors")
        assert weights.keys() == wanted.keys()
        for key, tensor in weights.items():
            assert torch.equal(tensor, wanted[key]), f"{name} {key}"


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param({"tp2spep2"}, id="one"),
        pytest.param({"tp2sp", "pp2", "cp2", "tp2spep2", "tp2sppp2ep2"}, id="all", marks=pytest.mark.nightly),
    ],
)
def test_losses_of_routers_do_not_depend_on_the_layout(findings: dict[int, Any], layouts: set[str]) -> None:
    alone, plain = findings[1]["balanced", "plain"], findings[1]["plain", "qwen3_moe"]["steps"][0]
    assert abs(alone["grad_norm"] / plain["grad_norm"] - 1) > 0.01
    others = {
        key[1]: value
        for ranks in findings
        if ranks > 1
        for key, value in findings[ranks].items()
        if key[0] == "balanced"
    }
    assert others.keys() >= layouts
    for layout, found in others.items():
        assert found == pytest.approx(alone, rel=1e-5), layout


@pytest.mark.parametrize(("ranks", "layout", "model"), AGAIN)
def test_a_run_goes_on_in_another_layout(findings: dict[int, Any], ranks: int, layout: str, model: str) -> None:
    found, wanted = findings[ranks]["resumed", layout, model], findings[1]["fsdp", model]
    (step,) = found["steps"]
    assert {name: step[name] for name in wanted["steps"][2]} == pytest.approx(wanted["steps"][2], rel=1e-5)
    trained = on_disk(wanted["weights"])
    for name, tensor in found["weights"].items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", marked([(name,) for name in WHOLE.saved], [(name,) for name in QUICK.saved]))
def test_what_is_saved_loads_in_transformers(directory: Path, findings: dict[int, Any], model: str) -> None:
    kind: Any = AutoModelForTokenClassification if model == CRITIC else AutoModelForCausalLM
    loaded, report = kind.from_pretrained(directory / "saved" / model / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.config.architectures == [type(loaded).__name__]
    weights = on_disk(dict(loaded.named_parameters()))
    for name, tensor in findings[2]["saved", model].items():
        assert torch.equal(tensor, weights[name]), name


def test_tied_embeddings_in_a_pipeline_resume_with_the_mend_only(findings: dict[int, Any]) -> None:
    assert findings[2]["padding"] == [True, False]


def test_optimizer_state_of_spread_experts_loads_where_they_are_spread_only(findings: dict[int, Any]) -> None:
    assert "expert_parallel" in findings[2]["refused"]


@pytest.mark.parametrize(("ranks", "layout", "model"), marked(memory(WHOLE), memory(QUICK)))
def test_memory_is_what_the_page_says(
    directory: Path, findings: dict[int, Any], ranks: int, layout: dict[str, int], model: str
) -> None:
    """docs/megatron.md; norms, which all tensor ranks hold, are what is over."""
    sizes = {name: tensor.numel() for name, tensor in load_file(directory / model / "model.safetensors").items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    dense = sum(sizes.values()) - experts
    t, p, e = (layout.get(f"{kind}_parallel", 1) for kind in ("tensor", "pipeline", "expert"))
    wanted = 6 * (dense / (t * p) + experts / (e * p)), 12 * (dense + experts) / ranks
    assert findings[ranks]["memory", name_of(layout)] == pytest.approx(wanted, rel=0.01)
