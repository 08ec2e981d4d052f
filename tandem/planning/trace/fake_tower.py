"""Pictures of a fake step: the model's own tower on patches without memory, and numbers that it reads as they are.

How many patches a picture has, and which of them see one another, a tower asks of tensors. Those have their values
here, on the CPU; what it computes of patches is fake as everything else.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from tandem.models.tower import PictureTower
from tandem.pictures.store import Pixels
from tandem.types import Picture


class KnownNumbers(torch.Tensor):
    """A tensor with values in the midst of fake ones; what is computed of it alone has values, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            return args[0]
        with _disable_current_modes():
            return super().__torch_function__(func, types, args, kwargs or {})


class FakeTower(PictureTower):
    """The tower of a model on fake tensors."""

    def __init__(self, model: Any, path: Path) -> None:
        """`path`: a directory with the name of the family's image processor, which is asked for nothing."""
        super().__init__(model, path, _nobody_reads)
        self._sight = self._sight._replace(arguments=_arguments)
        self._merged: int = model.config.vision_config.spatial_merge_size
        self._numbers = math.prod(next(model.base_model.visual.parameters()).shape[1:])

    def _pixels_of(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        grids = [(picture.grid[0] * self._merged, picture.grid[1] * self._merged) for picture in pictures]
        return [torch.zeros(*grid, self._numbers) for grid in grids]


def _arguments(pixels: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    with _disable_current_modes():
        grids = torch.tensor([(1, *own.shape[:2]) for own in pixels]).as_subclass(KnownNumbers)
    return {"pixel_values": torch.cat([own.flatten(0, 1) for own in pixels]), "image_grid_thw": grids}


def _nobody_reads(_: str) -> Pixels:
    raise AssertionError("a fake step has no pixels")


def picture_of(tokens: int) -> Picture:
    """As square as so many tokens can be, at the beginning of a prompt."""
    rows = next(rows for rows in range(math.isqrt(tokens), 0, -1) if tokens % rows == 0)
    return Picture("0", (rows, tokens // rows), 0)


def mark(token_ids: Any, tokens: int) -> None:
    """The first so many tokens stand for picture 0."""
    token_ids[:tokens] = np.int32(-1)


@contextmanager
def towers_read_values(family: str, device: str) -> Iterator[None]:
    """What transformers' towers compute of grids has values; attention is the kernel that a GPU chooses."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    functional: Any = torch.nn.functional
    names = [name for name in vars(module) if name.startswith("get_vision_")]
    before, attention = {name: getattr(module, name) for name in names}, functional.scaled_dot_product_attention
    for name, function in before.items():
        setattr(module, name, _with_values(function, device))
    functional.scaled_dot_product_attention = _flash if device == "cuda" else _flash_of_cpu
    text: Any = getattr(module, "Qwen3VLTextModel", getattr(module, "Qwen3VLMoeTextModel", None))
    deeper = text and text._deepstack_process
    if text:
        text._deepstack_process = _deepstack
    try:
        yield
    finally:
        if text:
            text._deepstack_process = deeper
        functional.scaled_dot_product_attention = attention
        for name, function in before.items():
            setattr(module, name, function)


def _with_values(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    def call(grids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            found = function(grids.as_subclass(torch.Tensor), *args, **kwargs)
        return tree_map_only(torch.Tensor, place, found)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        """Bounds of rows are read, all else is computed with."""
        return tensor.as_subclass(KnownNumbers) if tensor.dtype == torch.int32 else tensor.to(device)

    return call


def _flash(query: Any, key: Any, value: Any, *_: Any, scale: float | None = None, **__: Any) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]


def _flash_of_cpu(query: Any, key: Any, value: Any, *_: Any, scale: float | None = None, **__: Any) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)[0]


def _deepstack(_: Any, hidden: torch.Tensor, places: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """As the model adds them, at places that need not be found: the first ones."""
    places = torch.arange(len(features), device=hidden.device)
    hidden, features = hidden.clone(), features.to(hidden.device, hidden.dtype)
    hidden[:, places] = hidden[:, places] + features
    return hidden
