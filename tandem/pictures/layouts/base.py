"""What a family makes of a picture before its model is loaded: final pixels, and the tokens that stand for it."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from tandem.errors import UserError
from tandem.pictures.store import Pixels
from tandem.types import IntArray

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_RATIO = 200
"""Longer side over the shorter one: thinner pictures are refused."""
BICUBIC = 3
"""Pillow's number, which processors' files hold."""


class TokenGrid(NamedTuple):
    """How many tokens a picture takes, and in which order."""

    grid: tuple[int, int]
    """Rows and columns of the features that the model makes of it: each takes a token."""
    tiles: tuple[int, int] = (1, 1)
    """Rows and columns of tiles that it is cut into; if they are several, the whole of it is one more tile."""


class Standing(NamedTuple):
    """What stands for a picture or a video among token ids."""

    ids: IntArray
    places: tuple[int, ...]
    """Where the first feature of the picture is among them, or of each two frames of the video."""
    around: tuple[int, int] | None = None
    """Tokens before and after the placeholder in whose place these stand, too, where they are there."""


class Layout(Protocol):
    """The rule of one model's directory. It is asked by the process that reads the rows, without torch."""

    @property
    def name(self) -> str:
        """In file names: other rules, another name."""
        ...

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> "Layout":
        """With other limits than the model's own, None: its own. UserError where it cannot have them."""
        ...

    def fit(self, image: "Image") -> Pixels:
        """What is stored of it: what the model sees, and whoever reads it need not resize. ValueError where the picture
        can have no size that the model sees."""
        ...

    def shape(self, height: int, width: int) -> TokenGrid:
        """Of what is stored."""
        ...

    def tokens(self, grid: tuple[int, int], tiles: tuple[int, int]) -> IntArray:
        """The token ids in the place of the one placeholder that the chat template writes: with `grid` placeholders,
        rows * columns in all, in the order of the features."""
        ...


class ModelFiles(NamedTuple):
    """What a directory says of its pictures."""

    directory: Path
    config: dict[str, Any]
    """config.json."""
    processor: dict[str, Any]
    """The image processor's file; empty where there is none."""
    video_processor: dict[str, Any]
    """The video processor's file; empty where there is none."""

    @property
    def vision(self) -> dict[str, Any]:
        return self.config.get("vision_config") or {}

    @property
    def placeholder(self) -> int:
        """The token that takes a feature."""
        token = self.config.get("image_token_id", self.config.get("image_token_index"))
        if token is None:
            self.refuse("config.json: 'image_token_id' is missing, which pictures need; take it as published")
        return token

    def of_vision(self, key: str, default: Any = None) -> Any:
        """A value of `vision_config`; UserError where it is missing and there is no default."""
        value = self.vision.get(key, default)
        if value is None:
            self.refuse(f"config.json: vision_config lacks {key!r}, which pictures need; take it as published")
        return value

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, in which special tokens are spelled out."""
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            told = "no tokenizer.json, which says what the tokens around a picture are"
            self.refuse(f"{told}; copy it into the directory")
        return _tokenizer(path, path.stat().st_mtime_ns).encode(text, add_special_tokens=False).ids

    def token(self, text: str) -> int:
        """The id of one special token; UserError where the tokenizer has none of that name."""
        ids = self.encode(text)
        if len(ids) != 1:
            self.refuse(f"tokenizer.json has no token {text!r}, which stands beside pictures; copy the published one")
        return ids[0]

    def refuse(self, reason: str) -> NoReturn:
        raise UserError(f"{self.directory}: {reason}")


@lru_cache(maxsize=1)
def _tokenizer(path: Path, modified: int) -> Any:
    """Large ones take a second to read. `modified`: nanoseconds."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def check_shape(height: int, width: int) -> None:
    """ValueError for a picture that no family takes."""
    if min(height, width) <= 0:
        raise ValueError(f"a picture of {width} x {height} pixels has no content")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"{width} x {height} pixels: the longer side is more than {MAX_RATIO} times the shorter one")


def resize(image: "Image", height: int, width: int, resample: int = BICUBIC) -> "Image":
    return image.resize((width, height), resample)


def one_size_only(files: ModelFiles, min_pixels: int | None, max_pixels: int | None, mend: str) -> None:
    """UserError where limits are given to a model that sees pictures in sizes of its own."""
    if min_pixels is not None or max_pixels is not None:
        kind = files.config.get("model_type")
        raise UserError(f"data.images.min_pixels, max_pixels: a model of type {kind} has no such limits; {mend}")
