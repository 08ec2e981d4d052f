"""What the rows of a vision-language model must know of it, from its directory's JSON files: no weights, no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import UserError

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose pictures are resized by the rule of `sizes.py` and take rows * columns placeholders, head to tail."""
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 1280 * 28 * 28
"""Those of Qwen2-VL's processor, where the directory states none."""


@dataclass(frozen=True, slots=True)
class PictureFormat:
    """How a picture stands among the token ids of a model."""

    placeholder_id: int
    """The token that stands rows * columns times for a picture; the chat template writes it once."""
    video_id: int | None
    """The token that would stand for a video."""
    factor: int
    """Pixels along one side of what is one token: patch size times merge size."""
    min_pixels: int
    max_pixels: int


def picture_format(directory: Path) -> PictureFormat | None:
    """The format of the model in `directory`, None where its family is not one of MODEL_TYPES.

    Raises UserError where its files lack what a picture needs, or contradict each other.
    """
    config = _read(directory / "config.json")
    if config.get("model_type") not in MODEL_TYPES:
        return None
    vision: dict[str, Any] = config.get("vision_config") or {}
    processor = _read(directory / "preprocessor_config.json")
    processor = processor or _read(directory / "processor_config.json").get("image_processor") or {}
    try:
        patch, merge, placeholder = vision["patch_size"], vision["spatial_merge_size"], config["image_token_id"]
    except KeyError as error:
        raise UserError(
            f"{directory}/config.json: {error} is missing, which pictures need; take it as published"
        ) from error
    for name, ours in (("patch_size", patch), ("merge_size", merge)):
        if processor.get(name, ours) != ours:
            told = f"{name} {processor[name]} in the image processor's file, {ours} in config.json's vision_config"
            raise UserError(f"{directory}: {told}; take both files of one model")
    size: dict[str, Any] = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS
    most = processor.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS
    return PictureFormat(placeholder, config.get("video_token_id"), patch * merge, least, most)


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file, which loading the model tells where it matters."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); copy the file again") from error
