"""Sizes settle, keep to their limits, and are those of transformers' processor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tandem.pictures.layouts.base import MAX_RATIO
from tandem.pictures.sizes import resized, token_grid

SIDES = st.integers(1, 6000)
FACTORS = st.sampled_from([28, 32])


@given(SIDES, SIDES, FACTORS, st.integers(1, 8), st.integers(16, 1280))
def test_a_size_settles_within_its_limits(height: int, width: int, factor: int, least: int, most: int) -> None:
    limits = (factor, least * factor**2, most * factor**2)
    if max(height, width) > MAX_RATIO * min(height, width):
        with pytest.raises(ValueError, match=f"{MAX_RATIO} times"):
            resized(height, width, *limits)
        return
    size = resized(height, width, *limits)
    rows, columns = token_grid(*size, factor)
    assert (rows * factor, columns * factor) == size
    assert least <= rows * columns <= most
    assert resized(*size, *limits) == smart_resize(*size, *limits) == size, "a processor that follows changes nothing"


@given(SIDES, SIDES)
def test_one_pass_is_transformers(height: int, width: int) -> None:
    limits = (28, 56 * 56, 1280 * 28 * 28)
    if max(height, width) <= MAX_RATIO * min(height, width):
        once = smart_resize(height, width, *limits)
        if smart_resize(*once, *limits) == once:
            assert resized(height, width, *limits) == once


def test_a_thin_picture_takes_more_than_one_pass() -> None:
    limits = (28, 28 * 28, 16 * 28 * 28)
    assert smart_resize(28, 28 * 150, *limits)[1] > 16 * 28
    assert resized(28, 28 * 150, *limits) == (28, 16 * 28)


def test_what_has_no_size_is_told() -> None:
    with pytest.raises(ValueError, match="no content"):
        resized(0, 5, 28, 784, 7840)
    with pytest.raises(ValueError, match="no whole number of tokens between min_pixels 2,000 and max_pixels 2,100"):
        resized(40, 60, 28, 2000, 2100)
