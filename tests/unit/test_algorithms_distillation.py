"""Top-k reverse KL: loss and gradient through both vocabulary heads, against the KL over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tandem.algorithms.builtin.on_policy_distillation import OnPolicyDistillation, OnPolicyDistillationConfig
from tandem.algorithms.distillation import top_k_reverse_kl
from tandem.training.base import TopTokens
from tandem.training.head import VocabularyHead
from tandem.training.tiled_head import TiledVocabularyHead
from tandem.types import TokenColumns
from tests.storages import Storages

TOKENS, HIDDEN, VOCABULARY = 13, 8, 31
TEMPERATURE = 0.7
HEADS = {"chunks": (5, None), "one chunk": (100, None), "tiles": (5, 7), "one tile": (100, 100)}
"""Tokens of a chunk, or tokens and words of a tile."""


class Case:
    """A student and a teacher, each an output layer over hidden states of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.student, self.teacher = (nn.Linear(HIDDEN, VOCABULARY) for _ in range(2))
        self.hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        self.frozen = torch.randn(TOKENS, HIDDEN)
        self.targets = torch.randint(VOCABULARY, (TOKENS,))
        self.weights = torch.rand(TOKENS) / TOKENS

    def head(self, layer: nn.Linear, name: str, top: TopTokens | None = None) -> VocabularyHead | TiledVocabularyHead:
        tokens, words = HEADS[name]
        if words is None:
            return VocabularyHead(layer, TEMPERATURE, tokens * VOCABULARY, top=top)
        return TiledVocabularyHead(layer, TEMPERATURE, tile_tokens=tokens, tile_vocabulary=words, top=top)

    def columns(self, name: str, k: int) -> TokenColumns[Tensor]:
        told = self.head(self.teacher, name, TopTokens(k, VOCABULARY)).forward(self.frozen, self.targets)
        assert told.top_ids_S is not None
        return TokenColumns(
            teacher_top_ids=told.top_ids_S.int(),
            teacher_top_logprobs=told.top_logprobs_S,
            advantages=torch.zeros(TOKENS),
            loss_weights=self.weights,
            shares=torch.full((TOKENS,), 1 / TOKENS),
        )

    def distributions(self) -> tuple[Tensor, Tensor]:
        """Log-probs of student and teacher over all tokens, in float64."""
        with torch.no_grad():
            teacher = self.teacher(self.frozen).double()
        return tuple((logits / TEMPERATURE).log_softmax(-1) for logits in (self.student(self.hidden).double(), teacher))  # type: ignore[return-value]

    def gradients(self) -> list[Tensor]:
        found = [tensor.grad for tensor in (self.hidden, *self.student.parameters()) if tensor.grad is not None]
        self.hidden.grad = self.student.weight.grad = self.student.bias.grad = None
        assert len(found) == 3
        return found


def loss(k: int, **given: object) -> OnPolicyDistillation:
    config = OnPolicyDistillationConfig.model_validate({"top_k": k, **given})
    return OnPolicyDistillation(config, max_response_tokens=8)


