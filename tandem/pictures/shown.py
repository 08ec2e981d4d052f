"""Pictures for one model: prepared and stored, and as tokens among others.

sources --prepare--> stored pictures --expand--> token ids with as many placeholders as each takes, and their places
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tandem.config.tree import ImagesConfig
from tandem.errors import UserError
from tandem.pictures.model import MODEL_TYPES, PictureFormat, picture_format
from tandem.pictures.prepare import BadPicture, Limits, Preparer
from tandem.pictures.sizes import token_grid
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
            known = ", ".join(MODEL_TYPES)
            raise UserError(
                f"the rows have pictures, and {self._model} is no model that sees them here (model_type {known}); "
                "take such a model, or leave out the columns `images` and `image` and the messages' parts of pictures"
            )
        least = self._config.min_pixels or self.format.min_pixels
        most = self._config.max_pixels or self.format.max_pixels
        if most < max(least, self.format.factor**2):
            raise UserError(
                f"data.images.max_pixels: {most:,} is less than min_pixels, {least:,}, or than the "
                f"{self.format.factor**2:,} pixels that are one token of {self._model}; raise it"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        limits = Limits(self.format.factor, least, most, self._config.max_source_pixels)
        return Preparer(self.store, limits)

    def prepare(self, sources: Sequence[Any], folder: Path) -> list[Picture]:
        """Stored pictures, their places not known yet. `folder`: where paths begin. Raises BadPicture, and UserError
        where the model sees no pictures."""
        pictures: list[Picture] = []
        for number, source in enumerate(sources, start=1):
            preparer = self._preparer
            try:
                pictures.append(Picture(*preparer.prepare(read_picture(source, folder)), place=-1))
            except BadPicture as error:
                raise BadPicture(f"picture {number} of {len(sources)}: {error}") from error
        tokens, limit = sum(p.grid[0] * p.grid[1] for p in pictures), self._config.max_image_tokens
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
            self._known[key] = Picture(key, token_grid(*size, self.format.factor), place=-1)
        return self._known[key]

    def expand(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[IntArray, IntArray, list[Picture]]:
        """Token ids with all placeholders, which token of `token_ids` each one comes from, and the pictures with their
        places. Raises BadPicture unless each picture has one placeholder; one that a text spells out is one."""
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
        counts = np.ones(len(ids), np.int64)
        counts[found] = [picture.grid[0] * picture.grid[1] for picture in pictures]
        places = (np.cumsum(counts) - counts)[found]
        placed = [Picture(p.key, p.grid, int(place)) for p, place in zip(pictures, places, strict=True)]
        return np.repeat(ids, counts), np.repeat(np.arange(len(ids)), counts), placed
