"""Each mend of Megatron-Core 0.16.1 is needed: without it the test's last assertion would not hold."""

from __future__ import annotations

import multiprocessing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is in .venv-megatron (scripts/megatron-env) only", allow_module_level=True)

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe import moe_utils

from tandem.training.megatron import fixes
from tests.megatron import engines
from tests.saving import save


def steps_of(engine: Any) -> set[float]:
    """The numbers of steps that AdamW has counted, over all weights."""
    return {
        float(state["step"])
        for part in engine._optimizer.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    engine = engines.engine()
    for _ in range(3):
        engine.optimizer_step()
    save(engine, tmp_path)
    return tmp_path


def test_the_router_finds_no_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    tokens, weight = torch.ones(3, 4), torch.ones(2, 4)
    with pytest.raises(NameError):
        moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    fixes.name_the_missing_gemm()
    assert moe_utils.router_gating_linear(tokens, weight, None, torch.float32).tolist() == [[4, 4]] * 3


def test_a_state_loads_although_adam_has_steps(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_set_main_param_and_optimizer_states"
    mended: Any = getattr(DistributedOptimizer, name)
    monkeypatch.setattr(DistributedOptimizer, name, mended.__wrapped__)
    with pytest.raises(KeyError, match="step"):
        engines.engine().load(saved)
    monkeypatch.setattr(DistributedOptimizer, name, mended)
    resumed = engines.engine()
    resumed.load(saved)
    assert steps_of(resumed) == {3.0}


def test_saving_starts_no_process(saved: Path) -> None:
    assert not multiprocessing.active_children()


def test_each_weight_has_its_own_steps(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mended: Any = DistributedOptimizer.load_state_dict
    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", mended.__wrapped__)
    resumed = engines.engine()
    resumed.load(saved)
    resumed.optimizer_step()
    assert steps_of(resumed) != {4.0}
    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", mended)
    resumed = engines.engine()
    resumed.load(saved)
    resumed.optimizer_step()
    assert steps_of(resumed) == {4.0}
