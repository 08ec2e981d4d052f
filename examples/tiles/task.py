"""tiles: a task that cannot be done blindly, for a model that sees pictures and trains on a CPU in two minutes.

Two pictures of two coloured tiles each, with noise; the answer names the four colours by a letter each, `rgyw`.

Supervised fine-tuning on answers of which the last ones are partly wrong gives a model that is sometimes right;
reinforcement learning then has something to amplify.

    python -m examples.tiles.task runs/tiles/task [--family qwen3_vl] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {
    "r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 220), "y": (230, 210, 50), "p": (200, 60, 200),
    "w": (240, 240, 240),
}  # fmt: skip
SIDE = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32}
"""Pixels of a tile: what a token covers."""
TRAIN, VALIDATION = 2000, 256
SFT_STEPS, NOISY_STEPS, SFT_ROWS = 130, 30, 64
WRONG_SHARE = 0.3
"""Of the answers of the last steps, which name four colours at random."""
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Row = dict[str, Any]


def puzzles(folder: Path, name: str, count: int, seed: int, side: int) -> Iterator[tuple[list[str], str]]:
    """Paths of two pictures, beside the data files, and the right answer."""
    from PIL import Image

    drawn = np.random.default_rng(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        paths, answer = list[str](), ""
        for part in range(2):
            letters = ["rgbypw"[choice] for choice in drawn.integers(0, len(COLOURS), 2)]
            pixels = np.zeros((side, 2 * side, 3), np.int64)
            for place, letter in enumerate(letters):
                pixels[3 : side - 3, side * place + 3 : side * (place + 1) - 3] = COLOURS[letter]
            noisy = np.clip(pixels + drawn.integers(-20, 21, pixels.shape), 0, 255).astype(np.uint8)
            paths.append(f"pictures/{name}-{number}-{part}.png")
            Image.fromarray(noisy).save(folder / paths[-1])
            answer += "".join(letters)
        yield paths, answer


def question(paths: list[str], answer: str) -> Row:
    return {
        "data_source": "tiles",
        "prompt": [{"role": "user", "content": "<image><image>?"}],
        "images": [{"path": path} for path in paths],
        "reward_model": {"style": "rule", "ground_truth": answer},
    }


def demonstrations(rows: list[Row], seed: int) -> Iterator[Row]:
    """In the order in which they are learned: right ones, then some that are wrong among them."""
    rng = random.Random(seed)
    for number in range(SFT_STEPS * SFT_ROWS):
        row = rng.choice(rows)
        answer: str = row["reward_model"]["ground_truth"]
        if number >= (SFT_STEPS - NOISY_STEPS) * SFT_ROWS and rng.random() < WRONG_SHARE:
            answer = "".join(rng.choice("rgbypw") for _ in answer)
        said = [{"role": "assistant", "content": answer}]
        yield {"prompt": row["prompt"], "images": row["images"], "completion": said}


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def make_tokenizer(template: str = TEMPLATE, tags: Sequence[str] = ()) -> Any:
    """`tags`: further control tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    roles = ["user", "assistant", "system"]
    characters = ["\n", *map(chr, range(32, 127)), *roles]
    words = {token: number for number, token in enumerate([*CONTROL, *tags, *characters])}
    made = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(roles) + r"|[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([*CONTROL, *tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*CONTROL[1:], *tags],
        chat_template=template,
    )


def make_config(family: str, tokenizer: Any) -> Any:
    """Two layers and two heads of text and of vision; the embeddings are the output layer."""
    from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    patch = SIDE[family] // 2
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": patch, "spatial_merge_size": 2}
    if family == "qwen2_vl":
        kind: Any = Qwen2VLConfig
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    if family == "qwen2_5_vl":
        kind = Qwen2_5_VLConfig
        vision |= {"window_size": 8 * patch, "fullatt_block_indexes": [1]}
    if family == "qwen3_vl":
        kind = Qwen3VLConfig
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        rope["mrope_interleaved"], text["head_dim"] = True, 32
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def write_model(
    directory: Path,
    family: str,
    make_weights: Callable[[Any], None],
    template: str = TEMPLATE,
    tags: Sequence[str] = (),
) -> None:
    """A Hugging Face directory: a tokenizer of characters, an image processor, and a model of some 220,000 weights.

    `make_weights`: gives the model's parameters their values, in place.
    """
    from transformers import AutoModelForImageTextToText

    tokenizer = make_tokenizer(template, tags)
    model = AutoModelForImageTextToText.from_config(make_config(family, tokenizer))
    make_weights(model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    described = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": SIDE[family] // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": SIDE[family] ** 2, "longest_edge": 64 * SIDE[family] ** 2},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(described), encoding="utf-8")


def draw_weights(model: Any, seed: int) -> None:
    """Weights from which it learns fast."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = 0.02 if "embed_tokens" in name else parameter[0].numel() ** -0.5
                parameter.normal_(0, scale, generator=generator)


def make(directory: Path, family: str = "qwen2_5_vl", seed: int = 0) -> None:
    """Write `model/`, `pictures/`, `sft.jsonl`, `train.jsonl`, `val.jsonl`, and `blank.jsonl`: val without what it
    shows."""
    from PIL import Image

    side = SIDE[family]
    train = [question(*puzzle) for puzzle in puzzles(directory, "train", TRAIN, 1000 + seed, side)]
    validation = [question(*puzzle) for puzzle in puzzles(directory, "val", VALIDATION, 5, side)]
    write_rows(directory / "sft.jsonl", demonstrations(train, seed))
    write_rows(directory / "train.jsonl", train)
    write_rows(directory / "val.jsonl", validation)
    Image.new("RGB", (2 * side, side), (128, 128, 128)).save(directory / "pictures/blank.png")
    blank = [{"path": "pictures/blank.png"}] * 2
    write_rows(directory / "blank.jsonl", ({**row, "images": blank} for row in validation))
    write_model(directory / "model", family, lambda model: draw_weights(model, seed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", choices=SIDE, default="qwen2_5_vl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.directory, arguments.family, arguments.seed)
    counts = f"{TRAIN:,} questions to train on, {VALIDATION:,} others"
    print(f"{arguments.directory}: a model of {arguments.family}, {counts}")