def whole_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("head", list(HEADS))
def test_over_all_tokens_it_is_the_kl_of_the_whole_vocabulary(head: str) -> None:
    case = Case()
    result = case.head(case.student, head).backward(
        case.hidden, case.targets, case.columns(head, VOCABULARY), loss(VOCABULARY, distillation_coefficient=2.0).loss
    )
    found = case.gradients()
    kl = whole_kl(*case.distributions())
    expected = 2 * (case.weights * kl).sum()
    expected.backward()
    value = sum(float(part) for part, _ in result.parts)
    assert value == pytest.approx(expected.item(), abs=1e-6) and expected > 0.1
    for ours, theirs in zip(found, case.gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    mean = sum(float(metrics["teacher/kl"]) for _, metrics in result.parts)
    assert mean == pytest.approx(kl.mean().item(), abs=1e-6)


@pytest.mark.parametrize("head", list(HEADS))
def test_some_tokens_and_the_rest_are_a_distribution_of_their_own(head: str) -> None:
    """Written out: the teacher's four likeliest tokens, and one more that stands for all others."""
    case, k = Case(), 4
    result = case.head(case.student, head).backward(case.hidden, case.targets, case.columns(head, k), loss(k).loss)
    found = case.gradients()
    log_p, log_q = case.distributions()
    likeliest = log_q.topk(k).indices
    others = torch.ones_like(log_q, dtype=torch.bool).scatter(1, likeliest, False)
    five_p, five_q = (
        torch.cat((log.gather(1, likeliest), log.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)), 1)
        for log in (log_p, log_q)
    )
    kl = whole_kl(five_p, five_q)
    (case.weights * kl).sum().backward()
    assert sum(float(part) for part, _ in result.parts) == pytest.approx((case.weights * kl).sum().item(), abs=1e-6)
    for ours, theirs in zip(found, case.gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert (kl <= whole_kl(log_p, log_q)).all(), "what is taken as one token is no further apart than it is"


@pytest.mark.parametrize("head", list(HEADS))
def test_the_teacher_tells_its_likeliest_tokens_of_those_that_the_tokenizer_has(head: str) -> None:
    case = Case()
    told = case.head(case.teacher, head, TopTokens(3, 20)).forward(case.frozen, case.targets)
    expected = case.distributions()[1][:, :20].topk(3)
    assert told.top_ids_S is not None and told.top_logprobs_S is not None
    assert torch.equal(told.top_ids_S, expected.indices)
    torch.testing.assert_close(told.top_logprobs_S.double(), expected.values, atol=1e-5, rtol=0)
    nothing = case.head(case.teacher, head, TopTokens(3, 20)).forward(case.frozen[:0], case.targets[:0])
    assert nothing.top_ids_S is not None and nothing.top_ids_S.shape == (0, 3)


def test_a_rest_that_float32_does_not_resolve_is_finite() -> None:
    sure = torch.tensor([[0.0, -40.0]], requires_grad=True)
    (kl,) = top_k_reverse_kl(sure, torch.tensor([[-20.0, 0.0]]))
    kl.backward()
    assert kl.item() == pytest.approx(20.0, abs=1e-3) and sure.grad is not None and sure.grad.isfinite().all()


def test_where_the_teacher_names_fewer_tokens_they_are_fewer() -> None:
    case, k = Case(), 4
    columns = case.columns("one chunk", k)
    assert columns.teacher_top_logprobs is not None and columns.teacher_top_ids is not None
    fewer = TokenColumns(**{name: getattr(columns, name) for name in columns.__slots__})
    fewer.teacher_top_ids, fewer.teacher_top_logprobs = (
        column[:, :-1] for column in (columns.teacher_top_ids, columns.teacher_top_logprobs)
    )
    columns.teacher_top_ids[:, -1], columns.teacher_top_logprobs[:, -1] = 0, -torch.inf
    values: list[float] = []
    gradients: list[list[Tensor]] = []
    for given in (columns, fewer):
        result = case.head(case.student, "one chunk").backward(case.hidden, case.targets, given, loss(k).loss)
        values.append(sum(float(part) for part, _ in result.parts))
        gradients.append(case.gradients())
    assert values[0] == pytest.approx(values[1], abs=1e-7) and values[0] > 0.01
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-6)


def test_rewards_go_through_the_clipped_surrogate_beside_it() -> None:
    case, k = Case(), 4
    columns = case.columns("one chunk", k)
    columns.advantages = torch.randn(TOKENS)
    both = case.head(case.student, "one chunk").backward(
        case.hidden, case.targets, columns, loss(k, reward_weight=1.0, group_size=2).loss
    )
    chosen = case.distributions()[0].gather(1, case.targets[:, None])[:, 0]
    ((_, metrics),) = both.parts
    surrogate = -(case.weights * columns.advantages).sum()  # the ratio is 1
    assert metrics["actor/pg_loss"].item() == pytest.approx(surrogate.item(), abs=1e-5)
    found = case.gradients()
    case.head(case.student, "one chunk").backward(case.hidden, case.targets, case.columns("one chunk", k), loss(k).loss)
    apart = [mine - alone for mine, alone in zip(found, case.gradients(), strict=True)]
    (-(case.weights * columns.advantages) * chosen).sum().backward()
    for ours, theirs in zip(apart, case.gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("words", [None, 64])
def test_no_head_keeps_whole_rows_of_logits(words: int | None) -> None:
    """Tokens times vocabulary is far more than any storage that is made, with the likeliest tokens of both."""
    torch.manual_seed(0)
    tokens, vocabulary, k = 256, 1024, 8
    layer, hidden = nn.Linear(4, vocabulary, bias=False), torch.randn(tokens, 4, requires_grad=True)
    layer.requires_grad_(False)
    top = TopTokens(k, vocabulary)
    head = (
        VocabularyHead(layer, logits_per_chunk=16 * vocabulary, top=top)
        if words is None
        else TiledVocabularyHead(layer, tile_tokens=64, tile_vocabulary=words, top=top)
    )
    targets, ones = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens)
    with Storages() as made:
        told = head.forward(hidden.detach(), targets)
        columns = TokenColumns(
            teacher_top_ids=told.top_ids_S, teacher_top_logprobs=told.top_logprobs_S,
            advantages=0 * ones, loss_weights=ones, shares=ones / tokens,
        )  # fmt: skip
        head.backward(hidden, targets, columns, loss(k).loss)
    assert made.largest <= 16 * vocabulary * 4 * 2
