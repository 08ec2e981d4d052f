"""Adapters: what they compute, train, merge into, and leave on disk, against PEFT's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, PhimoeConfig, Qwen2Config, Qwen3MoeConfig

from tandem.config.algorithms import OptimizerConfig
from tandem.config.model import LoraConfig, ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import UserError
from tandem.models.tiny import tiny
from tandem.training.fsdp import FsdpEngine, make_engine
from tandem.types import MicroBatch, Outputs, TokenColumns
from tandem.weights.base import Bucket, Part
from tandem.weights.shared_memory import SharedMemorySync, attach
from tests.saving import save

VOCABULARY = 23
SHAPES = {
    "qwen2": Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    ),
}
"""GPT-2's layers keep their weights transposed."""
MIXTURES = {
    "qwen3_moe": Qwen3MoeConfig,
    "phimoe": PhimoeConfig,  # its routers are linear layers of a kind of their own
    "deepseek_v3": DeepseekV3Config,  # a dense layer comes first, and experts that every token is sent to
}


class Imitation:
    token_local = True

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.logprobs_S is not None
        return -outputs.logprobs_S.sum(), {}


def directory_of(family: str, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPES[family]).save_pretrained(directory / family)
    return directory / family


def engine_of(path: Path, **lora: Any) -> FsdpEngine:
    model = ModelConfig(path=path, lora=LoraConfig(rank=3, alpha=6, **lora))
    engine = make_engine(model, FsdpTrainingConfig(), OptimizerConfig(lr=1e-2), total_steps=5)
    assert isinstance(engine, FsdpEngine)
    return engine


def micro_batch() -> MicroBatch:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 12).astype(np.int32)
    scored = np.arange(11)
    return MicroBatch(tokens, np.array([0, 12]), np.array([-1]), scored, tokens[1:], TokenColumns(), scored)


def trained(engine: FsdpEngine) -> FsdpEngine:
    for _ in range(3):
        engine.forward_backward([micro_batch()], Imitation())
        engine.optimizer_step()
    return engine


def logprobs(model: Any) -> torch.Tensor:
    ids = torch.from_numpy(micro_batch().token_ids).long()
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)


