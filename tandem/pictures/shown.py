"""Pictures and videos for one model: prepared and stored, and as tokens among others.

sources --prepare--> stored pictures --expand--> token ids with all that stands for each, and their places
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tandem.config.data import ImagesConfig, VideosConfig
from tandem.errors import UserError
from tandem.pictures.layouts.base import Standing
from tandem.pictures.prepare import BadPicture, Prepared, Preparer
from tandem.pictures.recent import Recent
from tandem.pictures.sources import read_picture
from tandem.pictures.store import PictureStore
from tandem.pictures.videos import Video, VideoPreparer, VideoSource
from tandem.pictures.vlm_config import MODEL_TYPES, VIDEO_LAYOUTS, PictureFormat, model_type, picture_format, why_unseen
from tandem.types import IntArray, Picture

_KEY = re.compile("[0-9a-f]{64}")
_KNOWN = 2**16
"""Stored pictures whose files are not opened again for their sizes."""


class ModelPictures:
    """Prepares pictures for one model, and puts their tokens among others.

    `directory`: of the store, which is made when the first picture comes. `store`: what keeps them there, if it keeps
    not all.
    """

    def __init__(
        self,
        model: Path,
        config: ImagesConfig,
        directory: Path,
        videos: VideosConfig | None = None,
        store: PictureStore | None = None,
    ):
        self._model, self._config, self._directory = model, config, directory
        self._videos = videos or VideosConfig()
        self.store = store or PictureStore(directory)
        self._known: Recent[str, Picture] = Recent(_KNOWN)

    @cached_property
    def format(self) -> PictureFormat | None:
        """None where the model takes no pictures that are prepared here."""
        return picture_format(self._model)

    @cached_property
    def _preparer(self) -> Preparer:
        if self.format is None:
            why, known = why_unseen(self._model), ", ".join(MODEL_TYPES)
            raise UserError(
                f"the rows have pictures, and {self._model} is no model that sees them here ({why}); take one of "
                f"{known}, or leave out the columns `images` and `image` and the messages' parts of pictures"
            )
        layout = self.format.layout.limited(self._config.min_pixels, self._config.max_pixels)
        self._directory.mkdir(parents=True, exist_ok=True)
        return Preparer(self.store, layout, self._config.max_source_pixels)

    @cached_property
    def _video_preparer(self) -> VideoPreparer:
        if self.format is None or self.format.videos is None:
            kind = model_type(self._model)
            raise UserError(
                f"the rows have videos, and {self._model} (model type {kind}) is shown none here; take one of "
                f"{', '.join(VIDEO_LAYOUTS)}, or leave out the column `videos` and the messages' parts of videos"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        return VideoPreparer(self.store, self.format.videos, self._videos, self._config.max_source_pixels)

    def prepare(self, sources: Sequence[Any], folder: Path) -> list[Picture]:
        """Stored pictures, their places not known yet. `folder`: where paths begin. Raises BadPicture, and UserError
        where the model sees no pictures."""
        return [one for one in self.prepare_all(sources, folder) if isinstance(one, Picture)]

    def prepare_all(self, sources: Sequence[Any], folder: Path) -> list[Picture | Video]:
        """As `prepare`, of pictures and of videos, which are VideoSource."""
        shown: list[Picture | Video] = []
        for number, source in enumerate(sources, start=1):
            try:
                shown.append(self._prepared(source, folder))
            except BadPicture as error:
                what = "video" if isinstance(source, VideoSource) else "picture"
                raise BadPicture(f"{what} {number} of {len(sources)}: {error}") from error
            except OSError as error:
                told = f"data.images.directory: {self._directory}: pictures cannot be stored there ({error})"
                raise UserError(f"{told}; free space, or give a directory that can be written") from error
        tokens, limit = sum(len(self._tokens(one).ids) for one in shown), self._config.max_image_tokens
        if limit is not None and tokens > limit:
            raise BadPicture(f"the pictures take {tokens:,} tokens; data.images.max_image_tokens is {limit:,}")
        for one in shown:
            if isinstance(one, Picture):
                self._known.keep(one.key, one)
        return shown

    def _prepared(self, source: Any, folder: Path) -> Picture | Video:
        if isinstance(source, VideoSource):
            return self._video_preparer.prepare(source, folder)
        preparer = self._preparer  # a model that sees none is told before the picture is looked at
        return self._picture(*preparer.prepare(read_picture(source, folder)))

    def stored(self, key: str) -> Picture:
        """One that was prepared before, perhaps by another process. Raises BadPicture where it was not."""
        if (known := self._known.find(key)) is not None:
            return known
        assert self.format is not None, "a model that sees no pictures has none"
        picture = self._picture(key, self._size(key))
        self._known.keep(key, picture)
        return picture

    def stored_video(self, keys: Sequence[str], seconds: Sequence[float], fps: float) -> Video:
        """As `stored`, of a video, whose steps have these keys."""
        sizes = [self.store.size(key) if _KEY.fullmatch(key) else None for key in keys]
        if not sizes or sizes[0] is None or len(set(sizes)) > 1 or len(sizes) != len(seconds):
            raise BadPicture(f"frames of a video of {len(keys)} steps are not in {self._directory}")
        return self._video_preparer.video(keys, sizes[0], seconds, fps)

    def encoded(self, key: str) -> bytes:
        """A stored picture as PNG. Whoever prepares these bytes gets it again. Raises BadPicture where it is not
        there."""
        size = self._size(key)
        data = self.store.path(key).read_bytes()
        self._preparer.note(data, Prepared(key, size))
        return data

    def _size(self, key: str) -> tuple[int, int]:
        """Height and width of what is stored. Raises BadPicture where nothing is."""
        size = self.store.size(key) if _KEY.fullmatch(key) else None
        if size is None:
            raise BadPicture(f"there is no picture {key[:64]!r} in {self._directory}")
        return size

    def expand(
        self, token_ids: Sequence[int], shown: Sequence[Picture | Video]
    ) -> tuple[IntArray, IntArray, list[Picture]]:
        """Token ids with all that stands for pictures and videos, which token of `token_ids` each comes from, and the
        pictures, the steps of videos among them, with their places. Raises BadPicture unless each has one placeholder;
        one that a text spells out is one."""
        ids = np.array(token_ids, np.int32)
        if self.format is None:
            return ids, np.arange(len(ids)), []
        found = self._placeholders(ids, shown)
        stand = [self._tokens(one) for one in shown]
        counts = np.ones(len(ids), np.int64)
        counts[found] = [len(tokens.ids) for tokens in stand]
        for place, tokens in zip(found.tolist(), stand, strict=True):
            if tokens.around is not None and tuple(ids[place - 1 : place + 2 : 2].tolist()) == tokens.around:
                counts[[place - 1, place + 1]] = 0
        begins, expanded = (np.cumsum(counts) - counts)[found], np.repeat(ids, counts)
        placed: list[Picture] = []
        for one, tokens, begin in zip(shown, stand, begins.tolist(), strict=True):
            expanded[begin : begin + len(tokens.ids)] = tokens.ids
            pictures = one.steps if isinstance(one, Video) else (one,)
            placed += (
                Picture(picture.key, picture.grid, begin + place, step=picture.step)
                for picture, place in zip(pictures, tokens.places, strict=True)
            )
        return expanded, np.repeat(np.arange(len(ids)), counts), placed

    def _placeholders(self, ids: IntArray, shown: Sequence[Picture | Video]) -> IntArray:
        """Where each stands. Raises BadPicture."""
        assert self.format is not None
        videos = np.array([isinstance(one, Video) for one in shown], np.bool_)
        of_videos = np.flatnonzero(ids == self.format.video_id) if self.format.video_id is not None else ids[:0]
        of_pictures = np.flatnonzero(ids == self.format.placeholder_id)
        for what, places, count in (
            ("pictures", of_pictures, (~videos).sum()), ("videos", of_videos, videos.sum())
        ):  # fmt: skip
            if len(places) != count:
                raise BadPicture(f"{count} {what} and {len(places)} placeholders for them, after the chat template")
        found = np.sort(np.concatenate((of_pictures, of_videos)))
        if (np.isin(found, of_videos) != videos).any():
            raise BadPicture("the chat template puts pictures and videos into another order")
        return found

    def _picture(self, key: str, size: tuple[int, int]) -> Picture:
        """One that is stored with this height and width, its place not known yet."""
        assert self.format is not None
        grid, tiles = self.format.layout.shape(*size)
        return Picture(key, grid, place=-1, tiles=tiles)

    def _tokens(self, one: Picture | Video) -> Standing:
        """What stands for it among token ids."""
        assert self.format is not None
        if isinstance(one, Video):
            assert self.format.videos is not None
            return self.format.videos.standings.tokens(one.grid, one.seconds)
        ids = self.format.layout.tokens(one.grid, one.tiles)
        return Standing(ids, (int(np.argmax(ids == self.format.placeholder_id)),))
