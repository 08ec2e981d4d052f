"""State mixers in packed rows: log-probs and gradients are those of transformers on rows alone; each trap is shown."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tandem.algorithms.supervised import NextTokenLoss
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import UserError
from tandem.models import family_check
from tandem.models.attention import ATTENTION, PackedRows
from tandem.models.family_check import TOLERANCE, compare
from tandem.models.lora import adapted_layers
from tandem.models.mixing import MixedRows, State, mixed_rows, mixers_of, wrap_mixers
from tandem.models.mixing.mixer_check import LARGEST, error_of
from tandem.models.tiny import tiny
from tandem.training.fsdp import FsdpEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import IntArray, MicroBatch, TokenColumns
from tests.state_models import FAMILIES, OFTEN, config_of, pair_of

LENGTHS = np.array([70, 5, 1, 66, 9, 1, 2, 130, 1, 33, 1])
PREFIXES = np.array([-1, 0, 1, 1, 1, 0, 5, -1, 7, 7, -1])
"""Prompts longer than a chunk, answers and branches of them; branches at segments of a token, answers of a token, and a
row of one."""
OFFSETS = np.concatenate(([0], np.cumsum(LENGTHS)))
LEAVES = [segment for segment in range(len(LENGTHS)) if segment not in PREFIXES]


def tokens(model: Any) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.from_numpy(np.random.default_rng(0).integers(3, vocabulary, OFFSETS[-1]))


def chain(segment: int) -> list[int]:
    """The segments of a row, first to last."""
    before = int(PREFIXES[segment])
    return [*(chain(before) if before >= 0 else []), segment]


def row_places(segment: int) -> IntArray:
    return np.concatenate([np.arange(OFFSETS[one], OFFSETS[one + 1]) for one in chain(segment)])


def packed_logits(ours: Any, token_N: Tensor) -> Tensor:
    plan = PackedRows(OFFSETS, prefixes=PREFIXES)
    how = {"position_ids": plan.positions[None], "attention_plan": plan, "use_cache": False}
    return ours(token_N[None], **how).logits[0]


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_log_probs_and_gradients_of_rows_alone(family: str) -> None:
    """Each leaf's row counts: what prefixes get is the sum over what goes on from them."""
    eager, ours = pair_of(family)
    token_N = tokens(ours)
    found_N = packed_logits(ours, token_N).log_softmax(-1)
    weight_NV = torch.randn(found_N.shape, generator=torch.Generator().manual_seed(0)) / len(found_N)
    total = torch.zeros(())
    for leaf in LEAVES:
        at = torch.from_numpy(row_places(leaf))
        wanted_T = eager(token_N[at][None], use_cache=False).logits[0].log_softmax(-1)
        torch.testing.assert_close(found_N[at], wanted_T, rtol=0, atol=TOLERANCE)
        (wanted_T * weight_NV[at]).sum().backward()
        total = total + (found_N[at] * weight_NV[at]).sum()
    total.backward()
    wanted, found = gradients(eager), gradients(ours)
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) < 2e-4 * (float(gradient.norm()) + 1e-3 * largest), name


class Counter:
    """A mixer whose state is a sum of decayed tokens: what it is called with is noted."""

    number, name = 0, "Counter"

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, hidden_BT: Tensor, before: State | None, real_BT: Tensor | None) -> tuple[Tensor, State]:
        self.calls.append(tuple(hidden_BT.shape[:2]))
        x = hidden_BT if real_BT is None else hidden_BT * real_BT[..., None]
        state = torch.zeros_like(x[:, 0]) if before is None else before.conv
        assert before is None or before.conv.shape[0] == len(x)
        outputs = list[Tensor]()
        for token in x.unbind(1):
            state = 0.9 * state + token
            outputs.append(state)
        return torch.stack(outputs, 1), State(state, None)


