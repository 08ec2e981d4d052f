"""Encoded pictures are decoded once, upright and opaque, or refused with a reason."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_rows import animated, bomb, encoded, picture
from PIL import GifImagePlugin, Image, TiffImagePlugin

from tandem.pictures.layouts.patches import Patches
from tandem.pictures.prepare import BadPicture, Preparer, decode
from tandem.pictures.store import PictureStore

LAYOUT = Patches(7, 28, 28 * 28, 16 * 28 * 28)


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(decode(data, 1_000_000))


def test_a_picture_is_turned_upright() -> None:
    upright = picture()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it a quarter clockwise
    turned = encoded(upright.transpose(Image.Transpose.ROTATE_90), exif=exif)
    assert np.array_equal(decoded(turned), np.asarray(upright))


@pytest.mark.parametrize("kind", ["GIF", "TIFF"])
def test_a_million_frames_are_not_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may have as many: the second one says enough."""
    many = encoded(picture(), kind, save_all=True, append_images=[picture(30 + n, 30) for n in range(9)])
    plugin = GifImagePlugin.GifImageFile if kind == "GIF" else TiffImagePlugin.TiffImageFile
    seek, sought = plugin._seek, list[int]()
    monkeypatch.setattr(plugin, "_seek", lambda self, frame, *more: sought.append(frame) or seek(self, frame, *more))
    with pytest.raises(BadPicture, match="animated"):
        decoded(many)
    assert max(sought) <= 1


def test_what_is_transparent_is_white() -> None:
    pixels = np.zeros((2, 3, 4), np.uint8)
    pixels[0, :, 3] = 255
    for image in (Image.fromarray(pixels), Image.fromarray(pixels[..., [0, 3]], "LA")):
        shown = decoded(encoded(image))
        assert (shown[0] == 0).all() and (shown[1] == 255).all()
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert decoded(encoded(palette, transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_other_modes_become_rgb() -> None:
    deep = Image.fromarray(np.array([[0, 0x80FF, 0xFFFF]], np.uint16))
    assert decoded(encoded(deep))[..., 0].tolist() == [[0, 0x80, 255]]
    assert decoded(encoded(picture().convert("CMYK"), "JPEG")).shape == (40, 60, 3)
    assert decoded(encoded(picture().convert("1"))).shape == (40, 60, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "no picture"),
        (encoded(picture())[:-30], "damaged"),
        (bomb(), "more pixels than data.images.max_source_pixels"),
        (encoded(picture(1001, 1000)), "1,000 x 1,001 pixels are more than data.images.max_source_pixels, 1,000,000"),
        (animated(), "an animated GIF"),
        (encoded(picture(), "TIFF", save_all=True, append_images=[picture()]), "an animated TIFF, or one of several"),
        (encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"), "pixels of 32 bits"),
    ],
)
def test_what_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadPicture, match=reason):
        decode(data, 1_000_000)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]), st.data())
def test_damaged_bytes_are_a_picture_or_refused(kind: str, data: st.DataObject) -> None:
    whole = bytearray(encoded(picture(), kind))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(whole)))
    with suppress(BadPicture):
        assert decode(bytes(whole[:cut]), 1_000_000).mode == "RGB"


def test_a_second_start_decodes_nothing(tmp_path: Path) -> None:
    files = [encoded(picture(seed=seed)) for seed in range(5)]
    first = Preparer(PictureStore(tmp_path), LAYOUT, 1_000_000)
    made = [first.prepare(data) for data in files * 2]
    assert first.decoded == 5 and made[:5] == made[5:]
    (index,) = tmp_path.glob("sizes-*.jsonl")
    index.write_text(index.read_text()[:-10] + "\nnull\n")  # the last line was cut off
    again = Preparer(PictureStore(tmp_path), LAYOUT, 1_000_000)
    assert [again.prepare(data) for data in files] == made[:5]
    assert again.decoded == 1
    PictureStore(tmp_path).path(made[0].key).write_bytes(b"")  # the machine has lost power
    assert again.prepare(files[0]) == made[0] and again.decoded == 2
    smaller = Preparer(PictureStore(tmp_path), LAYOUT.limited(None, 4 * 28 * 28), 1_000_000)
    assert smaller.prepare(encoded(picture(200, 200))).size == (56, 56)


def test_what_is_stored_is_the_resized_picture(tmp_path: Path) -> None:
    store = PictureStore(tmp_path)
    made = Preparer(store, LAYOUT, 1_000_000).prepare(encoded(picture(100, 30)))
    assert made.size == (112, 28)
    expected = picture(100, 30).resize((28, 112), Image.Resampling.BICUBIC)
    assert np.array_equal(store.read(made.key), np.asarray(expected))
