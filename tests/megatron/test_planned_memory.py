"""Planning's formulas of Megatron-Core against real engines on CPUs."""

import json
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is in .venv-megatron (scripts/megatron-env) only", allow_module_level=True)

from tandem.config.training import MegatronTrainingConfig
from tandem.planning.megatron_memory import MegatronSizes, at_stage
from tandem.planning.model_shape import shape_of
from tests.megatron.conftest import RunScript
from tests.megatron.planned import ANSWER, LAYOUTS, MODELS, PROMPT

QUICK = 1
"""Ranks."""
CASES = [
    pytest.param(ranks, place, marks=() if ranks == QUICK else pytest.mark.nightly)
    for ranks, layouts in LAYOUTS.items()
    for place in range(len(layouts))
]


@pytest.fixture(scope="module")
def measured(run_script: RunScript, nightly: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    directory, worlds = tmp_path_factory.mktemp("planned"), list(LAYOUTS) if nightly else [QUICK]
    assert run_script("planned", str(directory), worlds) == 0
    return {ranks: json.loads((directory / f"{ranks}.json").read_text()) for ranks in worlds}


@pytest.mark.parametrize(("ranks", "place"), CASES, ids=lambda value: str(value))
def test_each_rank_holds_what_is_planned(ranks: int, place: int, measured: dict[int, Any]) -> None:
    """Parameters to the last one, bytes within 1%: buffers are padded. Activations within 12%. What tokens gathered or
    sent between ranks take is let go by gloo's threads when they get to it, and busy experts hold more: within 35%."""
    name, layout = LAYOUTS[ranks][place]
    training = MegatronTrainingConfig(type="megatron", **layout)
    shape = shape_of(MODELS[name].to_dict())
    engine = MegatronSizes(shape, training, ranks, tokens=PROMPT + ANSWER - 1, predicted=ANSWER)
    for rank, found in enumerate(measured[ranks][place]):
        stage = rank * training.pipeline_parallel // ranks
        assert engine.dense(stage) + engine.experts(stage) == found["parameters"]
        planned = at_stage(engine, stage)
        for cause in ("weights", "gradients", "optimizer"):
            assert planned.causes()[cause] == pytest.approx(found[cause], rel=0.01), (rank, cause)
        in_a_pass = planned.activations + planned.logits
        tokens_travel = training.sequence_parallel or training.expert_parallel > 1
        assert in_a_pass == pytest.approx(found["activations"], rel=0.35 if tokens_travel else 0.12), rank
