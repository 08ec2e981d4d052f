"""AdamW whose moments are 8-bit codes with a scale a block (Dettmers et al. 2022, arXiv:2110.02861).

    codes, scales --values--> moments, some rows at a time --AdamW--> new ones --nearest value--> codes, scales

A block lies in one row of a weight, so no rank's shard cuts one: codes and scales are sharded as the weight itself is,
and a step is the same at any number of ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.training.dtensor_parts import local_shard
from tandem.training.optimizers.adamw_8bit import LARGEST_BLOCK, NUMBERS_AT_ONCE

LEAST_BLOCK = 32
"""Rows whose length has no divisor from this to `LARGEST_BLOCK` have no blocks."""
LEAST_WEIGHT = 4096
"""Numbers of a weight; the moments of smaller ones, as of norms and biases, stay float32."""


def block_of(shape: Sequence[int]) -> int | None:
    """Numbers in a block of this weight's moments; None where they stay float32."""
    shape = torch.Size(shape)
    if len(shape) < 2 or shape.numel() < LEAST_WEIGHT:
        return None
    row = shape[1:].numel()
    return next((size for size in range(LARGEST_BLOCK, LEAST_BLOCK - 1, -1) if row % size == 0), None)


class BlockwiseAdamW(torch.optim.Optimizer):
    """State: `step`; `exp_avg`, `exp_avg_sq`: codes in the shape of the weight; `…_scale`: `[rows, blocks a row]`."""

    def __init__(
        self, weights: Sequence[nn.Parameter], betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        """Each of `weights` has a block (`block_of`). The caller sets the group's `lr` before each step."""
        super().__init__(weights, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for weight in weights:
            self.state[weight] = {"step": torch.zeros((), device=weight.device)}
            for moment in ("exp_avg", "exp_avg_sq"):
                codes = torch.zeros_like(weight.detach(), dtype=torch.uint8)
                self.state[weight] |= {moment: codes, f"{moment}_scale": _scales(weight)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Weights without gradient are passed by."""
        (group,) = self.param_groups
        moving = [weight for weight in group["params"] if weight.grad is not None]
        codes = {device: (_Code(True, device), _Code(False, device)) for device in {one.device for one in moving}}
        for weight in moving:
            self.state[weight]["step"] += 1
            for rows in _rows(local_shard(weight)):
                self._move(weight, rows, *codes[weight.device])

    def _move(self, weight: nn.Parameter, rows: slice, means: "_Code", squares: "_Code") -> None:
        """These rows of what this rank holds."""
        (group,) = self.param_groups
        gradient, state = _matrix(weight.grad, rows), self.state[weight]
        mean_codes, mean_scales = _matrix(state["exp_avg"], rows), _matrix(state["exp_avg_scale"], rows)
        square_codes, square_scales = _matrix(state["exp_avg_sq"], rows), _matrix(state["exp_avg_sq_scale"], rows)
        (mean_share, square_share), steps = group["betas"], int(state["step"])
        mean = means.read(mean_codes, mean_scales).lerp_(gradient, 1 - mean_share)
        square = squares.read(square_codes, square_scales).mul_(square_share)
        square.addcmul_(gradient, gradient, value=1 - square_share)
        means.write(mean, mean_codes, mean_scales)
        squares.write(square, square_codes, square_scales)
        deviation = square.div_(1 - square_share**steps).sqrt_().add_(group["eps"])
        here = _matrix(weight, rows).mul_(1 - group["lr"] * group["weight_decay"])
        here.addcdiv_(mean, deviation, value=-group["lr"] / (1 - mean_share**steps))


class _Code:
    """The numbers that codes stand for, ascending: the paper's dynamic type.

    Of each power of ten from 1 down to 1e-6 the middles of equal parts of its upper nine tenths, half as many for a
    power less; besides 0 and 1.
    """

    def __init__(self, signed: bool, device: torch.device) -> None:
        found = [0.0, 1.0]
        for power in range(7):
            parts = 2 ** (power if signed else power + 1)
            middles = [10.0 ** (power - 6) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
            found += [*middles, *(-middle for middle in middles)] if signed else middles
        self._values = torch.tensor(sorted(found), device=device)
        self._between = (self._values[1:] + self._values[:-1]) / 2
        self._least = 0 if signed else 1
        """A square is never rounded to 0: epsilon alone would divide its mean."""

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        blocks = self._values[codes.int()].view(*scales.shape, -1)
        return blocks.mul_(scales.unsqueeze(-1)).view(codes.shape)

    def write(self, numbers: Tensor, codes: Tensor, scales: Tensor) -> None:
        """In place of `codes` and `scales`."""
        blocks = numbers.view(*scales.shape, -1)
        scales.copy_(blocks.abs().amax(-1))
        shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        nearest = torch.bucketize(shares, self._between, out_int32=True)
        codes.copy_(nearest.clamp_min_(self._least).view(codes.shape))


def _rows(weight: Tensor) -> Iterator[slice]:
    """Those of a weight that are made float32 together."""
    rows = len(weight)
    together = max(1, NUMBERS_AT_ONCE * rows // max(1, weight.numel()))
    return (slice(first, first + together) for first in range(0, rows, together))


def _matrix(tensor: Tensor | None, rows: slice) -> Tensor:
    """These rows, each in one piece."""
    assert tensor is not None
    return local_shard(tensor)[rows].flatten(1)


def _scales(weight: nn.Parameter) -> Tensor:
    """Zeros, one a block, sharded as the weight is."""
    block = block_of(weight.shape)
    assert block is not None
    shape = torch.Size((weight.shape[0], weight.shape[1:].numel() // block))
    local = torch.zeros(len(local_shard(weight)), shape[1], device=weight.device)
    if not isinstance(weight, DTensor):
        return local
    where = (weight.device_mesh, weight.placements)
    scales = DTensor.from_local(local, *where, run_check=False, shape=shape, stride=(shape[1], 1))
    return scales.to(weight.device)  # which is not that of the mesh when the weight is offloaded
