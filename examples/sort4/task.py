"""sort4: a task small enough for a CPU, that teaches. Prompt `4821=`, answer the digits in order, `1248`.

Supervised fine-tuning on answers of which only a share is right gives a model that is sometimes right; reinforcement
learning then has something to amplify. All of it follows from one seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = [PAD, EOS, UNKNOWN, "\n", *(chr(code) for code in range(0x20, 0x7F))]
"""99 tokens: the special ones, newline and printable ASCII. A token's id is its position."""
SFT_ROWS = 350 * 128
RIGHT_SHARE = 0.35
FILLER_SHARE = 0.2
MEAN_FILLER = 150
"""Filler lengths are geometric: to go on or to stop does not depend on the position, which a tiny model learns."""
MAX_RESPONSE_TOKENS = 256
"""Of the skewed variant, end token included."""
MAX_POSITIONS = 512

Row = dict[str, Any]


def split_prompts(seed: int, validation: int = 256) -> tuple[list[str], list[str]]:
    """All 5,040 strings of four different digits in a seeded order, cut into (train, validation)."""
    digits = ["".join(four) for four in permutations("0123456789", 4)]
    random.Random(seed).shuffle(digits)
    return digits[validation:], digits[:validation]


def answer(digits: str) -> str:
    return "".join(sorted(digits))


def demonstrations(digits: list[str], count: int, seed: int, skewed: bool = False) -> Iterator[Row]:
    """`prompt` / `completion` rows: a share of right answers, the rest with two neighbours swapped.

    `skewed`: a share of the answers is followed by a space and many dots.
    """
    rng = random.Random(f"demonstrations {seed}")
    for _ in range(count):
        asked = rng.choice(digits)
        right = answer(asked)
        completion = right if rng.random() < RIGHT_SHARE else _swap_neighbours(right, rng)
        if skewed and rng.random() < FILLER_SHARE:
            completion += " " + "." * min(int(rng.expovariate(1 / MEAN_FILLER)), MAX_RESPONSE_TOKENS - 6)
        yield {"prompt": f"{asked}=", "completion": completion}


def _swap_neighbours(text: str, rng: random.Random) -> str:
    i = rng.randrange(len(text) - 1)
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def questions(digits: Iterable[str]) -> Iterator[Row]:
    """Rows for reinforcement learning and validation."""
    for asked in digits:
        yield {"prompt": f"{asked}=", "data_source": "sort4", "ground_truth": answer(asked)}


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_model(directory: Path, seed: int) -> None:
    """A Hugging Face directory: the character tokenizer and a Qwen2 of 138,112 random float32 parameters."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer()
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        dtype=torch.float32,
        **special,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def build_tokenizer() -> Any:
    """One token a character.

    AutoTokenizer gives every Qwen2 directory this class, whatever was saved there; so space and newline are written
    as the byte-level alphabet of that class has them.
    """
    from transformers import Qwen2Tokenizer

    ids = {{" ": "Ġ", "\n": "Ċ"}.get(token, token): index for index, token in enumerate(VOCABULARY)}
    return Qwen2Tokenizer(
        vocab=ids,
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
    )


def make(directory: Path, seed: int, skewed: bool = False) -> None:
    """Write `model/`, `sft.jsonl`, `train.jsonl` and `val.jsonl`; no validation prompt is in the other files."""
    directory.mkdir(parents=True, exist_ok=True)
    train, validation = split_prompts(seed)
    write_rows(directory / "sft.jsonl", demonstrations(train, SFT_ROWS, seed, skewed))
    write_rows(directory / "train.jsonl", questions(train))
    write_rows(directory / "val.jsonl", questions(validation))
    write_model(directory / "model", seed)
