"""Moments in 8 bits: which weights have them, what codes stand for, and how far steps are from AdamW's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tandem.training.optimizer import MasterOptimizer
from tandem.training.optimizers.adamw_8bit import AdamW8bitConfig
from tandem.training.optimizers.steps import blockwise_adamw
from tandem.training.optimizers.steps.blockwise_adamw import block_of


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((4096, 4096), 256),
        ((4864, 896), 224),
        ((896, 4864), 256),
        ((151_936, 3584), 256),
        ((8, 96, 40), 256),  # a mixture's experts: a row is one of them
        ((100, 41), 41),
        ((128, 37 * 41), 41),
        ((400, 31), None),  # too short a row
        ((20, 2 * 509), None),  # its divisors are 2 and 509
        ((131, 31 * 2), 62),
        ((63, 64), None),  # fewer than 4096 numbers
        ((9000,), None),
    ],
)
def test_blocks_divide_rows(shape: tuple[int, ...], block: int | None) -> None:
    assert block_of(shape) == block


def steps(spread: torch.Tensor, count: int = 20, weight_decay: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after as many steps of drawn gradients times `spread`, and those of torch's AdamW."""
    torch.manual_seed(0)
    ours, theirs = (nn.Linear(256, 32, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    how = {"lr": 1e-2, "weight_decay": weight_decay}
    adamw = MasterOptimizer(ours, AdamW8bitConfig(max_grad_norm=1e9, **how), count)
    reference = torch.optim.AdamW(theirs.parameters(), **how)
    for _ in range(count):
        gradient = torch.randn(32, 256) * spread
        ours.weight.grad, theirs.weight.grad = gradient.clone(), gradient.clone()
        adamw.step()
        reference.step()
    return ours.weight.detach(), theirs.weight.detach()


def test_a_first_step_is_adamws_and_later_ones_are_near() -> None:
    ours, theirs = steps(torch.tensor(1.0), count=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    ours, theirs = steps(torch.tensor(1.0))
    assert 1e-5 < (ours - theirs).abs().max() < 0.5 * 1e-2, "half a step, after twenty"


def test_numbers_much_smaller_than_their_blocks_largest_take_no_long_steps() -> None:
    """Over six powers of ten: a square that were rounded to 0 would be divided by epsilon alone."""
    ours, theirs = steps(torch.logspace(-6, 0, 256), weight_decay=0)
    assert (ours - theirs).abs().max() < 20 * 1e-2


def test_a_moment_is_two_bytes_and_a_scale_a_block_and_computed_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, _ = steps(torch.tensor(1.0), count=3)
    monkeypatch.setattr(blockwise_adamw, "NUMBERS_AT_ONCE", 5 * 256)
    parts, _ = steps(torch.tensor(1.0), count=3)
    assert torch.equal(whole, parts)
    layer = nn.Linear(256, 32, bias=False)
    kept = MasterOptimizer(layer, AdamW8bitConfig(), 1)._state()
    sizes = {name: tensor.nbytes for name, tensor in kept.items() if "exp_avg" in name}
    assert sum(sizes.values()) == 2 * layer.weight.numel() + 8 * layer.weight.numel() // 256
