"""torch.compile of a model's layers while the engine passes rows through them: one set of graphs for all layers and all
lengths. A graph ends before attention, whose plan is another one in each pass.

Parameters, names and hooks stay where they are: a layer's forward pass is exchanged, inside of what shards it, adapts
it or computes it again. Importing this imports torch's compiler, which takes a second.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.errors import UserError
from tandem.models.attention import interface


class CompiledLayers:
    """The layers of a model, compiled at the first pass that needs them."""

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
        """UserError where the model has no layers that are modules of their own. `backend`: of torch.compile."""
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise UserError(
                f"training.compile: {type(model).__name__} has no layers to compile one by one; leave it out"
            )
        interface.leave_out_of_graphs()
        self._plain = {layer: layer.forward for layer in layers}
        compiled: Any = torch.compile
        self._compiled = {
            layer: compiled(forward, dynamic=True, backend=backend) for layer, forward in self._plain.items()
        }

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within it layers run compiled. Generation with the same modules runs them as they are."""
        for layer, forward in self._compiled.items():
            layer.forward = forward
        try:
            yield
        finally:
            for layer, forward in self._plain.items():
                layer.forward = forward
