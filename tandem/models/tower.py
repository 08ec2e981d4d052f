"""The vision tower of a picture model: each picture's features are computed once, whoever shows it.

    keys --read--> pixels --image processor--> patches --tower--> features --places--> the model's `mm_encoder_outputs`

Pictures are stored in the size in which the model sees them: here they are only normalised and cut into patches, as the
family's own image processor does it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedModel

from tandem.errors import EngineError, UserError
from tandem.models.families import SPATIAL
from tandem.pictures.marks import unmarked
from tandem.pictures.positions import PicturePlaces, places_of
from tandem.types import IntArray, Picture

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
"""`[height, width, 3]`."""
_KEPT_BYTES = 2**28
"""Of features, where they do not change from pass to pass."""


class Features(NamedTuple):
    """Of one picture, a row a token."""

    embeddings: Tensor
    """`[tokens, hidden]`: what stands in the place of the tokens' embeddings."""
    deeper: tuple[Tensor, ...]
    """`[tokens, hidden]` each: what is added after the first layers (Qwen3-VL's DeepStack)."""


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
        self.placeholder: int = placeholder_of(model.config)
        self.spatial = model.config.model_type in SPATIAL
        self.merged: int = getattr(model.config.vision_config, "spatial_merge_size", 1)
        self._frozen = not any(parameter.requires_grad for parameter in tower_of(model).parameters())
        self._kept: OrderedDict[str, Features] = OrderedDict()
        self._kept_bytes = 0

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """Tokens that stand for a picture or a video and nothing else: none is there for one that a policy draws."""
        others = (getattr(self._model.config, name, None) for name in ("video_token_id", "video_token_index"))
        return (self.placeholder, *(token for token in others if isinstance(token, int)))

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
            self._kept_bytes = 0

    def _features(self, pictures: Sequence[Picture], keep: bool) -> list[Features]:
        found = {picture.key: self._kept[picture.key] for picture in pictures if picture.key in self._kept}
        for key in found:
            self._kept.move_to_end(key)
        if lacking := [picture for picture in pictures if picture.key not in found]:
            new = dict(zip((picture.key for picture in lacking), self._compute(lacking), strict=True))
            found |= new
            if keep or self._frozen:
                self._keep(new)
        return [found[picture.key] for picture in pictures]

    def _keep(self, features: dict[str, Features]) -> None:
        for key, new in features.items():
            self._kept[key] = new
            self._kept_bytes += _bytes_of(new)
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _bytes_of(self._kept.popitem(last=False)[1])

    def _compute(self, pictures: Sequence[Picture]) -> list[Features]:
        body: Any = self._model.base_model
        patches, grids = zip(*(self._patches(picture) for picture in pictures), strict=True)
        seen = body.get_image_features(
            torch.cat(patches).to(self._model.device), torch.cat(grids).to(self._model.device), return_dict=True
        )
        deeper: Any = getattr(seen, "deepstack_features", None) or ()
        sizes = [picture.grid[0] * picture.grid[1] for picture in pictures]
        layers = [
            layer if torch.is_tensor(layer) else torch.cat(tuple(layer)) for layer in (seen.pooler_output, *deeper)
        ]
        split = [layer.split(sizes) for layer in layers]
        return [Features(own[0], tuple(own[1:])) for own in zip(*split, strict=True)]

    def _patches(self, picture: Picture) -> tuple[Tensor, Tensor]:
        made: Any = self._processor(images=[self._read(picture.key)], do_resize=False, return_tensors="pt")
        grid = made["image_grid_thw"]
        _, rows, columns = (int(size) for size in grid[0])
        if (rows, columns) != (picture.grid[0] * self.merged, picture.grid[1] * self.merged):
            raise EngineError(
                f"picture {picture.key}: it was counted as {picture.grid[0]} x {picture.grid[1]} tokens, and the "
                f"model's image processor makes {rows} x {columns} patches of it"
            )
        return made["pixel_values"], grid


def load_image_processor(path: Path) -> Any:
    """That of a model directory, on PIL: other libraries resize by other rules. UserError where there is none."""
    try:
        return AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"model: {path} has no usable image processor ({str(error).partition(chr(10))[0]}); copy "
            "preprocessor_config.json of the base model into it"
        ) from None


def placeholder_of(config: Any) -> int:
    """The token that stands for a picture's tokens."""
    token = getattr(config, "image_token_id", None)
    return int(config.image_token_index if token is None else token)


def tower_of(model: PreTrainedModel) -> nn.Module:
    body: Any = model.base_model
    return body.visual


def _bytes_of(features: Features) -> int:
    return sum(part.nbytes for part in (features.embeddings, *features.deeper))
