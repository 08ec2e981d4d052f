"""Pictures are stored once, by content, and what is read is what was added."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tandem.errors import UserError
from tandem.pictures.recent import Recent
from tandem.pictures.store import PictureStore, Pixels


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_what_is_added_is_read(tmp_path: Path) -> None:
    store = PictureStore(tmp_path / "new" / "store")
    for seed, size in enumerate([(1, 1), (3, 200), (28, 56)]):
        pixels = noise(*size, seed)
        key = store.add(pixels)
        assert len(key) == 64
        assert np.array_equal(PictureStore(store.directory).read(key), pixels)


def test_the_same_picture_is_stored_once_and_its_shape_counts(tmp_path: Path) -> None:
    store = PictureStore(tmp_path)
    pixels = noise(4, 6)
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: store.add(pixels.copy()), range(32)))
    assert len(keys) == 1
    assert store.add(pixels[::-1]) not in keys
    assert store.add(pixels.reshape(6, 4, 3)) not in keys
    assert sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file()) == [".png"] * 3


def test_a_second_add_writes_nothing(tmp_path: Path) -> None:
    store = PictureStore(tmp_path)
    key = store.add(noise(4, 4))
    before = store.path(key).stat()
    store.add(noise(4, 4))
    after = store.path(key).stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


def test_an_empty_file_is_written_again(tmp_path: Path) -> None:
    """As a machine leaves one that loses power: the next start heals it."""
    store = PictureStore(tmp_path)
    path = store.path(store.add(noise(4, 4)))
    path.write_bytes(b"")
    assert (store.read(store.add(noise(4, 4))) == noise(4, 4)).all()


def test_missing_and_damaged_pictures_are_named_with_their_file(tmp_path: Path) -> None:
    store = PictureStore(tmp_path)
    key, other = store.add(noise(8, 8)), store.add(noise(8, 8, 1))
    path = store.path(key)
    whole = path.read_bytes()
    damages = {
        "truncated": whole[: len(whole) // 2],
        "flipped": whole[:60] + bytes([whole[60] ^ 4]) + whole[61:],
        "empty": b"",
        "text": b"no picture",
        "other": store.path(other).read_bytes(),
    }
    for damage in damages.values():
        path.write_bytes(damage)
        with pytest.raises(UserError, match=key) as caught:
            store.read(key)
        assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match=f"{key} is missing"):
        store.read(key)


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    recent: Recent[str, int] = Recent(2)
    recent.keep("a", 1)
    recent.keep("b", 2)
    assert recent.find("a") == 1
    recent.keep("c", 3)
    assert [recent.find(key) for key in "abc"] == [1, None, 3] and len(recent) == 2
