"""What a model directory lacks is made (a value head) or said (anything else)."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from tandem.config.model import ModelConfig
from tandem.errors import UserError
from tandem.models.loading import fill, load_empty, load_model, load_policy, load_tokenizer, named_part


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shape = Qwen2Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.5,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_critic_starts_at_zero_unless_its_directory_has_a_value_head(directory: Path, tmp_path: Path) -> None:
    critic = load_model(ModelConfig(path=directory), value_head=True)
    assert critic.config.attention_dropout == 0
    assert critic.score.weight.shape == (1, 8) and not critic.score.weight.any() and not critic.score.bias.any()
    critic.score.weight.data.fill_(0.5)
    critic.save_pretrained(tmp_path / "critic")
    trained = load_model(ModelConfig(path=tmp_path / "critic"), value_head=True)
    assert (trained.score.weight == 0.5).all()


def test_a_weight_that_is_missing_is_named(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for critic in (False, True):
        with pytest.raises(UserError, match=r"lacks the weight model\.norm\.weight"):
            load_model(ModelConfig(path=directory), critic)


def test_a_directory_without_tokenizer_or_model_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no usable tokenizer \(special tokens are all it knows\)"):
        load_tokenizer(ModelConfig(path=directory))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load_policy(ModelConfig(path=tmp_path / "empty"))
    with pytest.raises(UserError, match=r"there is no .*/nothing; give a Hugging Face model directory"):
        load_policy(ModelConfig(path=tmp_path / "nothing"))


def test_what_is_published_of_experts_goes_where_the_model_holds_them_together(tmp_path: Path) -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "head_dim": 4}
    config = Qwen3MoeConfig(vocab_size=11, intermediate_size=8, **shape, **experts)
    trained, served = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
    trained.save_pretrained(tmp_path)  # by the names that are published
    published = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in published
    for name, tensor in published.items():
        named_part(served, name).copy_(tensor)
    for name, parameter in trained.named_parameters():
        assert parameter.equal(served.get_parameter(name)), name


def test_what_several_ranks_cannot_read_can_be_saved_so_that_they_can(tmp_path: Path) -> None:
    """transformers puts published experts together while loading; every rank reads its part of the files alone."""
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "head_dim": 4}
    config = Qwen3MoeConfig(vocab_size=11, intermediate_size=8, **shape, **experts)
    published = AutoModelForCausalLM.from_config(config)
    published.save_pretrained(tmp_path / "published")
    with pytest.raises(UserError, match=r"lacks the weight .*experts\.down_proj; .*save_original_format=False"):
        filled(tmp_path / "published")
    published.save_pretrained(tmp_path / "as it lies", save_original_format=False)
    assert_equal(filled(tmp_path / "as it lies"), published)


def test_several_ranks_read_weights_by_the_names_that_are_published(tmp_path: Path) -> None:
    """transformers renames a published GPT-NeoX while loading."""
    shape = GPTNeoXConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    published = AutoModelForCausalLM.from_config(shape)
    published.save_pretrained(tmp_path)
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    assert_equal(filled(tmp_path), published)


def filled(directory: Path) -> PreTrainedModel:
    """As a rank reads it."""
    config = ModelConfig(path=directory)
    model: Any = load_empty(config, value_head=False)
    model.to_empty(device="cpu")
    fill(model, config)
    return model


def assert_equal(found: PreTrainedModel, wanted: PreTrainedModel) -> None:
    assert found.state_dict().keys() == wanted.state_dict().keys()
    assert all((found.state_dict()[name] == value).all() for name, value in wanted.state_dict().items())
