"""Qwen2-VL and its successors, GLM-4V: any size whose sides are multiples of what one token covers, head to tail."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tandem.errors import UserError
from tandem.pictures.layouts.base import Layout, ModelFiles, TokenGrid, resize
from tandem.pictures.sizes import enlarged, resized, token_grid
from tandem.pictures.store import Pixels
from tandem.types import IntArray

if TYPE_CHECKING:
    from PIL.Image import Image

_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 1280 * 28 * 28
"""Those of Qwen2-VL's processor, where the directory states none."""
_GLM_MIN_PIXELS, _GLM_MAX_PIXELS = 112 * 112, 15000 * 28 * 28
"""Those of GLM-4V's, which counts a picture's pixels twice: as two frames of a video."""


@dataclass(frozen=True, slots=True)
class Patches:
    """rows * columns placeholders and nothing else."""

    placeholder: int
    factor: int
    """Pixels along one side of what is one token: patch size times merge size."""
    min_pixels: int
    max_pixels: int
    at_least_a_token: bool = False
    """Sides that are shorter than a token are enlarged first."""

    @property
    def name(self) -> str:
        kind = "enlarged-" if self.at_least_a_token else ""
        return f"{kind}{self.factor}-{self.min_pixels}-{self.max_pixels}"

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Layout:
        least, most = min_pixels or self.min_pixels, max_pixels or self.max_pixels
        if most < max(least, self.factor**2):
            raise UserError(
                f"data.images.max_pixels: {most:,} is less than min_pixels, {least:,}, or than the "
                f"{self.factor**2:,} pixels that are one token of the model; raise it"
            )
        return replace(self, min_pixels=least, max_pixels=most)

    def fit(self, image: "Image") -> Pixels:
        size = (
            enlarged(image.height, image.width, self.factor) if self.at_least_a_token else (image.height, image.width)
        )
        height, width = resized(*size, self.factor, self.min_pixels, self.max_pixels)
        return np.array(resize(image, height, width))

    def shape(self, height: int, width: int) -> TokenGrid:
        return TokenGrid(token_grid(height, width, self.factor))

    def tokens(self, grid: tuple[int, int], tiles: tuple[int, int]) -> IntArray:
        return np.full(grid[0] * grid[1], self.placeholder, np.int32)


def qwen(files: ModelFiles) -> Layout:
    processor = files.processor
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS
    most = processor.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS
    return Patches(files.placeholder, factor_of(files), least, most)


def glm(files: ModelFiles) -> Layout:
    size = files.processor.get("size") or {}
    least, most = size.get("shortest_edge") or _GLM_MIN_PIXELS, size.get("longest_edge") or _GLM_MAX_PIXELS
    return Patches(files.placeholder, factor_of(files), -(-least // 2), most // 2, at_least_a_token=True)


def factor_of(files: ModelFiles) -> int:
    """UserError where the processor's file and the model's contradict each other."""
    patch, merge = files.of_vision("patch_size"), files.of_vision("spatial_merge_size")
    for name, ours in (("patch_size", patch), ("merge_size", merge)):
        if files.processor.get(name, ours) != ours:
            told = (
                f"{name} {files.processor[name]} in the image processor's file, {ours} in config.json's vision_config"
            )
            files.refuse(f"{told}; take both files of one model")
    return patch * merge
