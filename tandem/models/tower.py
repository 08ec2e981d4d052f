"""The vision tower of a picture model: each picture's features are computed once, whoever shows it.

    keys --read--> pixels --image processor--> numbers --tower--> features --places--> the model's `mm_encoder_outputs`

Pictures are stored in the size in which the model sees them: here they are only normalised and cut into patches, as the
family's own image processor does it. `sight.py` says how each family takes them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from tandem.errors import EngineError, UserError
from tandem.models.families import SPATIAL
from tandem.models.sight import random_pixels, sight_of
from tandem.pictures.marks import unmarked
from tandem.pictures.positions import PicturePlaces, places_of
from tandem.pictures.store import Pixels
from tandem.types import IntArray, Picture

_KEPT_BYTES = 2**28
"""Of features, where they do not change from pass to pass; and of what the tower takes."""
Item = TypeVar("Item")
Content = tuple[str, bool]
"""`Picture.content`."""


class Features(NamedTuple):
    """Of one picture, a row a token."""

    embeddings: Tensor
    """`[tokens, hidden]`: what stands in the place of the tokens' embeddings."""
    deeper: tuple[Tensor, ...]
    """`[tokens, hidden]` each: what is added after the first layers (Qwen3-VL's DeepStack)."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.embeddings, *self.deeper)

    def on(self, device: torch.device) -> "Features":
        return Features(self.embeddings.to(device), tuple(layer.to(device) for layer in self.deeper))


class PictureInputs(NamedTuple):
    """What a model gets for marked token ids."""

    token_ids: Tensor
    """int64 `[1, N]`, placeholders in the place of marks."""
    options: dict[str, Any]
    """`position_ids`, `mm_encoder_outputs`."""


class PictureTower:
    """The tower of a model that is loaded, and where its pictures are."""

    def __init__(
        self, model: PreTrainedModel, path: Path, read: Callable[[str], Pixels], device: torch.device | None = None
    ) -> None:
        """`path`: the model's directory, for its image processor; `read`: the stored pixels of a picture's key.

        `device`: where the model computes; default: where its parameters are.
        """
        self._model, self._read, self._computes_on = model, read, device
        self._processor = load_image_processor(path)
        self.placeholder: int = model.config.image_token_id
        self.spatial = model.config.model_type in SPATIAL
        self._sight = sight_of(model.config)
        self._frozen = is_frozen(tower_of(model))
        self._body: Any = model.base_model
        self._body.encode_pictures = MethodType(self._encode, self._body)
        if not self._frozen:
            register_fsdp_forward_method(self._body, "encode_pictures")  # nothing where it has no shards
        self._kept: _Kept[Features] = _Kept(lambda features: sum(part.nbytes for part in features.parts))
        self._pixels: _Kept[Tensor] = _Kept(lambda pixels: pixels.nbytes)

    @property
    def learns(self) -> bool:
        return not self._frozen

    @property
    def _device(self) -> torch.device:
        return self._computes_on or self._model.device

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """Tokens that stand for a picture or a video and nothing else: none is there for one that a policy draws."""
        video = getattr(self._model.config, "video_token_id", None)
        return (self.placeholder,) if video is None else (self.placeholder, video)

    def places(
        self, token_ids: IntArray, offsets: IntArray, prefixes: IntArray, pictures: Sequence[Picture]
    ) -> PicturePlaces:
        """As `places_of`."""
        return places_of(token_ids, offsets, prefixes, pictures, spatial=self.spatial)

    def places_of_row(self, token_ids: IntArray, pictures: Sequence[Picture]) -> PicturePlaces:
        """Of one row."""
        return self.places(token_ids, np.array([0, len(token_ids)]), np.array([-1]), pictures)

    def inputs(
        self,
        token_ids: IntArray,
        places: PicturePlaces,
        pictures: Sequence[Picture],
        *,
        keep: bool = False,
        together: bool = False,
    ) -> PictureInputs:
        """`keep`: features may be kept for later calls, until `forget`. They always are where the tower is frozen.

        `together`: the tower runs even where no picture is shown, for it runs on other ranks, which share its weights.
        """
        device = self._device
        ids = torch.from_numpy(unmarked(token_ids, self.placeholder).astype(np.int64))[None].to(device)
        positions = torch.from_numpy(places.positions if self.spatial else places.positions[0]).to(device)
        options: dict[str, Any] = {"position_ids": positions[:, None] if self.spatial else positions[None]}
        if len(places.features) or together:
            found = self._features([pictures[number] for number in places.numbers], keep) or [self._blank()]
            place = torch.from_numpy(places.features).to(device)
            embeddings = torch.cat([one.embeddings for one in found]).index_select(0, place)
            deeper = [torch.cat(layer).index_select(0, place) for layer in zip(*(x.deeper for x in found), strict=True)]
            pooled = self._sight.embeddings(embeddings)
            outputs = SimpleNamespace(pooler_output=pooled, deepstack_features=[[layer] for layer in deeper])
            options["mm_encoder_outputs"] = {"image": outputs}
        return PictureInputs(ids, options)

    def forget(self) -> None:
        """The tower has other weights now."""
        self._kept.clear()

    def offload(self) -> None:
        """What is kept goes into host memory; pictures that are shown again come back."""
        self._kept.change(lambda features: features.on(torch.device("cpu")), self._kept.keys())

    def _features(self, pictures: Sequence[Picture], keep: bool) -> list[Features]:
        # Frames that are shown at several times of videos are encoded once.
        wanted = {picture.content: picture for picture in pictures}
        self._kept.change(lambda features: features.on(self._device), wanted)
        found = self._kept.find(wanted)
        if lacking := [picture for content, picture in wanted.items() if content not in found]:
            # What is kept for a whole run is the same in a resumed one: it may not hang on who was computed with it.
            parts = [[picture] for picture in lacking] if self._frozen else [lacking]
            computed = [features for part in parts for features in self._compute(part)]
            new = dict(zip((picture.content for picture in lacking), computed, strict=True))
            found |= new
            if keep or self._frozen:
                self._kept.keep(new)
        return [found[picture.content] for picture in pictures]

    def _compute(self, pictures: Sequence[Picture]) -> list[Features]:
        # Checkpointing of transformers asks for gradients of what layers take, a frozen tower's, too: what is kept of
        # it would hang on the graph of the pass that has made it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns):
            layers: list[Tensor] = self._body.encode_pictures(self._pixels_of(pictures))
        counts = [picture.grid[0] * picture.grid[1] for picture in pictures]
        if len(layers[0]) != sum(counts):
            raise EngineError(
                f"{len(pictures)} pictures were counted as {sum(counts)} tokens, from {pictures[0].key} on, and the "
                f"model makes {len(layers[0])} features of them"
            )
        split = [layer.split(counts) for layer in layers]
        return [Features(own[0], tuple(own[1:])) for own in zip(*split, strict=True)]

    def _blank(self) -> Features:
        """Of a picture that nobody shows. Not of zeros, which Idefics3 takes for padding."""
        layers: list[Tensor] = self._body.encode_pictures([torch.ones_like(random_pixels(self._model.config))])
        return Features(layers[0], tuple(layers[1:]))

    def _encode(self, body: Any, pixels: Sequence[Tensor]) -> list[Tensor]:
        """As `Sight.features`, a method of the body. None is a view: FSDP2 hangs its hooks on them."""
        return [layer.clone() for layer in self._sight.features(body, pixels, self._device)]

    def _pixels_of(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """What the tower takes of each."""
        found = self._pixels.find(picture.content for picture in pictures)
        new = {picture.content: self._numbers_of(picture) for picture in pictures if picture.content not in found}
        found |= new
        self._pixels.keep(new)
        return [found[picture.content] for picture in pictures]

    def _numbers_of(self, picture: Picture) -> Tensor:
        """As `Sight.pixels`, of a stored picture or of two stored frames."""
        pixels = self._read(picture.key)
        if picture.step is None:
            return self._sight.pixels(self._processor, pixels)
        if self._sight.frames is None:
            raise EngineError(f"frames of a video ({picture.key}) for a model that is shown none")
        return self._sight.frames(self._processor, pixels)


class _Kept(Generic[Item]):
    """What was computed of pictures, by content, up to a number of bytes; what was used longest ago goes first."""

    def __init__(self, bytes_of: Callable[[Item], int]) -> None:
        self._bytes_of = bytes_of
        self._items: OrderedDict[Content, Item] = OrderedDict()
        self._bytes = 0

    def clear(self) -> None:
        self._items.clear()
        self._bytes = 0

    def find(self, keys: Iterable[Content]) -> dict[Content, Item]:
        found = {key: self._items[key] for key in keys if key in self._items}
        for key in found:
            self._items.move_to_end(key)
        return found

    def keys(self) -> list[Content]:
        return list(self._items)

    def change(self, make: Callable[[Item], Item], keys: Iterable[Content]) -> None:
        """Put what `make` makes of those that are there, of as many bytes, in their places."""
        self._items.update({key: make(self._items[key]) for key in keys if key in self._items})

    def keep(self, items: Mapping[Content, Item]) -> None:
        for key, item in items.items():
            self._items[key] = item
            self._bytes += self._bytes_of(item)
        while self._bytes > _KEPT_BYTES:
            self._bytes -= self._bytes_of(self._items.popitem(last=False)[1])


def load_image_processor(path: Path) -> Any:
    """That of a model directory, on PIL: other libraries resize by other rules. UserError where there is none."""
    from transformers import AutoImageProcessor  # a tenth of a second, which models of text need not wait for

    try:
        return AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"model: {path} has no usable image processor ({str(error).partition(chr(10))[0]}); copy "
            "preprocessor_config.json of the base model into it"
        ) from None


def tower_of(model: PreTrainedModel) -> nn.ModuleList:
    """What of a model computes features of pictures."""
    return nn.ModuleList([getattr(model.base_model, name) for name in sight_of(model.config).modules])


def is_frozen(module: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())
