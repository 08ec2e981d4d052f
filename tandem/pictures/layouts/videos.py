"""Videos of Qwen2-VL and its successors: frames in twos, each two of which are encoded as a picture is.

    frames --fit--> frames of one size --in twos--> steps --tokens--> rows * columns placeholders a step

A tower attends within a step alone, so what it makes of one does not depend on the video that it is of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tandem.errors import UserError
from tandem.pictures.layouts.base import ModelFiles, Standing
from tandem.pictures.layouts.patches import Patches, factor_of
from tandem.types import VideoStep

FRAMES = 2
"""Of a step: the temporal patch size of every published model."""
_MIN_PIXELS, _MAX_PIXELS = 128, 768
"""The families' own limits, times the pixels of a token, where a directory has no other: of a frame, or of all frames
of Qwen3-VL."""


class Standings(Protocol):
    """How steps stand among tokens."""

    def steps(self, count: int, fps: float, grid: tuple[int, int]) -> list[VideoStep]:
        """Of a video with so many steps. `fps`: frames a second."""
        ...

    def tokens(self, grid: tuple[int, int], seconds: Sequence[float]) -> Standing:
        """`seconds`: of each step, after the beginning of the video."""
        ...


@dataclass(frozen=True, slots=True)
class HeadToTail:
    """Qwen2-VL and Qwen2.5-VL: nothing between steps, whose positions tell their times."""

    placeholder: int
    times: Callable[[int, float], Sequence[int]]
    """(Steps, frames a second) -> the positions of steps after the beginning of the video."""

    def steps(self, count: int, fps: float, grid: tuple[int, int]) -> list[VideoStep]:
        """What follows begins after the last of all positions."""
        times = self.times(count, fps)
        return [*(VideoStep(time, 0) for time in times[:-1]), VideoStep(times[-1], max(*grid, times[-1] + 1))]

    def tokens(self, grid: tuple[int, int], seconds: Sequence[float]) -> Standing:
        size = grid[0] * grid[1]
        places = tuple(size * step for step in range(len(seconds)))
        return Standing(np.full(size * len(seconds), self.placeholder, np.int32), places)


@dataclass(frozen=True, slots=True)
class Stamped:
    """Qwen3-VL: before each step its time as text; its positions are those of a picture."""

    placeholder: int
    around: tuple[int, int]
    """The tokens before and after a picture, and each step."""
    encode: Callable[[str], list[int]]

    def steps(self, count: int, fps: float, grid: tuple[int, int]) -> list[VideoStep]:
        return [VideoStep(0, max(grid))] * count

    def tokens(self, grid: tuple[int, int], seconds: Sequence[float]) -> Standing:
        ids: list[int] = []
        places: list[int] = []
        before, after = self.around
        for second in seconds:
            ids += [*self.encode(f"<{second:.1f} seconds>"), before]
            places.append(len(ids))
            ids += [*[self.placeholder] * (grid[0] * grid[1]), after]
        return Standing(np.array(ids, np.int32), tuple(places), self.around)


@dataclass(frozen=True, slots=True)
class VideoLayout:
    """The rule of one model's directory."""

    standings: Standings
    factor: int
    """Pixels along one side of what is one token."""
    min_pixels: int
    max_pixels: int
    """Of a frame, or of all frames."""
    together: bool = False
    """The limits are those of all frames of a video, each of which has sides as long as a token, at least."""

    def frame(self, count: int, min_pixels: int | None, max_pixels: int | None) -> Patches:
        """The rule of sizes of each of `count` frames, with other limits of a frame than the model's own, None: its
        own."""
        share = count if self.together else 1
        least = min_pixels or -(-self.min_pixels // share)
        most = max_pixels or max(self.max_pixels // share, self.factor**2)
        if most < max(least, self.factor**2):
            raise UserError(
                f"data.videos.max_pixels: {most:,} is less than min_pixels, {least:,}, or than the "
                f"{self.factor**2:,} pixels that are one token of the model; raise it"
            )
        return Patches(0, self.factor, least, most, at_least_a_token=self.together)


def qwen2_videos(files: ModelFiles) -> VideoLayout:
    return _layout(files, HeadToTail(files.config["video_token_id"], lambda steps, _: range(steps)))


def qwen2_5_videos(files: ModelFiles) -> VideoLayout:
    """Positions of time are those of seconds."""
    rate = files.of_vision("tokens_per_second", 4)

    def times(steps: int, fps: float) -> list[int]:
        # In float32, as transformers' forward pass has it: what is near a whole number must be cut off alike.
        return (np.arange(steps, dtype=np.float32) * np.float32(rate * (FRAMES / fps))).astype(int).tolist()

    return _layout(files, HeadToTail(files.config["video_token_id"], times))


def qwen3_videos(files: ModelFiles) -> VideoLayout:
    around = files.config.get("vision_start_token_id"), files.config.get("vision_end_token_id")
    before, after = around
    if before is None or after is None:
        files.refuse("config.json lacks 'vision_start_token_id' or 'vision_end_token_id', which videos need")
    standings = Stamped(files.config["video_token_id"], (before, after), files.encode)
    return _layout(files, standings, together=True)


def _layout(files: ModelFiles, standings: Standings, *, together: bool = False) -> VideoLayout:
    """UserError where the files contradict each other."""
    frames = files.of_vision("temporal_patch_size", FRAMES)
    if frames != FRAMES:
        files.refuse(f"config.json: vision_config has temporal_patch_size {frames}; videos are read in twos of frames")
    factor, described = factor_of(files), files.video_processor
    size = described.get("size") or {}
    least = described.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS * factor**2
    most = described.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS * factor**2
    return VideoLayout(standings, factor, least, most, together)
