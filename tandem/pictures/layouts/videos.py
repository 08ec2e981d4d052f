"""Videos of Qwen2-VL and its successors: frames in twos, each two of which are encoded as a picture is.

    frames --fit--> frames of one size --in twos--> steps --tokens--> rows * columns placeholders a step

A step's tower attends within the step alone, so its features do not depend on the video that it is of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.errors import UserError
from tandem.pictures.layouts.base import ModelFiles, Standing
from tandem.pictures.layouts.patches import Patches, factor_of
from tandem.types import VideoStep

FRAMES = 2
"""Of a step: the temporal patch size of every published model."""
_MIN_PIXELS, _MAX_PIXELS = 128 * 28 * 28, 768 * 28 * 28
"""Of a frame: those of Qwen2-VL's and Qwen2.5-VL's own processing of videos, where the directory has no other."""


@dataclass(frozen=True, slots=True)
class VideoLayout:
    """The rule of one model's directory."""

    placeholder: int
    """The token that takes a feature; the chat template writes it once for a video."""
    factor: int
    """Pixels along one side of what is one token."""
    min_pixels: int
    max_pixels: int
    """Of a frame."""
    times: Callable[[int, float], Sequence[int]]
    """(Steps, frames a second) -> the positions of steps after the beginning of the video."""

    def frame(self, count: int, min_pixels: int | None, max_pixels: int | None) -> Patches:
        """The rule of sizes of each of `count` frames, with other limits than the model's own, None: its own."""
        least, most = min_pixels or self.min_pixels, max_pixels or self.max_pixels
        if most < max(least, self.factor**2):
            raise UserError(
                f"data.videos.max_pixels: {most:,} is less than min_pixels, {least:,}, or than the "
                f"{self.factor**2:,} pixels that are one token of the model; raise it"
            )
        return Patches(self.placeholder, self.factor, least, most)

    def steps(self, count: int, fps: float, grid: tuple[int, int]) -> list[VideoStep]:
        """Of a video with so many steps. What follows begins after the last of all its positions."""
        times = self.times(count, fps)
        return [*(VideoStep(time, 0) for time in times[:-1]), VideoStep(times[-1], max(*grid, times[-1] + 1))]

    def tokens(self, grid: tuple[int, int], seconds: Sequence[float]) -> Standing:
        """`seconds`: of each step, after the beginning of the video."""
        size = grid[0] * grid[1]
        places = tuple(size * step for step in range(len(seconds)))
        return Standing(np.full(size * len(seconds), self.placeholder, np.int32), places)


def qwen2_videos(files: ModelFiles) -> VideoLayout:
    return _layout(files, lambda steps, _: range(steps))


def _layout(files: ModelFiles, times: Callable[[int, float], Sequence[int]]) -> VideoLayout:
    """UserError where the files contradict each other."""
    frames = files.of_vision("temporal_patch_size", FRAMES)
    if frames != FRAMES:
        files.refuse(f"config.json: vision_config has temporal_patch_size {frames}; videos are read in twos of frames")
    described = files.video_processor
    size = described.get("size") or {}
    least = described.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS
    most = described.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS
    return VideoLayout(files.config["video_token_id"], factor_of(files), least, most, times)
