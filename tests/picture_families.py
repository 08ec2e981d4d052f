"""Tiny random models of every family that sees pictures, in directories as they are published; what transformers' own
processors make of pictures for them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from examples.tiles.task import CONTROL, TEMPLATE, make_config
from tandem.config.data import ImagesConfig
from tandem.models.family_check import TAKES_FEATURES
from tandem.pictures.shown import ModelPictures
from tandem.types import Demonstration, IntArray, Picture
from tests.pictures import draw

NEEDS_FEATURES = pytest.mark.skipif(
    not TAKES_FEATURES, reason="needs transformers 5.18, whose models take the features of pictures"
)
ROLES = ["user", "assistant", "system"]
CHARACTERS = ["\n", *map(chr, range(32, 127)), *ROLES]
BESIDE = [
    "<image>", "<video>", "<img>", "</img>", "<IMG_CONTEXT>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    "<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>",
]  # fmt: skip
"""Tokens of other families than Qwen's, after those of text."""
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip

ARGUMENTS = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask")
Arguments = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    config: Callable[[Any, dict[str, Any]], Any]
    """Of a tokenizer and the text's sizes."""
    processor: dict[str, Any]
    """preprocessor_config.json."""
    sizes: tuple[tuple[int, int], ...]
    """Height and width of four pictures, the last one as large as the first."""
    grids: tuple[tuple[int, int], ...]
    """Of their tokens."""
    placeholder: str = "<|image_pad|>"
    """The token that takes features."""
    written: str = "<|vision_start|><|image_pad|><|vision_end|>"
    """What the chat template writes for a picture."""
    spatial: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    """With which transformers' processor calls its image processor."""
    named_tokens: dict[str, str] = field(default_factory=dict)
    """By the names that the tokenizer's file has for them."""

    def inputs(self, processor: Any, images: Sequence[Image.Image]) -> Arguments:
        """What transformers' forward pass takes of pictures, by its own image processor."""
        made = processor(images=list(images), return_tensors="pt", **self.options)
        return {name: made[name] for name in ARGUMENTS if name in made}


def qwen(family: str, side: int) -> Family:
    grids = ((2, 3), (4, 2), (7, 6), (2, 3))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": side // 2, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": side**2, "longest_edge": 64 * side**2},
    }  # fmt: skip
    sizes = ((2 * side + 5, 3 * side - 9), *((rows * side, columns * side) for rows, columns in grids[1:]))
    return Family(lambda tokenizer, _: make_config(family, tokenizer), processor, sizes, grids)


def ids(tokenizer: Any) -> dict[str, int]:
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}


