"""Messages through shared memory, both ends in one process: regions are used again, and not too early."""

import pickle

import numpy as np
import pytest

from tandem.cluster.shared_memory import OUT_OF_BAND_BYTES, Arena, SharedFile, Slot, View


@pytest.fixture
def file() -> SharedFile:
    return SharedFile()


def start(place: Slot) -> int:
    return place[0][0]


def test_values_come_through_as_they_were(file: SharedFile) -> None:
    arena, view = Arena(file), View(file)
    large = np.arange(OUT_OF_BAND_BYTES, dtype=np.int32)
    value = {"small": np.arange(5.0), "large": large, "cut": large.reshape(2, -1)[:, ::3], "text": "ä", "none": None}
    read = view.read(arena.write(value))
    assert list(read) == list(value) and read["text"] == "ä" and read["none"] is None
    for name in ("small", "large", "cut"):
        np.testing.assert_array_equal(read[name], value[name])


def test_what_is_read_lies_in_the_region_and_cannot_be_changed_unless_asked(file: SharedFile) -> None:
    arena = Arena(file)
    place = arena.write(np.zeros(OUT_OF_BAND_BYTES, np.int8))
    ours, theirs = View(file, writable=True).read(place), View(file).read(place)
    ours[7] = 1
    assert theirs[7] == 1
    with pytest.raises(ValueError, match="read-only"):
        theirs[7] = 2


def test_a_region_is_free_when_no_array_of_it_is_left(file: SharedFile) -> None:
    arena, view = Arena(file), View(file)
    array = view.read(arena.write(np.arange(10_000)))
    part = array[5:8]
    del array
    assert view.released() == []
    other = arena.write(np.zeros(10_000))
    assert list(part) == [5, 6, 7]
    del part
    released = view.released()
    assert start(released[0]) == 0 and view.released() == []
    arena.free(released)
    assert start(arena.write(np.ones(10_000))) == 0
    assert start(other) > 0


def test_small_values_are_copied(file: SharedFile) -> None:
    arena, view = Arena(file), View(file)
    place = arena.write([np.arange(5), "text"])
    kept = view.read(place)
    assert view.released() == [place]
    assert list(kept[0]) == [0, 1, 2, 3, 4]


def test_a_region_waits_for_all_its_readers(file: SharedFile) -> None:
    arena = Arena(file)
    place = arena.write(b"first", readers=2)
    arena.free([place])
    assert start(arena.write(b"second")) > start(place)
    arena.free([place])
    assert start(arena.write(b"third")) == start(place)


def test_gaps_are_used_where_they_fit_and_the_file_grows_where_they_do_not(file: SharedFile) -> None:
    arena, view = Arena(file), View(file)
    sizes = [20_000, 3_000_000, 50_000]
    places = [arena.write(np.full(size, number, np.uint8)) for number, size in enumerate(sizes)]
    arrays = [view.read(place) for place in places]
    arena.free([places[1]])
    assert start(places[1]) <= start(arena.write(np.full(2_000_000, 3, np.uint8))) < start(places[2])
    end = arena.write(np.full(9_000_000, 4, np.uint8))
    assert start(end) > start(places[2])
    assert view.read(end).sum() == 4 * 9_000_000
    assert [int(array.sum()) for array in (arrays[0], arrays[2])] == [0, 100_000]


def test_what_cannot_be_pickled_leaves_the_arena_as_it_was(file: SharedFile) -> None:
    arena = Arena(file)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        arena.write(lambda: None)
    assert start(arena.write(1)) == 0
