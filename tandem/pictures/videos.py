"""Videos, as rows hold them: lists of frames -> stored steps of two frames, and when each of them is."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.config.data import VideosConfig
from tandem.pictures.layouts.videos import FRAMES, VideoLayout
from tandem.pictures.prepare import BadPicture, Prepared, Preparer
from tandem.pictures.sources import read_picture
from tandem.pictures.store import PictureStore
from tandem.types import Picture

_FRAMES = ("frames", "video")
_RATES = ("sample_fps", "fps")


class VideoSource(NamedTuple):
    """What a row says of a video."""

    frames: Sequence[Any]
    """Each is what a picture may be."""
    fps: float | None = None
    """Frames a second; None: not told."""


class Video(NamedTuple):
    """A video whose frames are stored."""

    steps: tuple[Picture, ...]
    """Their places are not known yet."""
    seconds: tuple[float, ...]
    """When each step is, after the first frame: the mean of its two."""
    fps: float
    """Frames a second of those that are stored."""

    @property
    def grid(self) -> tuple[int, int]:
        return self.steps[0].grid


def video_source(given: Any) -> VideoSource:
    """A list of frames, or a dict with one at `frames` or `video` and perhaps frames a second at `fps` or `sample_fps`.
    Raises BadPicture."""
    fps: float | None = None
    if isinstance(given, dict):
        known = {key: value for key, value in given.items() if value is not None and key != "type"}
        if unknown := [key for key in known if key not in (*_FRAMES, *_RATES)]:
            told = f"a video has {', '.join(unknown)}, which its row cannot say"
            raise BadPicture(f"{told}; data.videos has the limits of frames and pixels")
        fps = next((_rate(key, known[key]) for key in _RATES if key in known), None)
        given = next((known[key] for key in _FRAMES if key in known), None)
    if isinstance(given, str | bytes):
        name = repr(given[:100]) if isinstance(given, str) else f"{len(given):,} bytes"
        raise BadPicture(f"a video is {name}: files of videos are not decoded; give a list of its frames, as pictures")
    if not isinstance(given, list | tuple) or not len(given):
        raise BadPicture(f"a video is {type(given).__name__}, or empty; it must be a list of frames, each a picture")
    return VideoSource(given, fps)


def _rate(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise BadPicture(f"a video's {key} is {value!r}; it must be a number above 0: frames a second")
    return float(value)


def chosen(count: int, most: int) -> list[int]:
    """Numbers of the frames that are kept of `count`: all, or `most` of them, evenly from the first to the last."""
    if count <= most:
        return list(range(count))
    return np.linspace(0, count - 1, most).round().astype(int).tolist()


class VideoPreparer:
    """Puts the frames of videos into a store."""

    def __init__(self, store: PictureStore, layout: VideoLayout, config: VideosConfig, max_source_pixels: int):
        self._store, self._layout, self._config = store, layout, config
        self._max_source_pixels = max_source_pixels
        self._preparers: dict[str, Preparer] = {}

    def prepare(self, source: VideoSource, folder: Path) -> Video:
        """`folder`: where paths begin. Raises BadPicture."""
        numbers, fps = chosen(len(source.frames), self._config.max_frames), source.fps or self._config.fps
        kept_fps = fps * len(numbers) / len(source.frames)
        numbers += numbers[-1:] * (-len(numbers) % FRAMES)
        preparer = self._preparer(len(numbers))
        made: list[Prepared] = []
        seconds: list[float] = []
        for first, second in zip(numbers[::2], numbers[1::2], strict=True):
            try:
                made.append(preparer.prepare_two(*(read_picture(source.frames[n], folder) for n in (first, second))))
            except BadPicture as error:
                raise BadPicture(f"frames {first + 1} and {second + 1} of {len(source.frames)}: {error}") from error
            seconds.append((first / fps + second / fps) / 2)
        if len(sizes := {size for _, size in made}) > 1:
            told = " and ".join(f"{width} x {height // FRAMES}" for height, width in sorted(sizes)[:2])
            raise BadPicture(f"frames that the model would see with {told} pixels; give all of a video one size")
        return self.video([key for key, _ in made], made[0].size, seconds, kept_fps)

    def video(self, keys: Sequence[str], size: tuple[int, int], seconds: Sequence[float], fps: float) -> Video:
        """Of stored steps. `size`: height and width of each, of both frames together."""
        factor = self._layout.factor
        grid = size[0] // FRAMES // factor, size[1] // factor
        steps = self._layout.standings.steps(len(keys), fps, grid)
        pictures = (Picture(key, grid, place=-1, step=step) for key, step in zip(keys, steps, strict=True))
        return Video(tuple(pictures), tuple(seconds), fps)

    def _preparer(self, count: int) -> Preparer:
        frame = self._layout.frame(count, self._config.min_pixels, self._config.max_pixels)
        if frame.name not in self._preparers:
            self._preparers[frame.name] = Preparer(self._store, frame, self._max_source_pixels)
        return self._preparers[frame.name]
