"""The PyTorch engine against plain transformers: families, packing, order, padding, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.algorithms import make_algorithm
from tandem.algorithms.builtin.grpo import GRPOConfig
from tandem.batching.packing import micro_batches
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import UserError
from tandem.models.attention import ATTENTION, PackedRows, packed_attention
from tandem.models.attention.kernels import Flash
from tandem.training import fsdp
from tandem.training.compiling import CompiledLayers
from tandem.training.context import ContextParallel
from tandem.training.fsdp import FsdpEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.training.tiled_head import TiledVocabularyHead
from tandem.types import Batch, MicroBatch, Outputs, TokenColumns
from tests.flash_operators import flash_operators_on_the_cpu
from tests.saving import save
from tests.storages import Storages

VOCABULARY, ROWS = 29, 8
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {**COMMON, "tie_word_embeddings": True},
    "Qwen3": {**COMMON, "head_dim": 8, "tie_word_embeddings": False},
    "Llama": COMMON,
    "Mistral": {**COMMON, "sliding_window": 4},
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    | {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")},
    "Gemma": {**COMMON, "head_dim": 4},
    "Gemma3Text": {
        **COMMON,
        "head_dim": 4,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Phi": {**COMMON, "num_key_value_heads": 4},
}
LOSS = make_algorithm(GRPOConfig(entropy_coefficient=0.05, loss={"dual_clip": 3.0}), max_response_tokens=16).loss


def model_of(family: str, attention: str = ATTENTION, head: str = "ForCausalLM", **options: Any) -> Any:
    torch.manual_seed(0)
    name = "Gemma3TextConfig" if family == "Gemma3Text" else f"{family}Config"
    config = getattr(transformers, name)(**{**FAMILIES[family], **options}, num_labels=1, attn_implementation=attention)
    config.classifier_dropout = 0.0
    auto = AutoModelForCausalLM if head == "ForCausalLM" else AutoModelForTokenClassification
    model = auto.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def engine_of(model: Any, temperature: float = 1.0, **training: Any) -> FsdpEngine:
    config = FsdpTrainingConfig(**training)
    return FsdpEngine(model, config, AdamWConfig(lr=1e-3), 10, temperature=temperature)


@pytest.fixture
def batch() -> Batch:
    """Siblings, whose prompt a micro-batch computes once, and rows alone."""
    random = np.random.default_rng(1)
    groups = np.array([0, 0, 0, 1, 2, 2, 3, 3], dtype=np.int32)
    asked = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in random.integers(1, 7, 4)]
    prompts, responses = [asked[group] for group in groups], random.integers(1, 14, ROWS)
    tokens = int(responses.sum())
    mask = random.random(tokens) < 0.8
    share = (mask / mask.sum()).astype(np.float32)
    return Batch(
        prompt_ids=np.concatenate(prompts),
        prompt_offsets=np.cumsum([0, *map(len, prompts)]),
        response_ids=random.integers(0, VOCABULARY, tokens).astype(np.int32),
        response_offsets=np.concatenate(([0], responses.cumsum())),
        loss_mask=mask,
        versions=np.zeros(tokens, dtype=np.int32),
        groups=groups,
        trajectories=np.arange(ROWS, dtype=np.int32),
        prompts=groups,
        rewards=np.zeros(ROWS, dtype=np.float32),
        scored=np.ones(ROWS, dtype=np.bool_),
        tokens=TokenColumns(
            advantages=random.normal(size=tokens).astype(np.float32),
            old_logprobs=-random.random(tokens).astype(np.float32) * 6,
            loss_weights=share,
            shares=share,
        ),
    )


def reordered(batch: Batch, rows: np.ndarray) -> Batch:
    """The same rows, each with its own columns, in another order."""

    def take(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = [np.arange(offsets[row], offsets[row + 1]) for row in rows]
        return np.concatenate(places), np.cumsum([0, *map(len, places)])

    prompts, prompt_offsets = take(batch.prompt_offsets)
    tokens, response_offsets = take(batch.response_offsets)
    return Batch(
        batch.prompt_ids[prompts],
        prompt_offsets,
        batch.response_ids[tokens],
        response_offsets,
        batch.loss_mask[tokens],
        batch.versions[tokens],
        batch.groups[rows],
        batch.trajectories[rows],
        batch.prompts[rows],
        batch.rewards[rows],
        batch.scored[rows],
        batch.tokens.map(lambda column: column[tokens]),
    )


def padded_logits(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own padded forward: logits `[T, V]` that predict the response tokens, and those tokens."""
    rows = [
        np.concatenate((batch.prompt_ids[p0:p1], batch.response_ids[r0:r1]))
        for p0, p1, r0, r1 in zip(
            batch.prompt_offsets,
            batch.prompt_offsets[1:],
            batch.response_offsets,
            batch.response_offsets[1:],
            strict=False,
        )
    ]
    longest = max(map(len, rows))
    ids = torch.tensor(np.stack([np.pad(row, (0, longest - len(row))) for row in rows])).long()
    mask = torch.tensor(np.stack([np.arange(longest) < len(row) for row in rows])).long()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    responses = np.diff(batch.response_offsets)
    picked = [
        logits[i, len(row) - n - 1 : len(row) - 1] for i, (row, n) in enumerate(zip(rows, responses, strict=True))
    ]
    return torch.cat(picked), torch.tensor(batch.response_ids).long()


