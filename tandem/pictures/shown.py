"""Pictures for one model: prepared and stored, and as tokens among others.

sources --prepare--> stored pictures --expand--> token ids with all that stands for each, and their places
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tandem.config.tree import ImagesConfig
from tandem.errors import UserError
from tandem.pictures.model import MODEL_TYPES, PictureFormat, picture_format, why_unseen
from tandem.pictures.prepare import BadPicture, Prepared, Preparer
from tandem.pictures.sources import read_picture
from tandem.pictures.store import PictureStore
from tandem.types import IntArray, Picture

_KEY = re.compile("[0-9a-f]{64}")


class ModelPictures:
    """Prepares pictures for one model, and puts their tokens among others.

    `directory`: of the store, which is made when the first picture comes.
    """

    def __init__(self, model: Path, config: ImagesConfig, directory: Path):
        self._model, self._config, self._directory = model, config, directory
        self.store = PictureStore(directory)
        self._known: dict[str, Picture] = {}

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

    def prepare(self, sources: Sequence[Any], folder: Path) -> list[Picture]:
        """Stored pictures, their places not known yet. `folder`: where paths begin. Raises BadPicture, and UserError
        where the model sees no pictures."""
        pictures: list[Picture] = []
        for number, source in enumerate(sources, start=1):
            preparer = self._preparer
            try:
                made = preparer.prepare(read_picture(source, folder))
            except BadPicture as error:
                raise BadPicture(f"picture {number} of {len(sources)}: {error}") from error
            pictures.append(self._picture(made.key, made.size))
        tokens, limit = sum(len(self._tokens(picture)) for picture in pictures), self._config.max_image_tokens
        if limit is not None and tokens > limit:
            raise BadPicture(f"the pictures take {tokens:,} tokens; data.images.max_image_tokens is {limit:,}")
        self._known |= {picture.key: picture for picture in pictures}
        return pictures

    def stored(self, key: str) -> Picture:
        """One that was prepared before, perhaps by another process. Raises BadPicture where it was not."""
        if key not in self._known:
            assert self.format is not None, "a model that sees no pictures has none"
            size = self.store.size(key) if _KEY.fullmatch(key) else None
            if size is None:
                raise BadPicture(f"there is no picture {key[:64]!r} in {self._directory}")
            self._known[key] = self._picture(key, size)
        return self._known[key]

    def encoded(self, key: str) -> bytes:
        """A stored picture as PNG. Whoever prepares these bytes gets it again. Raises BadPicture where it is not
        there."""
        size = self.store.size(key) if _KEY.fullmatch(key) else None
        if size is None:
            raise BadPicture(f"there is no picture {key[:64]!r} in {self._directory}")
        data = self.store.path(key).read_bytes()
        self._preparer.note(data, Prepared(key, size))
        return data

    def expand(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[IntArray, IntArray, list[Picture]]:
        """Token ids with all that stands for pictures, which token of `token_ids` each comes from, and the pictures
        with their places. Raises BadPicture unless each has one placeholder; one that a text spells out is one."""
        ids = np.array(token_ids, np.int32)
        if self.format is None:
            return ids, np.arange(len(ids)), []
        if self.format.video_id is not None and self.format.video_id in ids:
            raise BadPicture("the text holds the model's own token for a video, and videos are not supported")
        found = np.flatnonzero(ids == self.format.placeholder_id)
        if len(found) != len(pictures):
            raise BadPicture(
                f"{len(pictures)} pictures and {len(found)} placeholders for them, after the chat template"
            )
        counts, stand = np.ones(len(ids), np.int64), [self._tokens(picture) for picture in pictures]
        counts[found] = [len(tokens) for tokens in stand]
        begins, expanded = (np.cumsum(counts) - counts)[found], np.repeat(ids, counts)
        placed: list[Picture] = []
        for picture, tokens, begin in zip(pictures, stand, begins.tolist(), strict=True):
            expanded[begin : begin + len(tokens)] = tokens
            first = int(np.argmax(tokens == self.format.placeholder_id))
            placed.append(Picture(picture.key, picture.grid, begin + first))
        return expanded, np.repeat(np.arange(len(ids)), counts), placed

    def _picture(self, key: str, size: tuple[int, int]) -> Picture:
        """One that is stored with this height and width, its place not known yet."""
        assert self.format is not None
        grid, tiles = self.format.layout.shape(*size)
        return Picture(key, grid, place=-1, tiles=tiles)

    def _tokens(self, picture: Picture) -> IntArray:
        """What stands for a picture among token ids."""
        assert self.format is not None
        return self.format.layout.tokens(picture.grid, picture.tiles)