def qwen3_vl_moe(tokenizer: Any, text: dict[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "rope_parameters": rope}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 16,
        "spatial_merge_size": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    return transformers.Qwen3VLMoeConfig(text_config=text | experts, vision_config=vision, **ids(tokenizer))


def glm4v(tokenizer: Any, text: dict[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
    text = {name: value for name, value in text.items() if name != "head_dim"} | {"rope_parameters": rope}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
        "spatial_merge_size": 2, "image_size": 56,
    }  # fmt: skip
    names = {
        "image": "image",
        "video": "video",
        **{
            f"{kind}_{end}": f"{word}_of_{kind}"
            for kind in ("image", "video")
            for end, word in (("start", "begin"), ("end", "end"))
        },
    }
    tokens = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    return transformers.Glm4vConfig(text_config=text, vision_config=vision, **tokens)


def llava(tokenizer: Any, text: dict[str, Any]) -> Any:
    vision = VISION | {"model_type": "clip_vision_model", "image_size": 42, "patch_size": 14, "projection_dim": 32}
    token = tokenizer.convert_tokens_to_ids("<image>")
    return transformers.LlavaConfig(
        text_config=text | {"model_type": "llama"}, vision_config=vision, image_token_index=token, image_seq_length=9
    )


def internvl(tokenizer: Any, text: dict[str, Any]) -> Any:
    vision = VISION | {"image_size": [28, 28], "patch_size": [7, 7]}
    token = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    return transformers.InternVLConfig(
        text_config=text | {"model_type": "qwen2"}, vision_config=vision, image_token_id=token, image_seq_length=4
    )


def smolvlm(tokenizer: Any, text: dict[str, Any], kind: Any = transformers.SmolVLMConfig) -> Any:
    vision = VISION | {"image_size": 28, "patch_size": 7}
    token = tokenizer.convert_tokens_to_ids("<image>")
    return kind(
        text_config=text | {"model_type": "llama"}, vision_config=vision, image_token_id=token, scale_factor=2,
        pad_token_id=0,
    )  # fmt: skip


def mistral3(tokenizer: Any, text: dict[str, Any]) -> Any:
    vision = VISION | {"model_type": "pixtral", "image_size": 112, "patch_size": 7, "head_dim": 16}
    token = tokenizer.convert_tokens_to_ids("[IMG]")
    return transformers.Mistral3Config(
        text_config=text | {"model_type": "mistral"}, vision_config=vision, image_token_index=token,
        spatial_merge_size=2, vision_feature_layer=-1,
    )  # fmt: skip


_SMOL_PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor", "max_image_size": {"longest_edge": 28}, "resample": 1,
    "size": {"longest_edge": 56}, "do_image_splitting": True,
}  # fmt: skip
_GLM_PROCESSOR = {
    "image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 2 * 28**2, "longest_edge": 2 * 64 * 28**2},
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    **{family: qwen(family, side) for family, side in (("qwen2_vl", 28), ("qwen2_5_vl", 28), ("qwen3_vl", 32))},
    "qwen3_vl_moe": Family(qwen3_vl_moe, *(getattr(qwen("", 32), name) for name in ("processor", "sizes", "grids"))),
    "glm4v": Family(
        glm4v, _GLM_PROCESSOR, ((52, 77), (100, 50), (196, 168), (52, 77)), ((2, 3), (4, 2), (7, 6), (2, 3)),
        "<|image|>", "<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "llava": Family(
        llava,
        {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 42, "width": 42}, "do_center_crop": True,
         "size": {"shortest_edge": 42}, "resample": 3},
        ((60, 90), (100, 50), (42, 42), (60, 90)), ((3, 3),) * 4, "<image>", "<image>", spatial=False,
    ),
    "internvl": Family(
        internvl,
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28}, "max_patches": 4},
        ((50, 90), (100, 50), (30, 31), (50, 90)), ((6, 2), (6, 2), (2, 2), (6, 2)),
        "<IMG_CONTEXT>", "<IMG_CONTEXT>", spatial=False, options={"crop_to_patches": True},
        named_tokens={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                      "video_token": "<video>"},
    ),
    "smolvlm": Family(
        smolvlm, _SMOL_PROCESSOR, ((50, 90), (100, 20), (30, 30), (50, 90)),
        ((10, 2), (6, 2), (10, 2), (10, 2)), "<image>", "<image>", spatial=False,
    ),
    "idefics3": Family(
        lambda tokenizer, text: smolvlm(tokenizer, text, transformers.Idefics3Config),
        _SMOL_PROCESSOR | {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False},
        ((50, 90), (100, 20), (30, 30), (50, 90)), ((2, 2),) * 4, "<image>", "<image>", spatial=False,
    ),
    "mistral3": Family(
        mistral3,
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 7, "width": 7}, "resample": 3,
         "size": {"longest_edge": 84}},
        ((27, 40), (120, 30), (84, 70), (27, 40)), ((2, 3), (6, 2), (6, 5), (2, 3)), "[IMG]", "[IMG]", spatial=False,
        options={"patch_size": 14},
    ),
}  # fmt: skip