def alone(hidden_N: Tensor, offsets: IntArray, prefixes: IntArray) -> list[Tensor]:
    """The outputs of each segment, one after another from the state that its prefix has left."""
    found: list[Tensor] = []
    for segment, (start, end) in enumerate(pairwise(offsets)):
        before = State(found[prefixes[segment]][-1:], None) if prefixes[segment] >= 0 else None
        found.append(Counter()(hidden_N[start:end][None], before, None)[0][0])
    return found


@pytest.mark.parametrize("seed", range(30))
def test_any_forest_of_segments_is_computed_from_its_prefixes(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 12))
    offsets = np.concatenate(([0], np.cumsum(random.choice([1, 1, 2, 3, 8, 9], count))))
    prefixes = np.array([int(random.integers(-1, segment)) if segment else -1 for segment in range(count)])
    hidden_N = torch.randn(int(offsets[-1]), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    wanted, mixer = alone(hidden_N, offsets, prefixes), Counter()
    rows: Any = MixedRows(offsets, prefixes, torch.device("cpu"))
    output_N, states = rows.run(mixer, hidden_N)
    torch.testing.assert_close(output_N, torch.cat(wanted))
    assert states is None and all(rows * width <= 4 * offsets[-1] for rows, width in mixer.calls)
    keeping: Any = MixedRows(offsets, prefixes, torch.device("cpu"), keeps_states=True)
    output_N, states = keeping.run(Counter(), hidden_N)
    torch.testing.assert_close(output_N, torch.cat(wanted))
    torch.testing.assert_close(states.conv, torch.stack([output[-1] for output in wanted]))
    begin = int((prefixes < 0).argmin()) if (prefixes >= 0).any() else 0  # the first roots are known already
    if begin:
        given = State(torch.stack([output[-1] for output in wanted[:begin]]), None)
        keeping = MixedRows(offsets, prefixes, torch.device("cpu"), computed=begin, keeps_states=True)
        output_N, states = keeping.run(Counter(), hidden_N[offsets[begin] :], given)
        torch.testing.assert_close(output_N, torch.cat(wanted[begin:]))
        torch.testing.assert_close(states.conv, torch.stack([output[-1] for output in wanted[begin:]]))


def test_the_answers_of_a_prompt_are_one_call_after_it() -> None:
    offsets, mixer = np.array([0, 100, 110, 118, 129]), Counter()
    rows: Any = MixedRows(offsets, np.array([-1, 0, 0, 0]), torch.device("cpu"))
    rows.run(mixer, torch.randn(129, 2))
    assert mixer.calls == [(1, 100), (3, 11)]


def micro_batch(seed: int) -> MicroBatch:
    random = np.random.default_rng(seed)
    ids = random.integers(3, 90, 60).astype(np.int32)
    scored = np.array([9, 10, 20, 29, 40, 55])
    share = np.full(len(scored), 1 / 6, dtype=np.float32)
    columns = TokenColumns(loss_weights=share, shares=share)
    offsets = np.array([0, 10 + seed, 25, 30, 60])
    return MicroBatch(ids, offsets, np.array([-1, 0, 0, -1]), scored, ids[scored + 1], columns, np.arange(len(scored)))


@pytest.mark.parametrize("how", [True, "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_are_computed_again_get_the_plan_of_their_own_pass(family: str, how: Any) -> None:
    """Two passes under way, of rows that are cut otherwise; the gradients of a run that keeps activations."""
    engines = [
        FsdpEngine(pair_of(family)[1], FsdpTrainingConfig(activation_checkpointing=kind), AdamWConfig())
        for kind in (False, how)
    ]
    batches = [micro_batch(seed) for seed in range(2)]
    found: list[dict[str, Tensor]] = []
    for engine in engines:
        engine.forward_backward(batches, NextTokenLoss())
        found.append(gradients(engine.model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", OFTEN)
def test_two_passes_may_be_under_way_at_once(family: str) -> None:
    """A plan that a mixer took from the latest pass would be the other's when the first one's layers run again."""
    _, ours = pair_of(family)
    token_N = tokens(ours)
    plans = PackedRows(OFFSETS, prefixes=PREFIXES), PackedRows(np.array([0, 40, len(token_N)]))

    def total(plan: PackedRows) -> Tensor:
        how = {"position_ids": plan.positions[None], "attention_plan": plan, "use_cache": False}
        return ours(token_N[None], **how).logits[0].log_softmax(-1).square().mean()

    for plan in plans:
        total(plan).backward()
    wanted = gradients(ours)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.train()
    first, second = map(total, plans)
    first.backward()
    second.backward()
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)


def test_time_steps_have_no_bound_that_single_tokens_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG_MAPPING["nemotron_h"]()
    assert max(compare(config)) < TOLERANCE
    monkeypatch.setattr(family_check, "mend_time_steps", lambda _: None)
    monkeypatch.setattr("tandem.models.mixing.finding.mend_time_steps", lambda _: None)
    assert compare(config).cached > 100 * TOLERANCE


def test_a_projection_with_a_bias_leaves_nothing_in_the_padding() -> None:
    """Prompts of several lengths in one call."""
    options = {"conv_bias": True, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    assert max(compare(CONFIG_MAPPING["lfm2"](**options))) < TOLERANCE
    mamba = {"mamba_proj_bias": True, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    assert max(compare(CONFIG_MAPPING["granitemoehybrid"](**mamba))) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_boundaries_are_not_what_is_relied_on(family: str) -> None:
    """What a mixer is told of rows in a pass is dropped by its plain implementation, and one row's state goes on."""
    eager, ours = pair_of(family)
    token_N, starts = tokens(eager)[:60], torch.tensor([0, 30, 60], dtype=torch.int32)
    told = {
        "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 30, "max_length_k": 30,
        "seq_idx": torch.arange(2, dtype=torch.int32).repeat_interleave(30)[None],
    }  # fmt: skip
    mixer: Any = mixers_of(eager)[0]
    width = eager.config.get_text_config().hidden_size
    x = torch.randn(1, 60, width, generator=torch.Generator().manual_seed(0))
    known = {name: value for name, value in told.items() if family not in ("lfm2", "lfm2_moe") or name == "seq_idx"}
    with torch.no_grad():
        leaked = mixer(x, **known)[0, 30:] - mixer(x[:, 30:])[0]
        plan = PackedRows(np.array([0, 30, 60]))
        kept = ours(token_N[None], position_ids=plan.positions[None], attention_plan=plan, use_cache=False).logits[
            0, 30:
        ]
        wanted = eager(token_N[30:][None], use_cache=False).logits[0]
    assert leaked.abs().max() > 1e-2
    torch.testing.assert_close(kept.log_softmax(-1), wanted.log_softmax(-1), rtol=0, atol=TOLERANCE)


def test_rows_are_never_mixed_for_want_of_a_plan() -> None:
    _, ours = pair_of("qwen3_5_text")
    mixer: Any = mixers_of(ours)[0]
    with pytest.raises(NotImplementedError, match="Qwen3_5GatedDeltaNet without an attention_plan would mix the rows"):
        mixer(torch.zeros(1, 3, ours.config.hidden_size))


def test_a_configuration_that_names_states_without_mixers_is_refused() -> None:
    config = tiny(CONFIG_MAPPING["minimax"]())
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    with pytest.raises(NotImplementedError, match=r"1 layers carry a state \(linear_attention\), and 0 mixers were"):
        wrap_mixers(model)


def test_small_models_keep_layers_of_each_kind_and_chunks_that_tests_cross() -> None:
    for family in ("bamba", "granitemoehybrid", "nemotron_h", "qwen3_next", "lfm2", "lfm2_moe"):
        small: Any = config_of(family)
        kinds = set(small.layer_types)
        assert kinds & {"linear_attention", "conv"} and kinds & {"full_attention", "hybrid"}, family
        chunk = getattr(small, "mamba_chunk_size", None) or getattr(small, "chunk_size", None)
        assert chunk in (None, 8), family
    published = CONFIG_MAPPING["nemotron_h"](layers_block_type=["linear_attention", "mlp"] * 20 + ["full_attention"])
    assert sorted(tiny(published).layers_block_type) == ["full_attention", "linear_attention", "mlp"]


def test_adapters_are_of_linear_layers_alone() -> None:
    """A mixer reads its convolution's weight without calling it: an adapter there would be left out in silence."""
    _, ours = pair_of("qwen3_5_text")
    assert not [name for name in adapted_layers(ours, "all-linear") if "conv" in name]
    assert any(name.endswith("linear_attn.in_proj_qkv") for name in adapted_layers(ours, "all-linear"))
    with pytest.raises(UserError, match="no linear layer of the model is named conv1d"):
        adapted_layers(ours, ["conv1d"])


def test_rows_of_one_length_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding on the right of rows whose states are wanted would decay them: without the care for it this fails."""
    _, ours = pair_of("qwen3_5_text")
    token_N = tokens(ours)
    with torch.no_grad():
        wanted = packed_logits(ours, token_N).log_softmax(-1)
        add = mixed_rows._Plan._add
        monkeypatch.setattr(
            mixed_rows._Plan, "_add", lambda self, rows, left, keeps: add(self, rows, left=False, keeps=keeps)
        )
        monkeypatch.setattr(mixed_rows, "_MAX_LEFT_PADDING", 0.9)
        found = packed_logits(ours, token_N).log_softmax(-1)
    assert (found - wanted).abs().max() > 100 * TOLERANCE


MODULES = {
    "qwen3_5_text": ("torch_chunk_gated_delta_rule", {"initial_state": None}),
    "nemotron_h": ("mamba2_chunk_scan", {"initial_states": None}),
}
"""By family, what scans a row, and with which arguments it ignores the state before it."""


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("family", MODULES)
def test_a_kernel_that_ignores_states_is_found_when_an_engine_starts(
    family: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = pair_of(family)
    name, wrong = MODULES[family]
    mixer: Any = mixers_of(ours)[0]
    if broken:
        scan = getattr(sys.modules[type(mixer).__module__], name)
        monkeypatch.setattr(
            sys.modules[type(mixer).__module__], name, lambda *args, **options: scan(*args, **{**options, **wrong})
        )
    for dtype in (torch.float32, torch.bfloat16):
        off = error_of(mixer, ours.config, torch.device("cpu"), dtype)
        assert off > 2 * LARGEST if broken else off < LARGEST / 2, (dtype, off)


def test_a_convolution_that_goes_on_into_the_next_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a call as one long row: what a kernel does that takes boundaries which it is not given."""
    _, ours = pair_of("lfm2")
    mixer: Any = mixers_of(ours)[0]
    assert error_of(mixer, ours.config, torch.device("cpu"), torch.float32) < LARGEST / 2
    module: Any = sys.modules[type(mixer).__module__]
    convolve = module.causal_conv1d_fn

    def flat(x: Tensor, *args: Any, **options: Any) -> Tensor:
        joined = x.transpose(0, 1).flatten(1)[None]
        return convolve(joined, *args, **options)[0].unflatten(1, (len(x), -1)).transpose(0, 1)

    monkeypatch.setattr(module, "causal_conv1d_fn", flat)
    assert error_of(mixer, ours.config, torch.device("cpu"), torch.float32) > 3 * LARGEST


def test_an_engine_refuses_what_states_do_not_do() -> None:
    _, ours = pair_of("lfm2")
    for key, how in (("context_parallel", {"context_parallel": 2}), ("compile", {"compile": True})):
        with pytest.raises(UserError, match=f"training.{key}: layers of a lfm2 carry a state from token to token"):
            FsdpEngine(ours, FsdpTrainingConfig(**how), None)
