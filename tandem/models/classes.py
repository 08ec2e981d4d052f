"""Which class of transformers a model is, and what computes its attention."""

from functools import cache
from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForTokenClassification

from tandem.models.attention import ATTENTION
from tandem.models.families import PICTURES


def class_of(config: Any, value_head: bool) -> Any:
    """The class of transformers to load a model with."""
    if is_picture_model(config):
        return _critic_of(type(config)) if value_head else transformers.AutoModelForImageTextToText
    return transformers.AutoModelForTokenClassification if value_head else transformers.AutoModelForCausalLM


class ValueLayer(NamedTuple):
    """The layer of one number a token."""

    name: str
    """Its attribute of the model: `score` or `classifier`, by family."""
    linear: nn.Linear


def value_layer(model: PreTrainedModel) -> ValueLayer | None:
    """That of a critic or a reward model; None for a policy."""
    output: Any = model.get_output_embeddings()
    if output is not None:
        return None
    return next(ValueLayer(name, child) for name, child in model.named_children() if isinstance(child, nn.Linear))


class _ValueHead(GenericForTokenClassification):
    """A body, and a head of one number a token."""

    @classmethod
    def from_config(cls: Any, config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
        """As of the classes that transformers chooses by configuration."""
        return cls._from_config(config, **options)


@cache
def _critic_of(config: type[transformers.PreTrainedConfig]) -> type[_ValueHead]:
    """The class with a head of one number a token, which transformers has for families of text alone.

    Weights keep the names under which the family is published; the head's are `score.weight` and `score.bias`.
    """
    policy: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config]
    family = next(parent for parent in policy.__mro__ if parent.__name__.endswith("PreTrainedModel"))
    name = f"{policy.__name__.removesuffix('ForConditionalGeneration')}ForTokenClassification"
    published = get_checkpoint_conversion_mapping(policy.__name__)
    published = published or get_checkpoint_conversion_mapping(config.model_type) or []
    register_checkpoint_conversion_mapping(name, published, overwrite=True)
    return type(name, (_ValueHead, family), {"__module__": __name__})


def attention_of(config: Any, text: str = ATTENTION) -> Any:
    """`attn_implementation`: ours for text. A picture is a row of its own to its tower, which is not causal."""
    return {"": text, "text_config": text, "vision_config": "sdpa"} if is_picture_model(config) else text


def is_picture_model(config: Any) -> bool:
    return config.model_type in PICTURES
