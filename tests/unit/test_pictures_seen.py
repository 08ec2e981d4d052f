"""Pictures in the files of trajectories, and on the page of a run."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from tandem.batching.packing import to_batch
from tandem.pictures.store import PictureStore
from tandem.tracking.base import TrackedRun
from tandem.tracking.samples import samples, table_of
from tandem.tracking.trackers.tensorboard import TensorBoardConfig, TensorBoardTracker
from tandem.tracking.trajectories import read_groups, read_trajectories, write_trajectories
from tandem.types import Branch, Group, Picture, Prompt, Score, Status, Trajectory

PLACEHOLDER = 7


def group(*pictures: Picture) -> Group:
    """Two answers to a prompt of the pictures, one after the other with a token between."""
    ids, shown = [1], list[Picture]()
    for picture in pictures:
        shown.append(replace(picture, place=len(ids)))
        ids += [PLACEHOLDER] * (picture.grid[0] * picture.grid[1]) + [2]
    prompt = Prompt(3, np.array(ids, np.int32), "what?", "tiles", "rg", pictures=tuple(shown))
    arrays = np.array([5, 6], np.int32), np.ones(2, np.bool_), np.zeros(2, np.float32), np.zeros(2, np.int32)
    answers = [Trajectory(prompt, sample, *arrays, "rg", Status.COMPLETED) for sample in range(2)]
    return Group(answers, [Score(1.0), Score(0.0)])


def stored(store: PictureStore, rows: int, columns: int) -> Picture:
    pixels = np.random.default_rng(rows).integers(0, 256, (28 * rows, 28 * columns, 3), np.uint8)
    return Picture(store.add(pixels), (rows, columns), 0)


def test_what_was_trained_on_is_read_again_with_its_pictures(tmp_path: Path) -> None:
    store = PictureStore(tmp_path / "pictures")
    groups = [group(stored(store, 1, 2), stored(store, 2, 2)), group()]
    batch = to_batch(groups)
    write_trajectories(tmp_path / "step_000001.parquet", 1, groups, batch)
    table = read_trajectories(tmp_path / "step_000001.parquet")
    assert table["prompt_ids"][0].as_py() == [1, 7, 7, 2, 7, 7, 7, 7, 2]
    again = to_batch(read_groups(tmp_path / "step_000001.parquet", 1))
    assert again.prompt_ids.tolist() == batch.prompt_ids.tolist() == 2 * [1, -1, -1, 2, -2, -2, -2, -2, 2] + [1, 1]
    assert again.pictures == batch.pictures


def test_what_a_tool_has_shown_is_read_again(tmp_path: Path) -> None:
    """In the first branch of a conversation, and in a further one."""
    store = PictureStore(tmp_path / "pictures")
    (opened,), shown = group(stored(store, 1, 2)).trajectories[:1], stored(store, 2, 1)
    ids = np.array([5, PLACEHOLDER, PLACEHOLDER, 6], np.int32)
    arrays = ids, ids != PLACEHOLDER, np.zeros(4, np.float32), np.zeros(4, np.int32)
    here = (replace(shown, place=len(opened.prompt.token_ids) + 1),)
    further = Branch(opened.prompt.token_ids[:4], *arrays, pictures=(*opened.prompt.pictures, replace(shown, place=5)))
    trajectory = Trajectory(opened.prompt, 0, *arrays, "rg", Status.COMPLETED, pictures=here, branches=(further,))
    groups = [Group([trajectory], [Score(1.0)])]
    batch = to_batch(groups)
    write_trajectories(tmp_path / "step_000001.parquet", 1, groups, batch)
    assert read_trajectories(tmp_path / "step_000001.parquet")["response_ids"].to_pylist() == [[5, 7, 7, 6]] * 2
    (again,) = read_groups(tmp_path / "step_000001.parquet", 1)
    assert again.trajectories[0].pictures == here and again.trajectories[0].prompt.pictures == opened.prompt.pictures
    assert again.trajectories[0].branches[0].pictures == further.pictures
    assert to_batch([again]).response_ids.tolist() == batch.response_ids.tolist() == [5, -2, -2, 6] * 2


def test_a_step_without_pictures_has_none(tmp_path: Path) -> None:
    groups = [group()]
    write_trajectories(tmp_path / "step_000001.parquet", 1, groups, to_batch(groups))
    assert read_trajectories(tmp_path / "step_000001.parquet")["pictures"].null_count == 2
    assert [row["pictures"] for row in samples([tmp_path / "step_000001.parquet"])] == [[], []]


def test_the_page_shows_small_ones(tmp_path: Path) -> None:
    """And says of how many it shows none: here of one that is lost."""
    store = PictureStore(tmp_path / "pictures")
    groups = [group(stored(store, 1, 2), stored(store, 9, 6), Picture("ab" * 32, (1, 1), 0))]
    write_trajectories(tmp_path / "step_000001.parquet", 1, groups, to_batch(groups))
    first, *_ = samples([tmp_path / "step_000001.parquet"], store)
    assert first["more_pictures"] == 1
    sizes = list[tuple[int, int]]()
    for shown in first["pictures"]:
        kind, _, data = shown.partition(",")
        assert kind == "data:image/png;base64"
        sizes.append(Image.open(io.BytesIO(base64.b64decode(data))).size)
    assert sizes == [(64, 32), (85, 128)]


def test_trackers_get_small_ones(tmp_path: Path) -> None:
    """TensorBoard's are read back; a lost picture is left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = PictureStore(tmp_path / "pictures")
    groups = [group(stored(store, 1, 2), Picture("ab" * 32, (1, 1), 0))]
    write_trajectories(tmp_path / "step_000001.parquet", 1, groups, to_batch(groups))
    table = table_of(tmp_path / "step_000001.parquet", 1, store)
    assert [[pixels.shape for pixels in sample.pictures] for sample in table] == [[(32, 64, 3)]]
    tracker = TensorBoardTracker(TensorBoardConfig(), TrackedRun(tmp_path, "a", -1, {}, {}))
    tracker.log_samples(1, "samples", table)
    tracker.close("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("samples/0/0")
    assert (Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB").tobytes()) == table[0].pictures[
        0
    ].tobytes()
