"""A tokenizer of 26 letters, and a small model of them that every engine can load."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 26
POSITIONS = 96


def letters() -> PreTrainedTokenizerFast:
    """Token i is the i-th letter; z is a special token."""
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(VOCABULARY)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=["z"])


def served_model(seed: int = 0) -> PreTrainedModel:
    """vLLM wants heads of 32; with a tied output layer, which it packs apart on a CPU."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()
