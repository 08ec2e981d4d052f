"""The size that a picture is resized to, and so how many tokens it takes: the rule of Qwen2-VL and its successors.

Both sides become multiples of `factor`, the pixels along one side of a token (patch size times merge size), with as
little change of shape as that allows and between `min_pixels` and `max_pixels` in all.
"""

import math

from tandem.pictures.layouts.base import check_shape


def resized(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width that the rule leaves as they are: applied until it changes nothing.

    One pass is not enough for thin pictures with few tokens, and a processor that sees the picture later must find
    nothing to resize. ValueError where there is no such size.
    """
    check_shape(height, width)
    seen: set[tuple[int, int]] = set()
    size = (height, width)
    while (after := _one_pass(*size, factor, min_pixels, max_pixels)) != size:
        if after in seen:
            limits = f"min_pixels {min_pixels:,} and max_pixels {max_pixels:,}"
            raise ValueError(
                f"{width} x {height} pixels fit no whole number of tokens between {limits}; move them apart"
            )
        seen.add(after)
        size = after
    return size


def enlarged(height: int, width: int, factor: int) -> tuple[int, int]:
    """Both sides at least as long as `factor`, up to rounding, where one was shorter: GLM-4V's rule begins so."""
    check_shape(height, width)
    if min(height, width) >= factor:
        return height, width
    scale = max(factor / height, factor / width)
    return int(height * scale), int(width * scale)


def token_grid(height: int, width: int, factor: int) -> tuple[int, int]:
    """Rows and columns of the tokens of a resized picture."""
    assert height % factor == width % factor == 0
    return height // factor, width // factor


def _one_pass(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return rows * factor, columns * factor