def test_adapters_change_nothing_at_first_and_are_all_that_learns(tmp_path: Path) -> None:
    path = directory_of("qwen2", tmp_path)
    engine, plain = engine_of(path), AutoModelForCausalLM.from_pretrained(path)
    torch.testing.assert_close(engine.forward([micro_batch()])[0].logprobs_S, logprobs(plain), rtol=0, atol=1e-5)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    trained(engine)
    changed = {name for name, p in engine.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".lora_" in name} and len(changed) == 2 * 2 * 7
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize("family", SHAPES)
def test_merged_weights_and_saved_adapters_are_peft_s(family: str, tmp_path: Path) -> None:
    path = directory_of(family, tmp_path)
    engine = trained(engine_of(path))
    save(engine, tmp_path)
    found = engine.forward([micro_batch()])[0].logprobs_S
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert found is not None
    torch.testing.assert_close(logprobs(loaded), found, rtol=0, atol=1e-5)
    wanted = dict(loaded.merge_and_unload().named_parameters())
    published = dict(engine.named_weights())
    assert published.keys() == {name for name in wanted if ".self_attn." in name or ".attn." in name or ".mlp." in name}
    for name, weight in published.items():
        torch.testing.assert_close(weight, wanted[name].detach(), rtol=0, atol=1e-6)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(logprobs(merged), found, rtol=0, atol=1e-5)
    assert (found - logprobs(AutoModelForCausalLM.from_pretrained(path))).abs().max() > 0.01


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_adapted_outside_its_experts(family: str, tmp_path: Path) -> None:
    """PEFT would also wrap the experts, which are one parameter together; merged weights would leave that out."""
    path = tmp_path / family
    config = tiny(MIXTURES[family](vocab_size=VOCABULARY))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    engine = trained(engine_of(path))
    save(engine, tmp_path)
    adapted = [name for name, _ in engine.model.named_parameters() if ".lora_B." in name]
    assert adapted and not any(".experts." in name for name in adapted)
    assert not any(".base_layer" in name for name, _ in engine.named_weights())
    found = engine.forward([micro_batch()])[0].logprobs_S
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(logprobs(merged), found, rtol=0, atol=1e-5)
    assert (found - logprobs(AutoModelForCausalLM.from_pretrained(path))).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("targets", "moved"),
    [
        ("all-linear", ("self_attn", "mlp")),
        (["q_proj", "v_proj"], ("self_attn",)),  # all of it: engines keep q, k and v as one matrix
        (["up_proj"], ("mlp",)),
    ],
)
def test_a_publish_moves_the_bytes_of_layers_with_adapters_alone(
    targets: Any, moved: tuple[str, ...], tmp_path: Path
) -> None:
    path = directory_of("qwen2", tmp_path)
    engine, served = trained(engine_of(path, target_modules=targets)), AutoModelForCausalLM.from_pretrained(path)
    sizes: list[int] = []

    def deliver(part: Part) -> Callable[[], None]:
        for name, weight in attach(part) if isinstance(part, Bucket) else ():
            served.get_parameter(name).data.copy_(weight)
            sizes.append(weight.nbytes)
        return lambda: None

    sync = SharedMemorySync(1 << 14)
    sync.publish(1, engine.named_weights(), deliver)
    sync.close()
    wanted = [p for name, p in served.named_parameters() if any(f".{block}." in name for block in moved)]
    assert sum(sizes) == sum(parameter.nbytes for parameter in wanted)
    torch.testing.assert_close(logprobs(served), engine.forward([micro_batch()])[0].logprobs_S, rtol=0, atol=1e-5)


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    path = directory_of("qwen2", tmp_path)
    engine, resumed = trained(engine_of(path)), engine_of(path)
    save(engine, tmp_path)
    resumed.load(tmp_path)
    first, second = (dict(trained(x).named_weights()) for x in (engine, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_the_named_layers_get_adapters_and_a_wrong_name_is_refused(tmp_path: Path) -> None:
    path = directory_of("qwen2", tmp_path)
    names = [name for name, p in engine_of(path, target_modules=["q_proj"]).model.named_parameters() if p.requires_grad]
    assert len(names) == 4 and all(".q_proj.lora_" in name for name in names)
    with pytest.raises(UserError, match=r"model\.lora\.target_modules: no linear layer of the model is named query"):
        engine_of(path, target_modules=["query"])


def test_critics_and_references_have_none(tmp_path: Path) -> None:
    model = ModelConfig(path=directory_of("qwen2", tmp_path), lora=LoraConfig())
    for engine in (
        make_engine(model, FsdpTrainingConfig(), OptimizerConfig(), value_head=True),
        make_engine(model, FsdpTrainingConfig(), None),
    ):
        assert not [name for name, _ in engine.named_weights() if "lora" in name or "base_layer" in name]


def test_a_policy_without_its_adapters_is_the_model_that_it_was(tmp_path: Path) -> None:
    path = directory_of("qwen2", tmp_path)
    reference = make_engine(ModelConfig(path=path), FsdpTrainingConfig(), None)
    engine = trained(engine_of(path))
    learning = {name for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    (wanted,), (adapted,) = reference.forward([micro_batch()]), engine.forward([micro_batch()])
    (found,) = engine.forward([micro_batch()], adapted=False)
    torch.testing.assert_close(found.logprobs_S, wanted.logprobs_S, rtol=0, atol=0)
    assert adapted.logprobs_S is not None and not torch.equal(adapted.logprobs_S, wanted.logprobs_S)
    (again,) = engine.forward([micro_batch()])
    torch.testing.assert_close(again.logprobs_S, adapted.logprobs_S, rtol=0, atol=0)
    assert {name for name, parameter in engine.model.named_parameters() if parameter.requires_grad} == learning
