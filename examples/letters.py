"""A chat model small enough for a CPU: a Qwen2 of 138,000 random parameters that reads and writes single letters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<unk>"
ROLES = ["<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]
MAX_POSITIONS = 512

Row = dict[str, Any]


def write_model(directory: Path, seed: int, chat_template: str, controls: Sequence[str] = ()) -> None:
    """A Hugging Face directory. `controls`: what else is one token, besides the roles and printable ASCII."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    special = [PAD, EOS, *ROLES, *controls]
    vocabulary = [*special, *(chr(code) for code in range(0x20, 0x7F)), UNKNOWN]
    ids = {token.replace(" ", "Ġ"): index for index, token in enumerate(vocabulary)}  # as this class writes a space
    tokenizer = Qwen2Tokenizer(
        vocab=ids, merges=[], pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=MAX_POSITIONS
    )
    tokenizer.add_tokens(special[2:], special_tokens=True)
    tokenizer.chat_template = chat_template
    ends = {"bos_token_id": None, "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        dtype=torch.float32,
        **ends,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
