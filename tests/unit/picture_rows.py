"""A model's JSON files and a tokenizer whose template shows pictures; pictures, whole and damaged."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from data_tokenizer import SPECIALS
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def picture_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, special tokens aside."""
    words = [*SPECIALS, *MARKS, "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=["<|start|>", "<|end|>", *MARKS],
    )
    result.chat_template = TEMPLATE
    return result


TOKENIZER = picture_tokenizer()
IMAGE_ID, VIDEO_ID = (int(TOKENIZER.convert_tokens_to_ids(mark)) for mark in MARKS[2:])


def model_files(directory: Path, model_type: str = "qwen2_5_vl", **config: Any) -> Path:
    """A directory without weights: 28 pixels a token, 1 to 16 tokens a picture."""
    directory.mkdir(exist_ok=True)
    vision = {"patch_size": 14, "spatial_merge_size": 2}
    whole = {"model_type": model_type, "image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID, "vision_config": vision}
    (directory / "config.json").write_text(json.dumps(whole | config))
    processor = {"patch_size": 14, "merge_size": 2, "min_pixels": 28 * 28, "max_pixels": 16 * 28 * 28}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def picture(height: int = 40, width: int = 60, seed: int = 0, mode: str = "RGB") -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4}[mode]
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, channels), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bomb(side: int = 60_000) -> bytes:
    """A PNG of a few hundred bytes that says it has side x side pixels."""
    data = bytearray(encoded(picture(1, 1)))
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def animated() -> bytes:
    return encoded(picture(), "GIF", save_all=True, append_images=[picture(seed=1)])
