"""InternVL and SmolVLM: a picture is cut into square tiles of the tower's size, and the whole of it is one more tile.

It is stored as it is cut, with the whole of it, small, in a row below at the left: what is stored says how many rows
and columns of tiles there are. A picture that is one tile is stored as that tile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.pictures.layouts.base import BICUBIC, Layout, ModelFiles, TokenGrid, one_size_only, resize
from tandem.pictures.store import Pixels
from tandem.types import IntArray

if TYPE_CHECKING:
    from PIL.Image import Image

_LANCZOS = 1
_INTERNVL_TILES = (1, 12)
"""How many at least and at most, where InternVL's directory says nothing."""
_MAX_SIDE = 4096
"""Pixels: SmolVLM's processor enlarges no picture beyond."""

Cut = Callable[["Image"], "tuple[Image, Image | None]"]
"""A picture -> one whose sides are multiples of a tile's, and the whole of it as one tile; None where it is one."""


@dataclass(frozen=True, slots=True)
class Tiles:
    files: ModelFiles
    name: str
    side: int
    """Pixels of a tile, along each side."""
    rows: int
    """Of features that the model makes of a tile, and their columns."""
    cut: Cut
    around: "Around"

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Layout:
        mend = "its image processor's file says into how many tiles a picture is cut; change that, and leave them out"
        one_size_only(self.files, min_pixels, max_pixels, mend)
        return self

    def fit(self, image: "Image") -> Pixels:
        canvas, small = self.cut(image)
        pixels = np.array(canvas)
        if small is None:
            return pixels
        below = np.zeros((self.side, pixels.shape[1], 3), np.uint8)
        below[:, : self.side] = np.asarray(small)
        return np.concatenate((pixels, below))

    def shape(self, height: int, width: int) -> TokenGrid:
        down, across = height // self.side, width // self.side
        if (down, across) == (1, 1):
            return TokenGrid((self.rows, self.rows))
        return TokenGrid((self.rows * ((down - 1) * across + 1), self.rows), (down - 1, across))

    def tokens(self, grid: tuple[int, int], tiles: tuple[int, int]) -> IntArray:
        """`grid` is that of the tiles one below the other."""
        of_tile = [self.files.placeholder] * self.rows**2
        return np.array(self.around.tokens(of_tile, grid[0] == self.rows, tiles), np.int32)


@dataclass(frozen=True, slots=True)
class Around:
    """The token ids that stand around tiles."""

    first: list[int]
    """Before all, where the picture is cut."""
    before: Callable[[int, int], list[int]]
    """Before the tile in a row and a column, from 0."""
    between_rows: list[int]
    before_whole: list[int]
    """After the last row of tiles, before the whole of the picture."""
    last: list[int]
    alone: list[int]
    """Before a picture that is not cut."""

    def tokens(self, of_tile: list[int], alone: bool, tiles: tuple[int, int]) -> list[int]:
        """`of_tile`: the placeholders of one."""
        if alone:
            return [*self.alone, *of_tile, *self.last]
        found = [*self.first]
        for row in range(tiles[0]):
            found += self.between_rows if row else []
            for column in range(tiles[1]):
                found += [*self.before(row, column), *of_tile]
        return [*found, *self.before_whole, *of_tile, *self.last]


