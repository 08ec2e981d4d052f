"""Mistral 3: any size within the tower's, in rows of tokens that each end with a token of its own."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.pictures.layouts.base import BICUBIC, Layout, ModelFiles, TokenGrid, one_size_only, resize
from tandem.pictures.store import Pixels
from tandem.types import IntArray

if TYPE_CHECKING:
    from PIL.Image import Image

_LONGEST_EDGE = 1024
"""Of Pixtral's processor, where the directory states none."""
_PATCH = 16
"""Of its tower, where config.json says nothing."""


@dataclass(frozen=True, slots=True)
class RowBreakLayout:
    """`[IMG]` for each token of a row, `[IMG_BREAK]` after each row but the last, `[IMG_END]` after that."""

    files: ModelFiles
    factor: int
    """Pixels along one side of what is one token: patch size times merge size."""
    longest: tuple[int, int]
    """Height and width, at most."""
    resample: int
    row_end: int
    picture_end: int

    @property
    def name(self) -> str:
        return f"rows-{self.factor}-{self.longest[0]}-{self.longest[1]}-{self.resample}"

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Layout:
        mend = "set `size` in the image processor's file, and leave them out"
        one_size_only(self.files, min_pixels, max_pixels, mend)
        return self

    def fit(self, image: "Image") -> Pixels:
        height, width = image.height, image.width
        ratio = max(height / self.longest[0], width / self.longest[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = ((side - 1) // self.factor + 1 for side in (height, width))
        if rows == 0 or columns == 0:
            raise ValueError(f"{image.width} x {image.height} pixels leave no pixel of one side within {self.longest}")
        return np.array(resize(image, rows * self.factor, columns * self.factor, self.resample))

    def shape(self, height: int, width: int) -> TokenGrid:
        return TokenGrid((height // self.factor, width // self.factor))

    def tokens(self, grid: tuple[int, int], tiles: tuple[int, int]) -> IntArray:
        rows, columns = grid
        found = np.full((rows, columns + 1), self.files.placeholder, np.int32)
        found[:, -1] = self.row_end
        found[-1, -1] = self.picture_end
        return found.ravel()


def mistral3(files: ModelFiles) -> Layout:
    tower = files.vision.get("model_type", "pixtral")
    if tower != "pixtral":
        files.refuse(f"config.json: a Mistral 3 whose tower is {tower} is not supported; those with pixtral are")
    patch, merge = files.of_vision("patch_size", _PATCH), files.config.get("spatial_merge_size", 2)
    size = files.processor.get("size") or _LONGEST_EDGE
    size = {"longest_edge": size} if isinstance(size, int) else size
    edge = size.get("longest_edge")
    longest = (edge, edge) if edge else (size.get("height", 0), size.get("width", 0))
    if min(longest) < patch * merge or max(longest) > files.of_vision("image_size", 1540):
        told = f"the image processor's file makes pictures of up to {longest} pixels"
        files.refuse(f"{told}, which the tower of config.json does not take; take both files of one model")
    row_end, picture_end = files.token("[IMG_BREAK]"), files.token("[IMG_END]")
    resample = files.processor.get("resample", BICUBIC)
    return RowBreakLayout(files, patch * merge, longest, resample, row_end, picture_end)
