"""The vision tower of a picture model: each picture's features are computed once, whoever shows it.

    keys --read--> pixels --image processor--> patches --tower--> features --places--> the model's `mm_encoder_outputs`

Pictures are stored in the size in which the model sees them: here they are only normalised and cut into patches, as the
family's own image processor does it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import EngineError, UserError
from tandem.models.families import SPATIAL
from tandem.pictures.marks import unmarked
from tandem.pictures.positions import PicturePlaces, places_of
from tandem.pictures.store import Pixels
from tandem.types import IntArray, Picture

_KEPT_BYTES = 2**28
"""Of features, where they do not change from pass to pass; and of patches."""
Item = TypeVar("Item")


class Features(NamedTuple):
    """Of one picture, a row a token."""

    embeddings: Tensor
    """`[tokens, hidden]`: what stands in the place of the tokens' embeddings."""
    deeper: tuple[Tensor, ...]
    """`[tokens, hidden]` each: what is added after the first layers (Qwen3-VL's DeepStack)."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.embeddings, *self.deeper)


class PictureInputs(NamedTuple):
    """What a model gets for marked token ids."""

    token_ids: Tensor
    """int64 `[1, N]`, placeholders in the place of marks."""
    options: dict[str, Any]
    """`position_ids`, `mm_encoder_outputs`."""


class PictureTower:
    """The tower of a model that is loaded, and where its pictures are."""

    def __init__(self, model: PreTrainedModel, path: Path, read: Callable[[str], Pixels]) -> None:
        """`path`: the model's directory, for its image processor; `read`: the stored pixels of a picture's key."""
        self._model, self._read = model, read
        self._processor = load_image_processor(path)
        self.placeholder: int = model.config.image_token_id
        self.spatial = model.config.model_type in SPATIAL
        self._merged: int = model.config.vision_config.spatial_merge_size
        self._frozen = not any(parameter.requires_grad for parameter in tower_of(model).parameters())
        self._kept: _Kept[Features] = _Kept(lambda features: sum(part.nbytes for part in features.parts))
        self._patches: _Kept[Tensor] = _Kept(lambda patches: patches.nbytes)

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """Tokens that stand for a picture or a video and nothing else: none is there for one that a policy draws."""
        return self.placeholder, self._model.config.video_token_id

    def places(
        self, token_ids: IntArray, offsets: IntArray, prefixes: IntArray, pictures: Sequence[Picture]
    ) -> PicturePlaces:
        """As `places_of`."""
        return places_of(token_ids, offsets, prefixes, pictures, spatial=self.spatial)

    def places_of_row(self, token_ids: IntArray, pictures: Sequence[Picture]) -> PicturePlaces:
        """Of one row."""
        return self.places(token_ids, np.array([0, len(token_ids)]), np.array([-1]), pictures)

    def inputs(
        self, token_ids: IntArray, places: PicturePlaces, pictures: Sequence[Picture], *, keep: bool = False
    ) -> PictureInputs:
        """`keep`: features may be kept for later calls, until `forget`. They always are where the tower is frozen."""
        device = self._model.device
        ids = torch.from_numpy(unmarked(token_ids, self.placeholder).astype(np.int64))[None].to(device)
        positions = torch.from_numpy(places.positions if self.spatial else places.positions[0]).to(device)
        options: dict[str, Any] = {"position_ids": positions[:, None] if self.spatial else positions[None]}
        if len(places.features):
            found = self._features([pictures[number] for number in places.numbers], keep)
            place = torch.from_numpy(places.features).to(device)
            embeddings = torch.cat([one.embeddings for one in found]).index_select(0, place)
            deeper = [torch.cat(layer).index_select(0, place) for layer in zip(*(x.deeper for x in found), strict=True)]
            outputs = SimpleNamespace(pooler_output=[embeddings], deepstack_features=[[layer] for layer in deeper])
            options["mm_encoder_outputs"] = {"image": outputs}
        return PictureInputs(ids, options)

    def forget(self) -> None:
        """The tower has other weights now."""
        if not self._frozen:
            self._kept.clear()

    def _features(self, pictures: Sequence[Picture], keep: bool) -> list[Features]:
        found = self._kept.find(picture.key for picture in pictures)
        if lacking := [picture for picture in pictures if picture.key not in found]:
            # What is kept for a whole run is the same in a resumed one: it may not hang on who was computed with it.
            parts = [[picture] for picture in lacking] if self._frozen else [lacking]
            computed = [features for part in parts for features in self._compute(part)]
            new = dict(zip((picture.key for picture in lacking), computed, strict=True))
            found |= new
            if keep or self._frozen:
                self._kept.keep(new)
        return [found[picture.key] for picture in pictures]

    def _compute(self, pictures: Sequence[Picture]) -> list[Features]:
        body: Any = self._model.base_model
        patches, grids = self._patches_of(pictures)
        device = self._model.device
        seen = body.get_image_features(patches.to(device), grids.to(device), return_dict=True)
        found: list[Any] = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
        layers = [layer if torch.is_tensor(layer) else torch.cat(tuple(layer)) for layer in found]
        split = [layer.split([_tokens(picture) for picture in pictures]) for layer in layers]
        return [Features(own[0], tuple(own[1:])) for own in zip(*split, strict=True)]

    def _patches_of(self, pictures: Sequence[Picture]) -> tuple[Tensor, Tensor]:
        """Patches of all pictures, head to tail, and int64 `[pictures, 3]`: 1, and rows and columns of patches."""
        found = self._patches.find(picture.key for picture in pictures)
        merged = self._merged
        grids = [(1, picture.grid[0] * merged, picture.grid[1] * merged) for picture in pictures]
        lacking = [(picture, grid) for picture, grid in zip(pictures, grids, strict=True) if picture.key not in found]
        if lacking:
            pixels = [self._read(picture.key) for picture, _ in lacking]
            made: Any = self._processor(images=pixels, do_resize=False, return_tensors="pt")
            cut = [tuple(grid) for grid in made["image_grid_thw"].tolist()]
            for (picture, grid), theirs in zip(lacking, cut, strict=True):
                if grid != theirs:
                    raise EngineError(
                        f"picture {picture.key}: it was counted as {grid[1]} x {grid[2]} patches, and the model's "
                        f"image processor makes {theirs[1]} x {theirs[2]} of it"
                    )
            patches = made["pixel_values"].split([rows * columns for _, (_, rows, columns) in lacking])
            new = {picture.key: own for (picture, _), own in zip(lacking, patches, strict=True)}
            found |= new
            self._patches.keep({key: own.clone() for key, own in new.items()})
        return torch.cat([found[picture.key] for picture in pictures]), torch.tensor(grids)


class _Kept(Generic[Item]):
    """What was computed of pictures, by key, up to a number of bytes; what was used longest ago goes first."""

    def __init__(self, bytes_of: Callable[[Item], int]) -> None:
        self._bytes_of = bytes_of
        self._items: OrderedDict[str, Item] = OrderedDict()
        self._bytes = 0

    def clear(self) -> None:
        self._items.clear()
        self._bytes = 0

    def find(self, keys: Iterable[str]) -> dict[str, Item]:
        found = {key: self._items[key] for key in keys if key in self._items}
        for key in found:
            self._items.move_to_end(key)
        return found

    def keep(self, items: Mapping[str, Item]) -> None:
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


def tower_of(model: PreTrainedModel) -> nn.Module:
    body: Any = model.base_model
    return body.visual


def _tokens(picture: Picture) -> int:
    return picture.grid[0] * picture.grid[1]