def internvl(files: ModelFiles) -> Layout:
    """`<img>`, the placeholders of all tiles, `</img>`."""
    processor, side = files.processor, _side(files, 448)
    size = processor.get("size") or {"height": side, "width": side}
    if size != {"height": side, "width": side}:
        files.refuse(f"the image processor's file makes tiles of {size}, and the tower takes {side} x {side} pixels")
    rows = round(side // _one(files.of_vision("patch_size", 14)) * files.config.get("downsample_ratio", 0.5))
    least, most = processor.get("min_patches", _INTERNVL_TILES[0]), processor.get("max_patches", _INTERNVL_TILES[1])
    resample = processor.get("resample", BICUBIC)
    begin, end = [files.token("<img>")], [files.token("</img>")]
    around = Around(begin, lambda row, column: [], [], [], end, begin)

    def cut(image: "Image") -> "tuple[Image, Image | None]":
        down, across = _like(image.height, image.width, side, least, most)
        small = resize(image, side, side, resample) if down * across > 1 else None
        return resize(image, down * side, across * side, resample), small

    return Tiles(files, f"internvl-{side}-{least}-{most}-{resample}", side, rows, cut, around)


def _like(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of tiles whose shape is nearest to the picture's; of those that are equally near the last, from
    few tiles to many, of which the picture fills more than half."""
    ratio, best, nearest = width / height, (1, 1), math.inf
    shapes = [(down, across) for across in range(1, most + 1) for down in range(1, most + 1)]
    for down, across in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        if not least <= down * across <= most:
            continue
        far = abs(ratio - across / down)
        if far < nearest:
            nearest, best = far, (down, across)
        elif far == nearest and width * height > 0.5 * side * side * down * across:
            best = (down, across)
    return best


def smolvlm(files: ModelFiles) -> Layout:
    """Each tile after the number of its row and column, each row on a line of its own; then the whole picture."""
    processor, side = files.processor, _side(files, 224)
    tile = (processor.get("max_image_size") or {"longest_edge": 364}).get("longest_edge")
    if tile != side:
        files.refuse(f"the image processor's file makes tiles of {tile} pixels, and the tower takes {side} x {side}")
    rows = side // _one(files.of_vision("patch_size", 32)) // files.config.get("scale_factor", 2)
    edge = (processor.get("size") or {"longest_edge": 4 * 364}).get("longest_edge")
    if not edge or not processor.get("do_resize", True):
        files.refuse("the image processor's file must have a `size` with `longest_edge`; take it as published")
    splits, resample = processor.get("do_image_splitting", True), processor.get("resample", _LANCZOS)
    beside, whole, lines = [files.token("<fake_token_around_image>")], [files.token("<global-img>")], files.encode("\n")
    # The line end after the last row and the one before the whole picture may be one token together.
    before_whole = [*files.encode("\n\n"), *beside, *whole]

    def before(row: int, column: int) -> list[int]:
        return [*beside, files.token(f"<row_{row + 1}_col_{column + 1}>")]

    def cut(image: "Image") -> "tuple[Image, Image | None]":
        resized = resize(image, *_by_longer_side(image.height, image.width, edge), resample)
        if not splits:
            return resize(resized, side, side, resample), None
        canvas = resize(resized, *_whole_tiles(resized.height, resized.width, side), resample)
        small = resize(canvas, side, side, resample) if max(canvas.size) > side else None
        return canvas, small

    around = Around([], before, lines, before_whole, beside, [*beside, *whole])
    return Tiles(files, f"smolvlm-{side}-{edge}-{splits}-{resample}", side, rows, cut, around)


def _by_longer_side(height: int, width: int, edge: int) -> tuple[int, int]:
    """The longer side becomes `edge`, the other one an even number; none becomes longer than _MAX_SIDE."""
    ratio = width / height
    if width >= height:
        height, width = max(1, _even(int(edge / ratio))), edge
    else:
        height, width = edge, max(1, _even(int(edge * ratio)))
    ratio = width / height
    if width >= height and width > _MAX_SIDE:
        height, width = int(_MAX_SIDE / ratio), _MAX_SIDE
    elif height > width and height > _MAX_SIDE:
        height, width = _MAX_SIDE, int(_MAX_SIDE * ratio)
    return max(1, height), max(1, width)


def _whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """Both sides become multiples of a tile's: the longer one first, and the other one in proportion to that."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return height, width


def _even(size: int) -> int:
    return size + size % 2


def _side(files: ModelFiles, default: int) -> int:
    return _one(files.of_vision("image_size", default))


def _one(size: int | list[int]) -> int:
    """A size that may be given for height and width."""
    return size if isinstance(size, int) else size[0]