def padded_loss(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, Outputs[torch.Tensor]]:
    logits, targets = padded_logits(model, batch)
    logprobs = torch.log_softmax(logits / temperature, -1)
    mask = torch.from_numpy(batch.loss_mask)
    outputs = Outputs(logprobs.gather(1, targets[:, None]).squeeze(1)[mask], -(logprobs.exp() * logprobs).sum(-1)[mask])
    loss, _ = LOSS(outputs, batch.tokens.map(lambda column: torch.from_numpy(column)[mask]))
    return loss, outputs


def train(engine: FsdpEngine, packed: Sequence[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one pass and its gradients."""
    loss = engine.forward_backward(packed, LOSS).loss
    gradients = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    engine.model.zero_grad()
    return loss, gradients


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    scale = max(gradient.abs().max().item() for gradient in wanted.values())
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=atol * max(1, scale))


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropy_loss_and_gradients_are_those_of_a_padded_transformers_pass(
    family: str, temperature: float, batch: Batch
) -> None:
    model = model_of(family)
    plain = model_of(family, "eager")
    plain.load_state_dict(model.state_dict())
    wanted_loss, wanted = padded_loss(plain, batch, temperature)
    wanted_loss.backward()
    engine = engine_of(model, temperature)
    packed = micro_batches(batch, range(ROWS), 40)
    assert len(packed) > 1
    order = np.argsort(np.concatenate([m.source for m in packed]))
    outputs = engine.forward(packed)
    logprobs = torch.cat([o.logprobs_S for o in outputs if o.logprobs_S is not None])[order]
    entropy = torch.cat([o.entropy_S for o in outputs if o.entropy_S is not None])[order]
    assert wanted.logprobs_S is not None and wanted.entropy_S is not None
    torch.testing.assert_close(logprobs, wanted.logprobs_S.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, wanted.entropy_S.detach(), rtol=0, atol=1e-5)
    loss, gradients = train(engine, packed)
    assert loss == pytest.approx(wanted_loss.item(), rel=1e-5, abs=1e-6)
    assert_close(gradients, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, 2e-6)


@pytest.mark.parametrize("tokens_per_micro_batch", [1, 17, 30, 64])
def test_neither_micro_batches_nor_row_order_change_loss_or_gradients(
    tokens_per_micro_batch: int, batch: Batch
) -> None:
    engine = engine_of(model_of("Qwen2"))
    wanted_loss, wanted = train(engine, micro_batches(batch, range(ROWS), 10_000))
    shuffled = reordered(batch, np.random.default_rng(3).permutation(ROWS))
    loss, gradients = train(engine, micro_batches(shuffled, range(ROWS), tokens_per_micro_batch))
    assert loss == pytest.approx(wanted_loss, rel=1e-6, abs=1e-6)
    assert_close(gradients, wanted)


def test_a_row_without_weight_can_be_left_out(batch: Batch) -> None:
    engine = engine_of(model_of("Qwen2"))
    assert batch.tokens.loss_weights is not None
    batch.tokens.loss_weights[batch.row_of_token == 3] = 0
    wanted_loss, wanted = train(engine, micro_batches(batch, range(ROWS), 10_000))
    loss, gradients = train(engine, micro_batches(batch, [row for row in range(ROWS) if row != 3], 10_000))
    assert loss == pytest.approx(wanted_loss, rel=1e-6, abs=1e-6)
    assert_close(gradients, wanted)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize(("family", "checkpointing"), [("Qwen2", False), ("Gemma3Text", True), ("GPT2", "selective")])
def test_compiled_layers_are_the_same_graphs_for_all_lengths(
    family: str, checkpointing: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, options = CompileCounterWithBackend("eager"), {"activation_checkpointing": checkpointing}
    torch._dynamo.reset()
    monkeypatch.setattr(fsdp, "_compiled_layers", lambda model: CompiledLayers(model, graphs).passing)
    plain, engine = engine_of(model_of(family), **options), engine_of(model_of(family), compile=True, **options)
    lengths = [micro_batches(batch, range(ROWS), tokens) for tokens in (10_000, 17)]
    counted = []
    for rows in lengths:
        (loss, gradients), (wanted_loss, wanted) = train(engine, rows), train(plain, rows)
        assert loss == pytest.approx(wanted_loss, rel=1e-6, abs=1e-6)
        assert_close(gradients, wanted, 2e-6)
        counted.append(graphs.frame_count)
    assert 0 < counted[0] == counted[1]
    layer = next(module for module in engine.model.modules() if isinstance(module, GradientCheckpointingLayer))
    assert "compile" not in repr(layer.forward), "generation with this model would run it compiled"


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.skipif(which("g++") is None, reason="on a CPU torch.compile needs a C++ compiler")
def test_compiled_code_computes_what_layers_do(batch: Batch) -> None:
    torch._dynamo.reset()
    packed = micro_batches(batch, range(ROWS), 40)
    loss, gradients = train(engine_of(model_of("Qwen2")), packed)
    compiled_loss, compiled_gradients = train(engine_of(model_of("Qwen2"), compile=True), packed)
    assert compiled_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert_close(compiled_gradients, gradients, 2e-6)


@pytest.mark.parametrize("family", ["Qwen2", "GPT2"])
def test_activation_checkpointing_recomputes_and_changes_nothing(family: str, batch: Batch) -> None:
    calls = {False: 0, True: 0}
    results: list[tuple[float, dict[str, torch.Tensor]]] = []
    for checkpointing in (False, True):
        engine = engine_of(model_of(family), activation_checkpointing=checkpointing)
        first = next(m for m in engine.model.modules() if type(m).__name__.endswith("MLP"))

        def count(*_: Any, checkpointing: bool = checkpointing) -> None:
            calls[checkpointing] += 1

        first.register_forward_pre_hook(count)
        results.append(train(engine, micro_batches(batch, range(ROWS), 10_000)))
    assert calls == {False: 1, True: 2}
    assert results[0][0] == results[1][0]
    assert_close(results[1][1], results[0][1], 0)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"], ids=["tied", "untied"])
def test_the_tiles_of_a_gpu_change_nothing(family: str, batch: Batch) -> None:
    whole, tiled = engine_of(model_of(family)), engine_of(model_of(family))
    tiled._head = TiledVocabularyHead(tiled.model.get_output_embeddings(), tile_tokens=5, tile_vocabulary=8)
    packed = micro_batches(batch, range(ROWS), 30)
    (wanted_loss, wanted), (loss, gradients) = train(whole, packed), train(tiled, packed)
    assert loss == pytest.approx(wanted_loss, rel=1e-6, abs=1e-6)
    assert_close(gradients, wanted)


class Ran(TorchDispatchMode):
    """Counts the attention kernels that ran, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.removesuffix(".default")
        self.forward += name in ("_flash_attention_forward", "_scaled_dot_product_flash_attention_for_cpu")
        self.backward += name in ("_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward")
        return func(*args, **(kwargs or {}))


def rows_after_a_long_prompt(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> MicroBatch:
    """One micro-batch, whose attention takes two pieces: each prompt counts as long."""
    monkeypatch.setattr(packed_attention, "_WORTH_A_PIECE", 1)
    (whole,) = micro_batches(batch, range(ROWS), 10_000)
    return whole


@pytest.mark.parametrize("kernel", ["cpu, one piece", "cpu", "flash"])
@pytest.mark.parametrize("family", ["Qwen2", "Mistral", "GPT2"])
def test_selective_checkpointing_runs_attention_once(
    family: str, kernel: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel != "cpu, one piece":
        whole = rows_after_a_long_prompt(batch, monkeypatch)
    else:
        (whole,) = micro_batches(batch, range(ROWS), 10_000)
    ran: dict[bool | str, tuple[int, int]] = {}
    results: list[tuple[float, dict[str, torch.Tensor]]] = []
    with flash_operators_on_the_cpu([torch.float32]) if kernel == "flash" else nullcontext():
        if kernel == "flash":
            monkeypatch.setattr(packed_attention, "kernel_for", lambda *_: Flash)
        for how in (False, True, "selective"):
            engine = engine_of(model_of(family), activation_checkpointing=how)
            with Ran() as counted:
                results.append(train(engine, [whole, whole]))
            ran[how] = counted.forward, counted.backward
    once, backward = ran[False]
    assert once == backward and once >= 2 * 2 * (1 if family == "Mistral" or "one" in kernel else 2)
    assert ran == {False: (once, once), True: (2 * once, once), "selective": (once, once)}
    for loss, gradients in results[1:]:
        assert loss == results[0][0]
        assert_close(gradients, results[0][1], 0)


def test_nothing_of_a_micro_batch_but_its_outputs_outlives_it(batch: Batch) -> None:
    engine = engine_of(model_of("Qwen2"))
    packed = [*micro_batches(batch, range(ROWS), 10_000)] * 4
    train(engine, packed[:1])  # what is made once
    held: list[int] = []
    plans: set[ref[PackedRows]] = set()

    def begins(_: Any, __: Any, options: dict[str, Any]) -> None:
        held.append(storages.held)
        assert not any(plan() for plan in plans), "the plan of an earlier micro-batch holds its masks"
        plans.add(ref(options["attention_plan"]))

    engine.model.base_model.register_forward_pre_hook(begins, with_kwargs=True)
    outputs = 4 * 3 * len(packed[0].predicted_at)
    for run in (engine.forward, lambda parts: train(engine, parts)):
        held.clear()
        plans.clear()
        with Storages() as storages:
            run(packed)
        assert len(held) == 4
        assert all(later - earlier <= outputs for earlier, later in pairwise(held[1:])), held


def test_values_are_the_heads_at_the_scored_positions(batch: Batch) -> None:
    for family in ("Qwen2", "GPT2"):
        plain = model_of(family, "eager", "ForTokenClassification")
        model = model_of(family, ATTENTION, "ForTokenClassification")
        model.load_state_dict(plain.state_dict())
        engine = FsdpEngine(model, FsdpTrainingConfig(), AdamWConfig())
        wanted = padded_logits(plain, batch)[0].squeeze(-1)[torch.from_numpy(batch.loss_mask)]
        (whole,) = micro_batches(batch, range(ROWS), 10_000)
        values = engine.forward([whole])[0].values_S
        assert values is not None
        torch.testing.assert_close(values, wanted.detach()[np.argsort(np.argsort(whole.source))], rtol=0, atol=1e-5)


def test_bfloat16_stays_close_to_float32(batch: Batch) -> None:
    model = model_of("Qwen2")
    (whole,) = micro_batches(batch, range(ROWS), 10_000)
    exact = engine_of(deepcopy(model)).forward([whole])[0]
    rounded = engine_of(model.to(torch.bfloat16)).forward([whole])[0]
    assert exact.logprobs_S is not None and rounded.logprobs_S is not None
    assert rounded.logprobs_S.dtype == torch.float32
    assert (exact.logprobs_S - rounded.logprobs_S).abs().mean() < 0.1


def test_a_frozen_engine_keeps_no_gradients(batch: Batch) -> None:
    engine = FsdpEngine(model_of("Qwen2"), FsdpTrainingConfig(), optimizer=None)
    (whole,) = micro_batches(batch, range(ROWS), 10_000)
    assert engine.forward([whole])[0].logprobs_S is not None
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    with pytest.raises(AssertionError, match="frozen"):
        engine.optimizer_step()


def test_the_saved_model_directory_loads_with_transformers(batch: Batch, tmp_path: Path) -> None:
    engine = engine_of(model_of("Qwen2"))
    train(engine, micro_batches(batch, range(ROWS), 10_000))
    engine.optimizer_step()
    save(engine, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    _, wanted = padded_loss(loaded, batch)
    (whole,) = micro_batches(batch, range(ROWS), 10_000)
    found = engine.forward([whole])[0].logprobs_S
    assert found is not None and wanted.logprobs_S is not None
    torch.testing.assert_close(
        found, wanted.logprobs_S.detach()[np.argsort(np.argsort(whole.source))], rtol=0, atol=1e-5
    )
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["rank_00000.safetensors"]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    engine = engine_of(model_of("Qwen2"))
    with pytest.raises(UserError, match=r"state.*is not a training state of this model"):
        engine.load(tmp_path)
    save(engine, tmp_path)
    tensors = tmp_path / "state" / "rank_00000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:100])
    with pytest.raises(UserError, match=r"state.*is not a training state of this model"):
        engine.load(tmp_path)


def test_context_parallelism_finds_the_heads_of_a_model_that_also_sees_images() -> None:
    with pytest.raises(UserError, match=r"groups of 3 cannot share 1 ranks or 8 attention heads"):
        ContextParallel(3, transformers.Gemma3Config(text_config={"num_attention_heads": 8}))
