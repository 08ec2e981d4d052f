"""Pictures in the messages of requests: stored, or refused with the reason."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.rollout.pictures import picture_parts, stored, stored_aside
from tandem.serving.errors import RequestError
from tandem.types import Message


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
