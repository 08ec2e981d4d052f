"""A mixture of experts against transformers: losses of its routers, what they choose, and choices that are replayed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is in .venv-megatron (scripts/megatron-env) only", allow_module_level=True)

from megatron.core import parallel_state
from transformers import Qwen3MoeConfig

from tandem.batching.packing import micro_batches, select_rows
from tandem.config.model import ModelConfig
from tandem.config.training import MegatronTrainingConfig
from tandem.errors import UserError
from tandem.training.megatron.engine import MegatronEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, FloatArray, IntArray
from tests.contract.test_training import Imitation
from tests.megatron.layouts import SHAPE, batch

EXPERTS, TOP_K = 8, 2


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="normalised", marks=pytest.mark.nightly), pytest.param(False, id="as they are")],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose routers are near ties."""
    torch.manual_seed(0)
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**SHAPE, head_dim=8, **experts, norm_topk_prob=request.param)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=0.02)
        elif ".mlp.experts." in name:
            parameter.data *= 2  # which of them a token goes to matters more
    path = tmp_path_factory.mktemp("experts")
    model.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def left_alone() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def engine(directory: Path, **options: Any) -> MegatronEngine:
    training = MegatronTrainingConfig(type="megatron", **options)
    return MegatronEngine(ModelConfig(path=directory), training, AdamWConfig())


def told(model: Any, rows: Batch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers says of a whole row: log-probs of its response, `[tokens, layers, experts]` router logits."""
    prompt, response = (
        ids[offsets[row] : offsets[row + 1]].astype(np.int64)
        for ids, offsets in ((rows.prompt_ids, rows.prompt_offsets), (rows.response_ids, rows.response_offsets))
    )
    ids = torch.from_numpy(np.concatenate((prompt, response)))
    experts = "num_experts_per_tok" in model.config.to_dict()
    outputs = model(ids[None, :-1], **({"output_router_logits": True} if experts else {}))
    logprobs = outputs.logits[0].float().log_softmax(-1)[len(prompt) - 1 :].gather(1, ids[len(prompt) :, None])[:, 0]
    return logprobs, torch.stack(outputs.router_logits, 1) if experts else torch.zeros(0)


def recorded(model: Any, rows: Batch) -> tuple[FloatArray, IntArray]:
    """Log-probs of all response tokens, and the choices of all prompts, then of all responses."""
    logprobs, prompts, responses = [], [], []
    for row in range(len(rows)):
        said, logits = told(model, rows, row)
        choices = logits.topk(TOP_K).indices.numpy()
        length = int(np.diff(rows.prompt_offsets)[row])
        logprobs.append(said.numpy())
        prompts.append(choices[:length])
        responses.append(np.concatenate((choices[length:], choices[-1:])))
    return np.concatenate(logprobs), np.concatenate((*prompts, *responses))


def logprobs_of(engine: MegatronEngine, rows: Batch) -> FloatArray:
    parts = micro_batches(rows, range(len(rows)), 24)
    found = np.full(len(rows.response_ids), np.nan, np.float32)
    for part, outputs in zip(parts, engine.forward(parts), strict=True):
        assert outputs.logprobs_S is not None
        found[part.source] = outputs.logprobs_S.numpy()
    return found


def mismatch_kl(first: FloatArray, second: FloatArray, mask: Any) -> float:
    """As `rollout/mismatch_kl`."""
    difference = (first - second)[mask].astype(np.float64)
    return float(np.mean(np.expm1(difference) - difference))


@pytest.mark.parametrize(("balancing", "smallness"), [(0.3, 0.0), (0.0, 0.1), (0.3, 0.1)])
def test_losses_of_the_routers(directory: Path, balancing: float, smallness: float) -> None:
    rows = batch()
    assert rows.tokens.loss_weights is not None
    rows.tokens.loss_weights[:] = 0  # nothing else to learn
    parts = micro_batches(rows, range(len(rows)), 24)
    ours = engine(directory, load_balancing_loss=balancing, router_z_loss=smallness)
    ours.forward_backward(parts, Imitation())
    found = ours.optimizer_step()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    loss, tokens, load = torch.zeros(()), 0, torch.zeros(SHAPE["num_hidden_layers"], EXPERTS)
    for part in parts:
        members = np.unique(rows.row_of_token[part.source])
        logits = torch.cat([told(model, rows, row)[1] for row in distinct(rows, members)])
        tokens += len(logits)
        counts = torch.nn.functional.one_hot(logits.topk(TOP_K).indices, EXPERTS).sum((0, 2))
        load += counts
        busy = (logits.softmax(-1).sum(0) * counts / (TOP_K * len(logits))).sum() * EXPERTS
        loss = loss + balancing * busy + smallness * logits.logsumexp(-1).square().sum()
    (loss / tokens).backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert found["grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)
    shares = load / load.mean(1, keepdim=True)
    assert found["expert_load/max"] == pytest.approx(float(shares.amax(1).mean()))
    assert found["expert_load/min"] == pytest.approx(float(shares.amin(1).mean()))


def distinct(rows: Batch, members: IntArray) -> list[int]:
    """Of siblings that said the same, but for their last token, the first: a micro-batch holds no other."""
    ends = zip(rows.response_offsets[members], rows.response_offsets[members + 1] - 1, strict=True)
    said = [(rows.groups[row], *rows.response_ids[a:b]) for row, (a, b) in zip(members, ends, strict=True)]
    return [int(members[said.index(key)]) for key in dict.fromkeys(said)]


def test_replayed_choices_close_the_gap_to_an_engine_that_rounds(directory: Path) -> None:
    rows = batch()
    rounding: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs, experts = recorded(rounding, rows)
    alone = mismatch_kl(logprobs_of(engine(directory), rows), theirs, rows.loss_mask)
    rows.experts = experts
    assert mismatch_kl(logprobs_of(engine(directory), rows), theirs, rows.loss_mask) == alone, "it is an option"
    replayed = mismatch_kl(logprobs_of(engine(directory, router_replay=True), rows), theirs, rows.loss_mask)
    print(f"mismatch_kl {alone:.2e} without replay, {replayed:.2e} with it")
    assert replayed < alone / 10


def test_ones_own_choices_change_nothing(directory: Path) -> None:
    rows = batch()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        theirs, rows.experts = recorded(model, rows)
    order = np.arange(len(rows))[::-1]
    for part in (rows, select_rows(select_rows(rows, order), order)):
        found = logprobs_of(engine(directory, router_replay=True), part)
        assert found[rows.loss_mask] == pytest.approx(theirs[rows.loss_mask], abs=2e-5)


def test_a_wrong_choice_is_followed(directory: Path) -> None:
    rows = batch()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        theirs, experts = recorded(model, rows)
    rows.experts = (experts + 1) % EXPERTS
    replaying = engine(directory, router_replay=True)
    assert np.abs(logprobs_of(replaying, rows) - theirs)[rows.loss_mask].max() > 0.01
    parts = micro_batches(rows, range(len(rows)), 24)
    recomputing = engine(directory, router_replay=True, activation_checkpointing=True)
    norms = []
    for one in (replaying, recomputing):
        one.forward_backward(parts, Imitation())
        norms.append(one.optimizer_step()["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_replay_without_recorded_choices_is_refused(directory: Path) -> None:
    with pytest.raises(UserError, match="does not tell which experts it chose"):
        logprobs_of(engine(directory, router_replay=True), batch())
