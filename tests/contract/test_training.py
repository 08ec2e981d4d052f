"""What every TrainEngine promises: one suite, run on each engine and on the fake."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from tandem.batching.packing import micro_batches
from tandem.config.optimizer import OptimizerConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import EngineError, UserError
from tandem.models.attention import ATTENTION
from tandem.training.base import TrainEngine
from tandem.training.fake import FakeTrainEngine
from tandem.training.fsdp import FsdpEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, Outputs, TokenColumns
from tests.optimizers import OPTIMIZERS
from tests.saving import save

VOCABULARY = 23
ROWS = 9


class Imitation:
    """Raise the log-prob, or move the value to 1: sum of weight * loss."""

    token_local = True

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights_S, shares_S = columns.loss_weights, columns.shares
        assert weights_S is not None and shares_S is not None
        if outputs.values_S is not None:
            term_S = (outputs.values_S - 1).square()
        else:
            assert outputs.logprobs_S is not None
            term_S = -outputs.logprobs_S
        return (weights_S * term_S).sum(), {"mean": (shares_S * term_S.detach()).sum()}


def qwen2(kind: type, dtype: torch.dtype, hidden: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        num_labels=1,
        classifier_dropout=0.0,
        attn_implementation=ATTENTION,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return kind(config).to(dtype)


STEPS: dict[str, Any] = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.01}


def policy(
    dtype: torch.dtype, hidden: int = 16, optimizer: type[OptimizerConfig] = AdamWConfig, **options: Any
) -> FsdpEngine:
    model = qwen2(Qwen2ForCausalLM, dtype, hidden)
    return FsdpEngine(model, FsdpTrainingConfig(**options), optimizer(**STEPS), total_steps=20)


def critic(hidden: int = 16) -> FsdpEngine:
    model = qwen2(Qwen2ForTokenClassification, torch.float32, hidden)
    return FsdpEngine(model, FsdpTrainingConfig(), AdamWConfig(**STEPS), total_steps=20)


Make = Callable[[], TrainEngine]

ENGINES: dict[str, Make] = {
    "fsdp-policy-float32": lambda: policy(torch.float32),
    "fsdp-policy-bfloat16": lambda: policy(torch.bfloat16),
    "fsdp-policy-checkpointing": lambda: policy(torch.float32, activation_checkpointing=True),
    "fsdp-policy-offload": lambda: policy(torch.bfloat16, optimizer_offload=True),
    "fsdp-critic": critic,
    "fake-policy": lambda: FakeTrainEngine(VOCABULARY),
    "fake-critic": lambda: FakeTrainEngine(VOCABULARY, values=True),
}
for name, kind in OPTIMIZERS.items():
    if kind is not AdamWConfig:
        ENGINES[f"fsdp-policy-{name}"] = partial(policy, torch.bfloat16, 64, kind, optimizer_offload=True)
OTHER_MODEL: dict[str, Make] = {
    "fsdp-policy-float32": lambda: policy(torch.float32, hidden=32),
    "fsdp-critic": lambda: critic(hidden=32),
    "fake-policy": lambda: FakeTrainEngine(VOCABULARY + 1),
}

NIGHTLY: tuple[str, ...] = ()
if find_spec("megatron"):
    from tests.megatron import engines

    ENGINES |= engines.ENGINES
    OTHER_MODEL |= engines.OTHER_MODEL
    NIGHTLY = engines.NIGHTLY


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in names]


@pytest.fixture(params=marked(ENGINES))
def make(request: pytest.FixtureRequest) -> Make:
    return ENGINES[request.param]


@pytest.fixture
def batch() -> Batch:
    random = np.random.default_rng(0)
    prompts, responses = random.integers(1, 6, ROWS), random.integers(1, 9, ROWS)
    tokens = int(responses.sum())
    mask = random.random(tokens) < 0.8
    share = (mask / mask.sum()).astype(np.float32)
    return Batch(
        prompt_ids=random.integers(0, VOCABULARY, prompts.sum()).astype(np.int32),
        prompt_offsets=np.concatenate(([0], prompts.cumsum())),
        response_ids=random.integers(0, VOCABULARY, tokens).astype(np.int32),
        response_offsets=np.concatenate(([0], responses.cumsum())),
        loss_mask=mask,
        versions=np.zeros(tokens, dtype=np.int32),
        groups=np.arange(ROWS, dtype=np.int32),
        trajectories=np.arange(ROWS, dtype=np.int32),
        prompts=np.arange(ROWS, dtype=np.int32),
        rewards=np.zeros(ROWS, dtype=np.float32),
        scored=np.ones(ROWS, dtype=np.bool_),
        tokens=TokenColumns(loss_weights=share, shares=share),
    )


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def assert_same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=atol)


def train(engine: TrainEngine, batch: Batch, steps: int, tokens: int = 1000) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        losses.append(engine.forward_backward(micro_batches(batch, range(ROWS), tokens), Imitation()).loss)
        engine.optimizer_step()
    return losses


def test_forward_returns_float32_per_scored_token_without_gradient(make: Make, batch: Batch) -> None:
    engine = make()
    (whole,) = micro_batches(batch, range(ROWS), 1000)
    (outputs,) = engine.forward([whole])
    columns = [x for x in (outputs.logprobs_S, outputs.entropy_S, outputs.values_S) if x is not None]
    assert len(columns) == (2 if outputs.values_S is None else 1)
    for column in columns:
        assert column.shape == whole.predicted_at.shape and column.dtype == torch.float32 and not column.requires_grad
        assert column.isfinite().all()


def test_forward_backward_reports_the_loss_and_what_forward_says(make: Make, batch: Batch) -> None:
    engine = make()
    (whole,) = micro_batches(batch, range(ROWS), 1000)
    (wanted,) = engine.forward([whole])
    result = engine.forward_backward([whole], Imitation())
    (outputs,) = result.outputs
    for found, want in (
        (outputs.logprobs_S, wanted.logprobs_S),
        (outputs.entropy_S, wanted.entropy_S),
        (outputs.values_S, wanted.values_S),
    ):
        assert (found is None) == (want is None)
        if found is not None and want is not None:
            assert not found.requires_grad
            torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    loss, metrics = Imitation()(wanted, whole.columns.map(torch.from_numpy))
    assert result.loss == pytest.approx(loss.item(), abs=1e-6)
    assert result.metrics == {"mean": pytest.approx(metrics["mean"].item(), abs=1e-6)}


def test_training_lowers_the_loss(make: Make, batch: Batch) -> None:
    losses = train(make(), batch, steps=12)
    assert losses[-1] < 0.97 * losses[0]


def test_gradients_of_micro_batches_add_up(make: Make, batch: Batch) -> None:
    whole, cut = make(), make()
    assert len(micro_batches(batch, range(ROWS), 20)) > 2
    norms: list[float] = []
    for engine, tokens in ((whole, 1000), (cut, 20)):
        engine.forward_backward(micro_batches(batch, range(ROWS), tokens), Imitation())
        norms.append(engine.optimizer_step()["grad_norm"])
    _, weight = next(whole.named_weights())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5 if weight.dtype == torch.float32 else 2e-2)


def test_a_pass_without_micro_batches_changes_nothing(make: Make, batch: Batch) -> None:
    engine = make()
    assert engine.forward([]) == []
    result = engine.forward_backward([], Imitation())
    assert (result.loss, result.metrics, result.outputs) == (0, {}, [])
    assert engine.optimizer_step()["grad_norm"] == 0


def test_a_step_consumes_the_gradients(make: Make, batch: Batch) -> None:
    engine = make()
    train(engine, batch, steps=1)
    assert engine.optimizer_step()["grad_norm"] == 0


def test_a_gradient_that_is_not_finite_changes_nothing(make: Make, batch: Batch) -> None:
    engine = make()
    train(engine, batch, steps=1)
    before = weights_of(engine)
    assert batch.tokens.loss_weights is not None
    batch.tokens.loss_weights[np.flatnonzero(batch.loss_mask)[0]] = np.inf
    engine.forward_backward(micro_batches(batch, range(ROWS), 1000), Imitation())
    with pytest.raises(EngineError, match="gradient norm is"):
        engine.optimizer_step()
    assert_same_weights(before, weights_of(engine))


def test_load_continues_bit_for_bit_in_the_same_tensors(make: Make, batch: Batch, tmp_path: Path) -> None:
    engine, resumed = make(), make()
    train(engine, batch, steps=3)
    save(engine, tmp_path)
    losses = train(engine, batch, steps=2)
    train(resumed, batch, steps=1)
    shared = isinstance(resumed, FsdpEngine)  # with generation; others make what they hand out
    storage = [tensor.data_ptr() for _, tensor in resumed.named_weights()] if shared else []
    resumed.load(tmp_path)
    assert train(resumed, batch, steps=2) == losses
    assert_same_weights(weights_of(engine), weights_of(resumed))
    assert not shared or [tensor.data_ptr() for _, tensor in resumed.named_weights()] == storage


def test_what_is_written_is_the_copy_although_training_goes_on(make: Make, batch: Batch, tmp_path: Path) -> None:
    """Written from live tensors, state and model directory would be those of two steps later."""
    engine, resumed = make(), make()
    train(engine, batch, steps=1)
    files, copied = engine.save(tmp_path), {name: weight.clone() for name, weight in weights_of(engine).items()}
    losses = train(engine, batch, steps=2)
    for file in files:
        file.write()
    if dist.is_initialized():
        dist.barrier()
    for path in sorted((tmp_path / "model").glob("*.safetensors")):
        for name, weight in load_file(path).items():
            assert name not in copied or torch.equal(weight, copied[name].cpu()), name
    resumed.load(tmp_path)
    assert_same_weights(weights_of(resumed), copied)
    assert train(resumed, batch, steps=2) == losses


def test_a_state_from_before_the_first_step_loads(make: Make, batch: Batch, tmp_path: Path) -> None:
    engine, resumed = make(), make()
    save(engine, tmp_path)
    losses = train(engine, batch, steps=2)
    train(resumed, batch, steps=2)
    resumed.load(tmp_path)
    assert train(resumed, batch, steps=2) == losses


def test_a_new_schedule_begins_with_the_moments_that_there_are(make: Make, batch: Batch, tmp_path: Path) -> None:
    """What is saved then knows its own place in the schedule."""

    def lr_of_a_step(engine: TrainEngine) -> float:
        engine.forward_backward(micro_batches(batch, range(ROWS), 1000), Imitation())
        return engine.optimizer_step()["lr"]

    engine, resumed, anew, again = make(), make(), make(), make()
    lrs = [lr_of_a_step(engine) for _ in range(2)]
    for saved in (first := tmp_path / "first", second := tmp_path / "second"):
        saved.mkdir(exist_ok=True)  # on several ranks each of them makes it
    save(engine, first)
    resumed.load(first)
    anew.load(first, new_schedule=True)
    assert_same_weights(weights_of(resumed), weights_of(anew))
    assert lr_of_a_step(resumed) == lr_of_a_step(engine)
    assert lr_of_a_step(anew) == lrs[0]
    save(anew, second)
    again.load(second)
    assert lr_of_a_step(anew) == lr_of_a_step(again) == lrs[1]
    assert_same_weights(weights_of(anew), weights_of(again))


@pytest.mark.parametrize("name", marked(OTHER_MODEL))
def test_the_state_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    save(ENGINES[name](), tmp_path)
    engine = OTHER_MODEL[name]()
    before = weights_of(engine)
    with pytest.raises(UserError, match="is not a training state of this model"):
        engine.load(tmp_path)
    assert_same_weights(before, weights_of(engine))


def test_offload_and_onload_may_be_repeated_and_change_nothing(make: Make, batch: Batch, tmp_path: Path) -> None:
    engine, plain = make(), make()
    train(engine, batch, steps=1)
    train(plain, batch, steps=1)
    engine.offload()
    engine.offload()
    save(engine, tmp_path)
    assert_same_weights(weights_of(engine), weights_of(plain))
    engine.onload()
    engine.onload()
    assert train(engine, batch, steps=1) == train(plain, batch, steps=1)
    assert_same_weights(weights_of(engine), weights_of(plain))
