"""A character tokenizer for the data tests, and files to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<unk>", "<eos>", "<bos>", "<|start|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def char_tokenizer(chat_template: str | None = CHAT_TEMPLATE, around: str = "$A") -> PreTrainedTokenizerFast:
    """One token a character; `around` is what stands around plain text, such as `<bos> $A`."""
    characters = [*SPECIALS, "\n", *map(chr, range(32, 127))]
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[(name, vocabulary[name]) for name in SPECIALS]
    )
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=["<|start|>", "<|end|>"],
    )
    result.chat_template = chat_template
    return result


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verl_row(question: str = "2+3=", **columns: Any) -> dict[str, Any]:
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 0},
    }
    return row | columns
