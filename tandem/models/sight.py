"""How the classes of transformers take pictures: what of a model is its tower, and in which arguments pixels come."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.pictures.store import Pixels
from tandem.pictures.vlm_config import ENCODED_ALONE


class Sight(NamedTuple):
    """Of one family. The image processor has nothing to resize: stored pictures have their final size."""

    modules: tuple[str, ...]
    """Parts of the body that compute features, projections included."""
    pixels: Callable[[Any, Pixels], Tensor]
    """(Image processor, stored picture) -> what the model takes of it, float32."""
    arguments: Callable[[Sequence[Tensor]], dict[str, Tensor]]
    """What `pixels` has made of some pictures -> the arguments of `get_image_features`, and of the model's own
    forward pass."""
    frames: Callable[[Any, Pixels], Tensor] | None = None
    """As `pixels`, of two frames of a video, one stored below the other; None: the model is shown no videos."""
    stacked: bool = False
    """The model takes features as one tensor `[tokens, 1, hidden]`, not as a list."""

    def features(self, body: Any, pixels: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Embeddings of all pictures, `[tokens, hidden]`, head to tail; then those of deeper layers, the same way."""
        if body.config.model_type in ENCODED_ALONE and len(pixels) > 1:
            parts = [self.features(body, [own], device) for own in pixels]
            return [torch.cat(layer) for layer in zip(*parts, strict=True)]
        arguments = {name: value.to(device) for name, value in self.arguments(pixels).items()}
        seen = body.get_image_features(**arguments, return_dict=True)
        layers: list[Any] = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
        whole = [layer if torch.is_tensor(layer) else torch.cat(tuple(layer)) for layer in layers]
        return [layer.flatten(0, -2) for layer in whole]

    def embeddings(self, features: Tensor) -> Any:
        """`[tokens, hidden]` as the model takes them."""
        # A token a block: blocks of all of them could not be none. No view, for some give it back: FSDP2 hangs its
        # hooks on what its modules return.
        return features[:, None].clone() if self.stacked else [features]


def sight_of(config: Any) -> Sight:
    return _SIGHTS[config.model_type]


def random_pixels(config: Any) -> Tensor:
    """As `Sight.pixels` gives them, of a picture of 2 x 2 tokens; where all have one size, of that."""
    vision, generator = config.vision_config, torch.Generator().manual_seed(2)
    if hasattr(vision, "temporal_patch_size"):
        side = 2 * vision.spatial_merge_size
        numbers = 3 * vision.temporal_patch_size * vision.patch_size**2
        return torch.randn(side, side, numbers, generator=generator)
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(1, 3, height, width, generator=generator)


def _patches(processor: Any, pixels: Pixels) -> Tensor:
    """`[rows, columns, numbers]` of patches, those that become one token beside each other."""
    made = processor(images=[pixels], do_resize=False, return_tensors="pt")
    (_, rows, columns), found = made["image_grid_thw"][0].tolist(), made["pixel_values"]
    size = processor.patch_size
    if (rows * size, columns * size) != pixels.shape[:2]:
        raise EngineError(
            f"a picture of {pixels.shape[0]} x {pixels.shape[1]} pixels is {rows} x {columns} patches of {size} to the "
            "model's image processor"
        )
    return found.view(rows, columns, -1)


def _two_frames(processor: Any, pixels: Pixels) -> Tensor:
    """As `_patches`, where a picture stands for both frames: each patch has the numbers of both, channel by channel."""
    height = len(pixels) // 2
    frames = [_patches(processor, frame) for frame in (pixels[:height], pixels[height:])]
    rows, columns, numbers = frames[0].shape
    first, second = (frame.view(rows, columns, 3, 2, numbers // 6) for frame in frames)
    return torch.stack((first[:, :, :, 0], second[:, :, :, 1]), dim=3).view(rows, columns, numbers)


def _patch_arguments(pixels: Sequence[Tensor]) -> dict[str, Tensor]:
    grids = torch.tensor([(1, *own.shape[:2]) for own in pixels])
    return {"pixel_values": torch.cat([own.flatten(0, 1) for own in pixels]), "image_grid_thw": grids}


def _square(processor: Any, pixels: Pixels) -> Tensor:
    """`[1, 3, H, W]`: of Mistral 3 each picture has another size."""
    return processor(images=[pixels], do_resize=False, return_tensors="pt")["pixel_values"]


def _square_arguments(pixels: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"pixel_values": torch.cat(list(pixels))}


def _internvl(processor: Any, pixels: Pixels) -> Tensor:
    """`[tiles, 3, side, side]`."""
    tiles = _tiles(pixels, processor.size["height"])
    return processor(images=tiles, do_resize=False, crop_to_patches=False, return_tensors="pt")["pixel_values"]


def _smolvlm(processor: Any, pixels: Pixels) -> Tensor:
    """`[tiles, 3, side, side]`."""
    tiles = _tiles(pixels, processor.max_image_size["longest_edge"])
    alone = {"do_resize": False, "do_image_splitting": False, "do_pad": False}
    return processor(images=[tiles], **alone, return_tensors="pt")["pixel_values"][0]


def _tiles(pixels: Pixels, side: int) -> list[Pixels]:
    """Of a picture as `pictures/layouts/tiles.py` stores it."""
    down, across = pixels.shape[0] // side, pixels.shape[1] // side
    if (down, across) == (1, 1):
        return [pixels]
    places = [(row, column) for row in range(down - 1) for column in range(across)]
    return [pixels[row * side :, column * side :][:side, :side] for row, column in [*places, (down - 1, 0)]]


def _in_one_row(pixels: Sequence[Tensor]) -> dict[str, Tensor]:
    """`[1, tiles, 3, side, side]`: the tiles of one row of data."""
    return {"pixel_values": torch.cat(list(pixels))[None]}


def _sized_arguments(pixels: Sequence[Tensor]) -> dict[str, Tensor]:
    (own,) = pixels
    return {"pixel_values": own, "image_sizes": torch.tensor([own.shape[-2:]])}


_PATCHES = Sight(("visual",), _patches, _patch_arguments, frames=_two_frames)
_TOWER = ("vision_tower", "multi_modal_projector")
_SIGHTS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"), _PATCHES),
    "llava": Sight(_TOWER, _square, _square_arguments),
    "internvl": Sight(_TOWER, _internvl, _square_arguments, stacked=True),
    **dict.fromkeys(("smolvlm", "idefics3"), Sight(("vision_model", "connector"), _smolvlm, _in_one_row, stacked=True)),
    "mistral3": Sight(_TOWER, _square, _sized_arguments),
}
