"""Which class of transformers a model is, and what computes its attention."""

from typing import Any

import transformers

from tandem.models.attention import ATTENTION
from tandem.models.families import PICTURES


def class_of(config: Any, value_head: bool) -> Any:
    """The class of transformers to load a model with."""
    if value_head:
        return transformers.AutoModelForTokenClassification
    return transformers.AutoModelForImageTextToText if is_picture_model(config) else transformers.AutoModelForCausalLM


def attention_of(config: Any, text: str = ATTENTION) -> Any:
    """`attn_implementation`: ours for text. A picture is a row of its own to its tower, which is not causal."""
    return {"": text, "text_config": text, "vision_config": "sdpa"} if is_picture_model(config) else text


def is_picture_model(config: Any) -> bool:
    return config.model_type in PICTURES
