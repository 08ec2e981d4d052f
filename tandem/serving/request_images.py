"""Pictures in the messages of requests: stored for a while, or refused with the reason."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.pictures.store import PictureStore, Pixels
from tandem.rollout.conversation_images import picture_parts, stored, stored_aside
from tandem.serving.errors import RequestError
from tandem.types import Message

KEPT_BYTES = 2**32
"""Of the pictures of a server's requests: far more than those of all that are being answered."""


class RecentPictures(PictureStore):
    """A store of one process, of at most so many bytes: what nobody has shown for longest goes first."""

    def __init__(self, directory: Path, most_bytes: int = KEPT_BYTES) -> None:
        super().__init__(directory)
        self._most = most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        """Pictures are prepared in several threads, and none may go between a look at it and its mark."""

    def add(self, pixels: Pixels) -> str:
        key = super().add(pixels)
        with self._lock:
            self._shown(key)
        return key

    def holds(self, key: str) -> bool:
        with self._lock:
            found = super().holds(key)
            if found:
                self._shown(key)
        return found

    def _shown(self, key: str) -> None:
        if key not in self._sizes:
            self._sizes[key] = self.path(key).stat().st_size
            self._bytes += self._sizes[key]
        self._sizes.move_to_end(key)
        while self._bytes > self._most and len(self._sizes) > 1:
            oldest, size = self._sizes.popitem(last=False)
            self._bytes -= size
            self.path(oldest).unlink(missing_ok=True)


def with_pictures(messages: Sequence[Message], pictures: ModelPictures | None) -> list[Message]:
    """The messages, whose parts name the keys of their pictures. Raises RequestError."""
    with refused(messages, pictures):
        return stored(messages, pictures)


async def with_pictures_aside(messages: Sequence[Message], pictures: ModelPictures | None) -> list[Message]:
    """As `with_pictures`; the event loop goes on while pictures are decoded."""
    with refused(messages, pictures):
        return await stored_aside(messages, pictures)


@contextmanager
def refused(messages: Sequence[Message], pictures: ModelPictures | None) -> Iterator[None]:
    """What is wrong with pictures, as clients are told. `pictures`: of a model that sees them."""
    if pictures is None and any(picture_parts(messages)):
        raise RequestError("messages: this model sees no pictures", param="messages", code="invalid_value")
    try:
        yield
    except BadPicture as error:
        raise RequestError(f"messages: {error}", param="messages", code="invalid_value") from None
