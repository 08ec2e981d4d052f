"""Learning-rate schedules by hand, master weights, clipping and weight decay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from tandem.errors import EngineError
from tandem.training import optimizer
from tandem.training.copies import HostCopies
from tandem.training.optimizer import MasterOptimizer, learning_rate
from tandem.training.optimizers.adamw import AdamWConfig
from tests.storages import Storages


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "wanted"),
    [
        ("constant", 0, [8, 8, 8, 8, 8]),
        ("constant", 2, [4, 8, 8, 8, 8]),
        ("linear", 0, [8, 6.8, 5.6, 4.4, 3.2]),
        ("linear", 3, [8 / 3, 16 / 3, 8, 6, 4]),
        ("cosine", 2, [4, 8, 5 + 3 * 0.5**0.5, 5, 5 - 3 * 0.5**0.5]),
        ("cosine", 3, [8 / 3, 16 / 3, 8, 6.5, 3.5]),
        ("linear", 9, [8 / 9, 16 / 9, 24 / 9, 32 / 9, 40 / 9]),
    ],
)
def test_learning_rate(schedule: str, warmup_steps: int, wanted: list[float]) -> None:
    config = AdamWConfig(lr=8, schedule=schedule, warmup_steps=warmup_steps, min_lr_ratio=0.25)
    assert [learning_rate(config, step, 5) for step in range(5)] == pytest.approx(wanted)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_without_warm_up_rates_are_those_of_transformers_and_the_last_update_learns(schedule: str) -> None:
    config = AdamWConfig(lr=8, schedule=schedule, warmup_steps=0)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=8)
    scheduler = get_scheduler(schedule, theirs, num_warmup_steps=0, num_training_steps=7)
    for step in range(7):
        rate = learning_rate(config, step, 7)
        assert rate > 0 and rate == pytest.approx(theirs.param_groups[0]["lr"])
        theirs.step()
        scheduler.step()


def test_learning_rate_of_a_run_of_one_step_and_past_the_end() -> None:
    config = AdamWConfig(lr=8, schedule="linear")
    assert learning_rate(config, 0, 1) == 8
    assert learning_rate(config, 7, 5) == 0


def linear(weight: list[float], dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(len(weight), 1, bias=True, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([weight]))
        layer.bias.zero_()
    return layer


def test_the_gradient_norm_is_reported_before_clipping_and_clipped_over_all_parameters() -> None:
    layer = linear([0.0, 0.0])
    adamw = MasterOptimizer(layer, AdamWConfig(lr=0.1, max_grad_norm=1.0, betas=(0.0, 0.0), eps=1.0), 1)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    assert adamw.step() == {"grad_norm": 5.0, "lr": 0.1}
    # Clipped to (0.6, 0, 0.8); with both betas 0 and eps 1, AdamW moves by lr * g / (|g| + 1).
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[-0.1 * 0.6 / 1.6, 0.0]]))
    torch.testing.assert_close(layer.bias.detach(), torch.tensor([-0.1 * 0.8 / 1.8]))


def test_a_small_gradient_is_not_scaled_up() -> None:
    layer = linear([0.0])
    adamw = MasterOptimizer(layer, AdamWConfig(lr=1.0, betas=(0.0, 0.0), eps=1.0), 1)
    layer.weight.grad = torch.tensor([[0.25]])
    assert adamw.step()["grad_norm"] == 0.25
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[-0.2]]))


def test_weight_decay_is_for_matrices_only() -> None:
    layer = linear([2.0])
    with torch.no_grad():
        layer.bias.fill_(2.0)
    MasterOptimizer(layer, AdamWConfig(lr=0.5, weight_decay=0.1), 1).step()
    assert layer.weight.item() == pytest.approx(2.0 * (1 - 0.5 * 0.1)) and layer.bias.item() == 2.0


def test_a_step_without_gradients_still_follows_the_momentum() -> None:
    silent, zero = linear([1.0]), linear([1.0])
    for layer in (silent, zero):
        adamw = MasterOptimizer(layer, AdamWConfig(lr=0.1), 3)
        layer.weight.grad = torch.ones(1, 1)
        adamw.step()
        if layer is zero:
            layer.weight.grad, layer.bias.grad = torch.zeros(1, 1), torch.zeros(1)
        adamw.step()
    assert silent.weight.item() == zero.weight.item() < 0.85


def test_masters_keep_updates_that_bfloat16_would_lose() -> None:
    layer = linear([1.0], torch.bfloat16)
    adamw = MasterOptimizer(layer, AdamWConfig(lr=1e-4), 100)
    for step in range(100):
        layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        adamw.step()
        # bfloat16 below 1 has steps of 2^-8 = .0039: a single 1e-4 would be rounded away every time.
        assert step > 15 or layer.weight.item() == 1.0
    assert adamw.masters["weight"].item() == pytest.approx(0.99, abs=1e-5)
    assert layer.weight.item() == pytest.approx(0.99, abs=2**-8) and layer.weight.item() < 1.0


def test_bfloat16_gradients_of_micro_batches_are_added_in_float32() -> None:
    layer = linear([0.0], torch.bfloat16)
    MasterOptimizer(layer, AdamWConfig(), 1)
    for value in [256.0, *[1.0] * 8]:
        (layer.weight * value).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None and gradient.dtype == torch.float32 and gradient.item() == 264.0


def test_the_error_names_the_parameter_and_nothing_moves() -> None:
    layer = linear([1.0])
    adamw = MasterOptimizer(layer, AdamWConfig(lr=0.1), 1)
    layer.weight.grad, layer.bias.grad = torch.ones(1, 1), torch.tensor([torch.nan])
    with pytest.raises(EngineError, match=r"step 0: gradient norm is nan; not finite first in bias"):
        adamw.step()
    assert layer.weight.item() == 1.0


def test_frozen_parameters_stay_and_take_no_gradient() -> None:
    layer = linear([1.0])
    layer.bias.requires_grad_(False)
    adamw = MasterOptimizer(layer, AdamWConfig(lr=0.1), 1)
    layer.weight.grad = torch.ones(1, 1)
    adamw.step()
    assert list(adamw.masters) == ["weight"] and layer.bias.item() == 0 != layer.weight.item() - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_visits_for_the_step_steps_alike_and_is_never_there_as_a_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(optimizer, "_NUMBERS_AT_ONCE", 70)
    config = AdamWConfig(lr=0.1, max_grad_norm=0.5, weight_decay=0.1, schedule="linear", warmup_steps=1)

    def stack() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8, dtype=dtype) for _ in range(6)))

    stays, visits = stack(), stack()
    there, away = (
        MasterOptimizer(model, config, 6, state_offload=off) for model, off in ((stays, False), (visits, True))
    )
    for step in range(6):
        for model in (stays, visits):
            model(torch.arange(8, dtype=dtype) + step).square().sum().backward()
        with Storages() as storages:
            assert there.step() == away.step()
        # 72 numbers with two moments, at times a master, counters, and what the norms and the fused step need
        assert storages.most < 4 * 72 * (2 + (dtype is torch.bfloat16)) + 1000
        if step == 2:  # a run goes on with the other setting
            there.save(tmp_path, HostCopies()).write()
            visits = stack()
            away = MasterOptimizer(visits, config, 6, state_offload=True)
            away.load(tmp_path)
        for a, b in zip(stays.parameters(), visits.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert [tensor.device.type for tensor in away._state().values()] == ["cpu"] * len(away._state())


def test_weights_that_are_no_numbers_are_not_saved() -> None:
    layer = nn.Linear(2, 1)
    optimizer = MasterOptimizer(layer, AdamWConfig(lr=1e38, max_grad_norm=1.0), 1)
    optimizer.check_finite()
    layer(torch.ones(1, 2)).sum().backward()
    for _ in range(5):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with pytest.raises(EngineError, match=r"weights of \w+ are no finite.*rate is too high \(1e\+38\)"):
        optimizer.check_finite()
