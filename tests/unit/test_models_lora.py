"""Adapters: what they compute, train, merge into, and leave on disk, against PEFT's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    PeftModel,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DeepseekV3Config,
    GPT2Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from tandem.config.model import LoraConfig, ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import UserError
from tandem.models.tiny import tiny
from tandem.training.fsdp import FsdpEngine, make_engine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import MicroBatch, Outputs, TokenColumns
from tandem.weights.base import BucketHalf, Part
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
    engine = make_engine(model, FsdpTrainingConfig(), AdamWConfig(lr=1e-2), total_steps=5)
    assert isinstance(engine, FsdpEngine)
    return engine


class Targets:
    """The squared distance of values from numbers that are of no model, `[S]` or `[]`."""

    token_local = True

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.values_S is not None
        return (outputs.values_S - torch.linspace(-1, 2, len(outputs.values_S))).square().sum(), {}


def valued(path: Path, scores_rows: bool) -> FsdpEngine:
    """A reward model or a critic with adapters, beside layers of every kind."""
    model = ModelConfig(path=path, lora=LoraConfig(rank=3, alpha=6))
    how: dict[str, Any] = {"total_steps": 5, "value_head": True, "scores_rows": scores_rows}
    engine = make_engine(model, FsdpTrainingConfig(), AdamWConfig(lr=1e-2), **how)
    assert isinstance(engine, FsdpEngine)
    return engine


def taught(engine: FsdpEngine) -> FsdpEngine:
    for _ in range(3):
        engine.forward_backward([micro_batch()], Targets())
        engine.optimizer_step()
    return engine


def values(engine: Any) -> torch.Tensor:
    return engine.forward([micro_batch()])[0].values_S


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
        for name, weight in attach(part) if isinstance(part, BucketHalf) else ():
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


def test_what_does_not_learn_has_none(tmp_path: Path) -> None:
    model = ModelConfig(path=directory_of("qwen2", tmp_path), lora=LoraConfig())
    for value_head in (False, True):
        engine: Any = make_engine(model, FsdpTrainingConfig(), None, value_head=value_head)
        assert not [name for name, _ in engine.model.named_parameters() if "lora" in name]


@pytest.mark.parametrize("scores_rows", [True, False], ids=["reward model", "critic"])
@pytest.mark.parametrize("family", SHAPES)
def test_a_value_head_learns_beside_adapters_and_all_else_stays(family: str, scores_rows: bool, tmp_path: Path) -> None:
    """The optimizer has nothing of the rest; the bias of a reward model, which no comparison sees, stays 0."""
    engine = valued(directory_of(family, tmp_path), scores_rows)
    assert torch.equal(values(engine), torch.zeros(11)), "a new head says 0"
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    taught(engine)
    changed = {name for name, p in engine.model.named_parameters() if not torch.equal(p, before[name])}
    head = {name for name in before if name.startswith(("score.", "classifier."))}
    adapters = {name for name in before if ".lora_" in name}
    assert len(head) == 2 and len(adapters) == 2 * {"qwen2": 14, "gpt2": 8}[family]
    learning = adapters | {name for name in head if not (scores_rows and name.endswith(".bias"))}
    assert changed == learning == engine._trained.masters.keys()
    assert len({name for name, _ in engine.named_weights()} & head) == len(learning & head)


@pytest.mark.parametrize("started", ["policy", "reward model"])
@pytest.mark.parametrize("family", SHAPES)
def test_a_reward_model_s_adapters_and_head_are_peft_s(family: str, started: str, tmp_path: Path) -> None:
    """As a model of one score a row, which has no bias: also where the run starts from one that has."""
    path = directory_of(family, tmp_path)
    if started == "reward model":
        first: Any = AutoModelForTokenClassification.from_pretrained(path, num_labels=1)
        for parameter in (first.score if family == "qwen2" else first.classifier).parameters():
            torch.nn.init.constant_(parameter, 0.5)
        path = tmp_path / "first"
        first.save_pretrained(path)
    engine = taught(valued(path, scores_rows=True))
    save(engine, tmp_path)
    found, ids = values(engine), torch.from_numpy(micro_batch().token_ids).long()
    made: Any = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1)
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    added: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    merged: Any = AutoModelForTokenClassification.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        for last in (1, 5, 11):
            row = ids[None, :last]
            for model in (made, added):
                torch.testing.assert_close(model(row).logits.squeeze(), found[last - 1], rtol=0, atol=1e-5)
        torch.testing.assert_close(merged(ids[None]).logits[0, :-1, 0], found, rtol=0, atol=1e-5)
    assert (found - found.mean()).abs().max() > 0.1


@pytest.mark.parametrize("family", SHAPES)
def test_a_critic_s_adapters_and_head_are_peft_s(family: str, tmp_path: Path) -> None:
    """As a model of one number a token, bias and all."""
    engine = taught(valued(directory_of(family, tmp_path), scores_rows=False))
    save(engine, tmp_path)
    loaded: Any = AutoPeftModelForTokenClassification.from_pretrained(tmp_path / "adapter", num_labels=1)
    with torch.no_grad():
        wanted = loaded(torch.from_numpy(micro_batch().token_ids).long()[None]).logits[0, :-1, 0]
    torch.testing.assert_close(values(engine), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scores_rows", [True, False], ids=["reward model", "critic"])
def test_what_has_a_value_head_resumes_bit_for_bit(scores_rows: bool, tmp_path: Path) -> None:
    path = directory_of("qwen2", tmp_path)
    engine, resumed = taught(valued(path, scores_rows)), valued(path, scores_rows)
    save(engine, tmp_path)
    resumed.load(tmp_path)
    assert torch.equal(values(engine), values(resumed))
    assert torch.equal(values(taught(engine)), values(taught(resumed)))


def test_a_target_that_the_critic_lacks_is_refused_under_its_own_key(tmp_path: Path) -> None:
    model = ModelConfig(path=directory_of("qwen2", tmp_path), lora=LoraConfig(target_modules=["score"]))
    with pytest.raises(UserError, match=r"model\.critic_lora\.target_modules: no linear layer .* is named score"):
        make_engine(model, FsdpTrainingConfig(), AdamWConfig(), value_head=True)


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
