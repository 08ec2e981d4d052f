"""Tiny random models that see pictures, with tokenizer and image processor, made in a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tandem.pictures.store import PictureStore
from tandem.types import IntArray, Picture

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
ROLES = ["user", "assistant", "system"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
MERGE = 2


def make_tokenizer() -> Any:
    characters = ["\n", *map(chr, range(32, 127)), *ROLES]
    words = {token: number for number, token in enumerate([*CONTROL, *characters])}
    made = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(ROLES) + r"|[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(CONTROL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=CONTROL[1:],
        chat_template=TEMPLATE,
    )


def make_config(family: str, tokenizer: Any, hidden: int = 64, tower: int = 32, intermediate: int = 128) -> Any:
    """Two layers of two heads; weights of the embeddings and the output layer are one."""
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
           for name, token in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
                               ("vision_end", "vision_end"))}  # fmt: skip
    side = hidden // 2 // 2 // 4
    sections = [hidden // 4 - 2 * (side + side // 2), side + side // 2, side + side // 2]
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH[family], "spatial_merge_size": MERGE}
    if family == "qwen2_vl":
        vision |= {"embed_dim": tower, "hidden_size": hidden, "mlp_ratio": 2}
        kind = transformers.Qwen2VLConfig
    else:
        vision |= {"hidden_size": tower, "intermediate_size": 2 * tower, "out_hidden_size": hidden}
        if family == "qwen2_5_vl":
            vision |= {"window_size": PATCH[family] * 8, "fullatt_block_indexes": [1]}
            kind = transformers.Qwen2_5_VLConfig
        else:
            vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
            text["rope_parameters"] |= {"mrope_interleaved": True}
            text["head_dim"] = hidden // 2
            kind = transformers.Qwen3VLConfig
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def make_model(family: str, directory: Path, **sizes: int) -> Path:
    """Weights by which log-probs depend on pictures and positions."""
    tokenizer = make_tokenizer()
    config = make_config(family, tokenizer, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    described = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH[family],
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(described))
    return directory


def store_pictures(store: PictureStore, family: str, grids: Sequence[tuple[int, int]]) -> list[Picture]:
    """A picture of noise for each grid of tokens; `place` is still 0."""
    drawn = np.random.default_rng(0)
    side = PATCH[family] * MERGE
    return [
        Picture(store.add(drawn.integers(0, 256, (rows * side, columns * side, 3), np.uint8)), (rows, columns), 0)
        for rows, columns in grids
    ]


def prompt_of(tokenizer: Any, parts: Sequence[str | Picture]) -> tuple[IntArray, tuple[Picture, ...]]:
    """Token ids of one message of text and pictures, and the pictures where they stand."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    placeholder, found = tokenizer.convert_tokens_to_ids("<|image_pad|>"), list[Picture]()
    pictures = iter([part for part in parts if isinstance(part, Picture)])
    expanded: list[int] = []
    for token in ids:
        if token == placeholder:
            picture = next(pictures)
            found.append(Picture(picture.key, picture.grid, len(expanded)))
            expanded += [placeholder] * (picture.grid[0] * picture.grid[1])
        else:
            expanded.append(token)
    return np.array(expanded, np.int32), tuple(found)
