"""Muon (Jordan et al. 2024) on matrices that lie in shards: each is put together on one rank, and no two on the same.

    gradient --momentum--> update, in shards --gather--> whole, on its rank --Newton-Schulz--> nearly orthogonal
        --scatter--> in shards --> the masters

What is done to shards is element by element, and what is whole is computed once, by torch's own Muon: the step does not
depend on the number of ranks. It is as long as AdamW's (Liu et al. 2025, arXiv:2502.16982): whatever a matrix's shape,
its root mean square is about 0.2 times the learning rate.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.training.dtensor_parts import local_shard, shards_of


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that Muon moves: the body's matrices, but for embeddings.

    Norms, biases, embeddings, output layers and weights of three dimensions or more (a mixture's experts, which are one
    weight together) are for AdamW.
    """
    others = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    if isinstance(model, PreTrainedModel):
        others |= {p for child in model.children() if child is not model.base_model for p in child.parameters()}
    return {p for p in model.parameters() if p.ndim == 2} - others


class ShardedMuon(torch.optim.Optimizer):
    """Nesterov's momentum, then Newton-Schulz; weight decay is decoupled, as AdamW's. State: `momentum_buffer`."""

    def __init__(self, matrices: Sequence[nn.Parameter], momentum: float, weight_decay: float) -> None:
        """The caller sets the learning rate, `lr` of the one parameter group, before each step."""
        super().__init__(matrices, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})
        for matrix in matrices:
            self.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix.detach())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Matrices without gradient are passed by; every rank has gradients of the same ones."""
        (group,) = self.param_groups
        moving = [matrix for matrix in group["params"] if matrix.grad is not None]
        for together in _rounds(moving):
            updates = [self._momentum(matrix, group["momentum"]) for matrix in together]
            for matrix, direction in zip(together, _whitened(together, updates), strict=True):
                local_shard(matrix).mul_(1 - group["lr"] * group["weight_decay"])
                local_shard(matrix).add_(direction.to(matrix.device), alpha=group["lr"])

    def _momentum(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        """This rank's part of the way to go."""
        assert matrix.grad is not None
        gradient, buffer = local_shard(matrix.grad), local_shard(self.state[matrix]["momentum_buffer"])
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def _rounds(matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """As many at a time as ranks share one, the largest first: ranks have one each, of about the same size."""
    ordered = sorted(matrices, key=lambda matrix: -matrix.numel())
    size = shards_of(ordered[0]) if ordered else 1
    for first in range(0, len(ordered), size):
        yield ordered[first : first + size]


def _whitened(matrices: Sequence[nn.Parameter], updates: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each matrix's step for a learning rate of 1."""
    shards = shards_of(matrices[0])
    if shards == 1:
        return [_newton_schulz(update, torch.zeros_like(update)) for update in updates]
    placed: Any = matrices[0]
    mesh = placed.device_mesh
    group, own = mesh.get_group(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    parts = [_padded(u.to(mesh.device_type), -(-m.shape[0] // shards)) for m, u in zip(matrices, updates, strict=True)]
    gathered = parts[0].new_empty(0)
    works: list[Any] = []
    for owner, part in enumerate(parts):
        pieces = None
        if owner == own:
            gathered = part.new_empty(shards * len(part), part.shape[1])
            pieces = list(gathered.chunk(shards))
        works.append(dist.gather(part, pieces, group=group, group_dst=owner, async_op=True))
    _wait(works)
    whole = torch.zeros_like(gathered)
    if own < len(matrices):
        rows = matrices[own].shape[0]
        _newton_schulz(gathered[:rows], whole[:rows])
    pieces = list(whole.chunk(shards))
    works = [
        dist.scatter(part, pieces if owner == own else None, group=group, group_src=owner, async_op=True)
        for owner, part in enumerate(parts)
    ]
    _wait(works)
    return [part[: len(update)] for part, update in zip(parts, updates, strict=True)]


def _newton_schulz(update: Tensor, zeros: Tensor) -> Tensor:
    """What torch's Muon without momentum adds to `zeros`, which it is then, at a learning rate of 1."""
    matrix = nn.Parameter(zeros)
    matrix.grad = update
    torch.optim.Muon([matrix], 1.0, weight_decay=0, momentum=0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    return matrix.detach()


def _padded(part: Tensor, rows: int) -> Tensor:
    """With zeros below, as long as every rank's."""
    return nn.functional.pad(part, (0, 0, 0, rows - len(part))) if len(part) < rows else part.contiguous()


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
