"""LLaVA: every picture becomes one square of the tower's size, by cropping or by changing its shape."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.pictures.layouts.base import BICUBIC, Layout, ModelFiles, TokenGrid, one_size_only, resize
from tandem.pictures.store import Pixels
from tandem.types import IntArray

if TYPE_CHECKING:
    from PIL.Image import Image

_TOWERS = {"clip_vision_model": (1, 224, 32), "siglip_vision_model": (0, 224, 16)}
"""Model type of the tower -> features that it makes besides those of patches; image and patch size by default."""


@dataclass(frozen=True, slots=True)
class Square:
    """The same placeholders for every picture."""

    files: ModelFiles
    side: int
    """Pixels."""
    shortest_edge: int | None
    """To which a picture is resized before its middle is cut out; None: it is resized to the square."""
    background: tuple[int, ...] | None
    """The colour with which a picture is made square before all else."""
    resample: int
    grid: tuple[int, int]

    @property
    def name(self) -> str:
        edge, colour = self.shortest_edge or "all", "-".join(map(str, self.background or ()))
        return f"square-{self.side}-{edge}-{self.resample}{colour and '-on-'}{colour}"

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Layout:
        one_size_only(self.files, min_pixels, max_pixels, f"it sees {self.side} x {self.side} pixels; leave them out")
        return self

    def fit(self, image: "Image") -> Pixels:
        if self.background is not None:
            image = _padded(image, self.background)
        if self.shortest_edge is None:
            return np.array(resize(image, self.side, self.side, self.resample))
        short, long = sorted((image.height, image.width))
        longer = int(self.shortest_edge * long / short)
        height, width = (longer, self.shortest_edge) if image.height > image.width else (self.shortest_edge, longer)
        top, left = (height - self.side) // 2, (width - self.side) // 2
        pixels = np.array(resize(image, height, width, self.resample))
        return pixels[top : top + self.side, left : left + self.side]

    def shape(self, height: int, width: int) -> TokenGrid:
        return TokenGrid(self.grid)

    def tokens(self, grid: tuple[int, int], tiles: tuple[int, int]) -> IntArray:
        return np.full(grid[0] * grid[1], self.files.placeholder, np.int32)


def llava(files: ModelFiles) -> Layout:
    tower = files.vision.get("model_type", "clip_vision_model")
    if tower not in _TOWERS:
        files.refuse(
            f"config.json: a LLaVA whose tower is {tower} is not supported; those with {', '.join(_TOWERS)} are"
        )
    others, image_size, patch_size = _TOWERS[tower]
    processor, side = files.processor, files.of_vision("image_size", image_size)
    size = processor.get("size") or {}
    size = {"shortest_edge": size} if isinstance(size, int) else size
    crops = processor.get("do_center_crop", tower == "clip_vision_model")
    final = _sides(processor.get("crop_size") if crops else size, side)
    edge = size.get("shortest_edge", side) if crops else None
    if final != (side, side) or not processor.get("do_resize", True) or (crops and not (edge and edge >= side)):
        told = f"the image processor's file makes pictures of {final} pixels"
        files.refuse(f"{told}, and the tower takes {side} x {side}; take both files of one model")
    mean = processor.get("image_mean") or (0.0, 0.0, 0.0)
    background = tuple(int(value * 255) for value in mean) if processor.get("do_pad") else None
    grid = _grid(side // files.of_vision("patch_size", patch_size), others, files.config)
    return Square(files, side, edge, background, processor.get("resample", BICUBIC), grid)


def _grid(rows: int, others: int, config: dict[str, Any]) -> tuple[int, int]:
    """Where the model keeps other features than those of patches, or drops one of them, there are no rows."""
    dropped = config.get("vision_feature_select_strategy", "default") == "default"
    return (rows, rows) if others == dropped else (1, rows**2 + others - dropped)


def _sides(size: Any, default: int) -> tuple[int, int]:
    size = size or default
    return (size, size) if isinstance(size, int) else (size.get("height", 0), size.get("width", 0))


def _padded(image: "Image", colour: tuple[int, ...]) -> "Image":
    from PIL import Image

    side = max(image.size)
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