def make_tokenizer(family: str) -> Any:
    """One token a character, but for control tokens, which are the first and the last."""
    control = [*CONTROL, *BESIDE]
    words = {token: number for number, token in enumerate([*CONTROL, *CHARACTERS, *BESIDE])}
    made = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(ROLES) + r"|[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(control)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=control[1:], extra_special_tokens=FAMILIES[family].named_tokens,
        chat_template=TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", FAMILIES[family].written),
    )  # fmt: skip


def config_of(family: str, tokenizer: Any) -> Any:
    return FAMILIES[family].config(tokenizer, TEXT | {"vocab_size": len(tokenizer), "eos_token_id": 2})


def make_model(family: str, directory: Path) -> Path:
    """With weights by which log-probs depend on pictures and positions, under the names that are published."""
    tokenizer = make_tokenizer(family)
    model: Any = transformers.AutoModelForImageTextToText.from_config(config_of(family, tokenizer))
    draw(model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(FAMILIES[family].processor), encoding="utf-8")
    if family == "llava":  # whose tower was saved under one more name before transformers 5
        weights, tower = load_file(directory / "model.safetensors"), "vision_tower."
        named = {name.replace(tower, f"{tower}vision_model."): weight for name, weight in weights.items()}
        save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Rows:
    """Prompts of text and pictures, prepared as rows of data are; the pictures as they were before."""

    def __init__(self, family: str, model: Path, store: Path) -> None:
        self.family = FAMILIES[family]
        self.tokenizer = make_tokenizer(family)
        self.pictures = ModelPictures(model, ImagesConfig(), store)
        self._processor = transformers.AutoImageProcessor.from_pretrained(model, backend="pil")
        self._originals: dict[str, Image.Image] = {}

    def pictures_of_noise(self) -> list[Picture]:
        """Of the family's sizes; `place` is not known yet."""
        drawn, found = np.random.default_rng(0), list[Picture]()
        for height, width in self.family.sizes:
            image, file = Image.fromarray(drawn.integers(0, 256, (height, width, 3), np.uint8)), io.BytesIO()
            image.save(file, "PNG")
            found += self.pictures.prepare([file.getvalue()], Path())
            self._originals[found[-1].key] = image
        return found

    def demonstrations(self) -> tuple[list[Demonstration], IntArray]:
        """And the groups that they are of. Prompts show one picture, two, none, and one again that another prompt
        shows, too; and one prompt differs from the first in its picture alone."""
        a, b, c, d = self.pictures_of_noise()
        assert [picture.grid for picture in (a, b, c, d)] == list(self.family.grids)
        prompts = [["what ", a, "?"], [b, " or ", c, " then"], ["just text"], ["again ", b], ["what ", d, "?"]]
        drawn, rows, groups = np.random.default_rng(1), list[Demonstration](), [0, 0, 0, 1, 1, 2, 3, 3, 4]
        for group in groups:
            ids, shown = self.prompt(prompts[group])
            answer = drawn.integers(10, 90, drawn.integers(2, 9)).astype(np.int32)
            rows.append(Demonstration(0, ids, answer, np.ones(len(answer), bool), shown))
        return rows, np.array(groups, np.int32)

    def prompt(self, parts: Sequence[str | Picture]) -> tuple[IntArray, tuple[Picture, ...]]:
        """Token ids of one message, and the pictures where they stand."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        message = {"role": "user", "content": content}
        ids = self.tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        expanded, _, placed = self.pictures.expand(ids, [part for part in parts if isinstance(part, Picture)])
        return expanded, tuple(placed)

    def inputs(self, token_ids: IntArray, prompt: int, pictures: Sequence[Picture]) -> Arguments:
        """What transformers' forward pass of one row takes beside its token ids."""
        if not pictures:
            return {}
        made = self.family.inputs(self._processor, [self._originals[picture.key] for picture in pictures])
        if self.family.spatial:
            placeholder = self.tokenizer.convert_tokens_to_ids(self.family.placeholder)
            shown = torch.from_numpy(token_ids == placeholder)[None].int()
            shown[:, prompt:] = 0
            made["mm_token_type_ids"] = shown
        return made
