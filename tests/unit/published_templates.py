"""Chat templates as published, which TRL ships, over a tokenizer that has the control tokens that they write."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tandem.rollout.formats.for_tokenizer import make_format
from tandem.rollout.formats.template import TemplateFormat

TRL = find_spec("trl")
FOLDER = Path(str(TRL.origin)).parent / "chat_templates" if TRL else Path("chat_templates")
REAL = Path(__file__).parents[2] / ".tokenizers"
needs_trl = pytest.mark.skipif(TRL is None, reason="needs TRL, which ships published chat templates")
needs_tokenizers = pytest.mark.skipif(
    not REAL.is_dir(), reason="needs the tokenizers that scripts/real_tokenizers.py makes"
)

STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek_r1_distill": ["<｜end▁of▁sentence｜>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "diffusion_gemma": ["<turn|>", "<|tool_response>"],
    "gemma": ["<end_of_turn>"],
    "gemma3": ["<end_of_turn>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|endoftext|>", "<|call|>"],
    "idefics3": ["<end_of_utterance>"],
    "llama3": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    "llava_next": ["</s>"],
    "muse_glimmer": ["<|eot|>"],
    "phi3": ["<|end|>", "<|endoftext|>"],
    "smolvlm": ["<end_of_utterance>"],
}
"""What the engine stops at, as the models' generation configurations have it; for all others `<|im_end|>`."""
CONTROL = re.compile(
    r"<\|[\w ]+\|>|<｜[^｜]+｜>|<\|\w+>|<\w+\|>|<\|\"\|>|<(?:start|end)_of_(?:turn|utterance)>|</s>|\[/?[A-Z_]{3,}\]"
)
TAGS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")


def names() -> list[str]:
    """Of templates as published, without those that TRL has changed for training."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))


def stops_of(name: str) -> list[str]:
    families = sorted((family for family in STOPS if name.startswith(family)), key=len)
    return STOPS[families[-1]] if families else ["<|im_end|>"]


def with_template(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of single bytes with the template and what it writes; one of its own for each call."""
    template = (FOLDER / f"{name}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = sorted({*CONTROL.findall(template), *stops_of(name), "<bos>", "<eos>"})
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens(
        [AddedToken(tag, special=False, normalized=False) for tag in sorted({*TAGS.findall(template)})]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    made.chat_template, made.name_or_path = template, name
    return made


@cache
def real(vocabulary: str, name: str) -> PreTrainedTokenizerFast:
    """A published vocabulary with a published template; made once, so nobody may change it."""
    made = AutoTokenizer.from_pretrained(REAL / vocabulary)
    made.bos_token = "<|begin_of_text|>" if vocabulary == "llama3" else None
    made.chat_template, made.name_or_path = (FOLDER / f"{name}.jinja").read_text(), name
    return made


def format_of(tokenizer: PreTrainedTokenizerFast, **options: Any) -> TemplateFormat:
    stops = [int(tokenizer.convert_tokens_to_ids(stop)) for stop in stops_of(str(tokenizer.name_or_path))]
    return make_format(tokenizer, stops, **options)
