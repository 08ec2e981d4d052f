"""Tiny random models that see pictures, made in a second; rows of text and pictures for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.tiles.task import SIDE, write_model
from tandem.pictures.store import PictureStore
from tandem.types import IntArray, Picture

FAMILIES = tuple(SIDE)


def make_model(family: str, directory: Path) -> Path:
    """With weights by which log-probs depend on pictures and positions."""
    write_model(directory, family, draw)
    return directory


@torch.no_grad()
def draw(model: Any) -> None:
    """Give a model such weights."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))


def store_pictures(store: PictureStore, family: str, grids: Sequence[tuple[int, int]]) -> list[Picture]:
    """A picture of noise for each grid of tokens; `place` is still 0."""
    drawn, side = np.random.default_rng(0), SIDE[family]
    return [
        Picture(store.add(drawn.integers(0, 256, (rows * side, columns * side, 3), np.uint8)), (rows, columns), 0)
        for rows, columns in grids
    ]


def prompt_of(tokenizer: Any, parts: Sequence[str | Picture]) -> tuple[IntArray, tuple[Picture, ...]]:
    """Token ids of one message of text and pictures, and the pictures where they stand."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    placeholder, found = tokenizer.convert_tokens_to_ids("<|image_pad|>"), list[Picture]()
    pictures = iter([part for part in parts if isinstance(part, Picture)])
    expanded: list[int] = []
    for token in ids:
        if token == placeholder:
            picture = next(pictures)
            found.append(Picture(picture.key, picture.grid, len(expanded)))
            expanded += [placeholder] * (picture.grid[0] * picture.grid[1])
        else:
            expanded.append(token)
    return np.array(expanded, np.int32), tuple(found)
