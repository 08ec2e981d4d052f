"""Tokens fall as the distribution says, inside the allowed set, by the seed alone."""

import numpy as np
import pytest
import torch

from tandem.generation.sampling import CHOICE, sample, streams, uniforms

DRAWS = 20_000


def choice(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    how = np.zeros(rows, dtype=CHOICE)
    how["stream"], how["temperature"], how["top_k"], how["top_p"] = streams(range(rows)), temperature, top_k, top_p
    return how


def draw(logits: torch.Tensor, draws: int = DRAWS, **how: float) -> np.ndarray:
    """Tokens of one distribution, each by a seed of its own."""
    tokens, _ = sample(logits.repeat(draws, 1), choice(draws, **how))  # type: ignore[arg-type]
    return tokens.numpy()


def chi_square_per_degree(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Near 1 when the tokens follow `probs`; tokens of probability 0 must not occur."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * len(tokens)
    return float(((counts[probs > 0] - expected) ** 2 / expected).sum() / (len(expected) - 1))


def test_uniforms_are_splitmix64() -> None:
    """The first three numbers of the published generator at seed 1234567 are its state after one, two, three steps."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    seeds = np.full(3, 1234567, dtype=np.uint64)
    expected = [(number >> 11) * 2.0**-53 for number in published]
    assert uniforms(seeds, np.arange(3)).tolist() == expected


def test_streams_differ_between_seeds_and_positions() -> None:
    numbers = uniforms(streams(range(-500, 500)).repeat(50), np.tile(np.arange(50), 1000))
    assert len(np.unique(numbers)) == 50_000
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_follow_the_distribution(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -3.0])
    probs = (logits.double() / temperature).softmax(0).numpy()
    assert chi_square_per_degree(draw(logits, temperature=temperature), probs) < 3


def test_tokens_of_a_large_vocabulary_follow_the_distribution() -> None:
    """1,300 tokens: blocks and a rest; most of the mass on 40 of them, some in the last, partial block."""
    logits = torch.full((1300,), float("-inf"))
    likely = torch.cat([torch.arange(0, 1280, 40), torch.arange(1290, 1298)])
    logits[likely] = torch.linspace(-1, 1, len(likely))
    assert chi_square_per_degree(draw(logits), logits.double().softmax(0).numpy()) < 1.6


@pytest.mark.parametrize("size", [7, 1300])
def test_improbable_tokens_are_never_chosen(size: int) -> None:
    """Probabilities that round to 0, at both ends and between."""
    logits = torch.full((size,), -200.0)
    logits[[2, size - 3]] = 0.0
    assert set(draw(logits).tolist()) == {2, size - 3}


def test_logprobs_are_those_before_filtering_at_the_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.5, -0.5, 0.0], [3.0, 1.0, 0.0]])
    how = choice(3)
    how["temperature"][:] = (0.5, 2.0, 0.0)
    how["top_k"][:] = (1, 0, 0)
    tokens, logprobs = sample(logits.clone(), how)
    assert tokens[0] == 2 and tokens[2] == 0
    # exp(0) + exp(2) + exp(4), exp(.25) + exp(-.25) + exp(0), and, greedy, exp(3) + exp(1) + exp(0) at temperature 1.
    assert logprobs[0] == pytest.approx(4 - np.log(1 + np.e**2 + np.e**4), abs=1e-6)
    second = np.array([0.25, -0.25, 0.0])[tokens[1]] - np.log(np.e**0.25 + np.e**-0.25 + 1)
    assert logprobs[1] == pytest.approx(second, abs=1e-6)
    assert logprobs[2] == pytest.approx(3 - np.log(np.e**3 + np.e + 1), abs=1e-6)


@pytest.mark.parametrize("temperature", [(0, 0, 0), (0, 1, 1)], ids=["greedy", "greedy and drawn"])
def test_the_best_token_of_those_that_may_be_drawn(temperature: tuple[float, ...]) -> None:
    """Though the two most probable ones may not; log-probs are those of the whole softmax."""
    logits = torch.tensor([0.0, 2.0, 9.0, 8.0, 1.0]).repeat(3, 1)
    how = choice(3)
    how["temperature"][:], how["top_k"][2] = temperature, 1
    tokens, logprobs = sample(logits.clone(), how, torch.tensor([2, 3]))
    assert tokens[0] == tokens[2] == 1 and tokens[1] in (0, 1, 4)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])


PROBS = np.array([0.05, 0.4, 0.1, 0.3, 0.15])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, [1, 3]),
        (9, 1.0, [0, 1, 2, 3, 4]),
        (0, 0.69, [1, 3]),
        (0, 0.71, [1, 3, 4]),
        (0, 1e-9, [1]),
        # Of .4 .3 .15, renormalised to .47 .35 .18, the first two reach .8.
        (3, 0.8, [1, 3]),
        (3, 0.9, [1, 3, 4]),
    ],
)
def test_top_k_then_top_p_renormalised(top_k: int, top_p: float, kept: list[int]) -> None:
    probs = np.zeros(5)
    probs[kept] = PROBS[kept] / PROBS[kept].sum()
    tokens = draw(torch.from_numpy(PROBS).log().float(), top_k=top_k, top_p=top_p)
    assert set(tokens.tolist()) == set(kept)
    if len(kept) > 1:
        assert chi_square_per_degree(tokens, probs) < 3


def test_top_p_may_keep_more_than_the_first_candidates() -> None:
    """3,000 tokens of falling probability: half of the mass lies in the first 1,261, found by hand."""
    probs = np.linspace(1.2, 0.8, 3000)
    probs /= probs.sum()
    last = int(np.searchsorted(probs.cumsum(), 0.5))
    assert last > 1024
    tokens = draw(torch.from_numpy(probs).log().float(), draws=4_000, top_p=0.5)
    assert tokens.max() in range(last - 60, last + 1)
    halves = np.bincount(tokens // 64, minlength=47)
    expected = np.add.reduceat(np.where(np.arange(3000) <= last, probs, 0), range(0, 3000, 64)) * 2 * 4_000
    full = expected > 50
    assert ((halves - expected)[full] ** 2 / expected[full]).mean() < 2


def test_a_large_top_k_is_not_cut_short_by_its_neighbours() -> None:
    """3,000 tokens of almost the same probability, top-k 2,000 in half of the rows, top-p 0.1 in the others."""
    logits = torch.linspace(0.001, 0, 3000).repeat(2_000, 1)
    how = choice(2_000)
    how["top_k"][::2] = 2_000
    how["top_p"][1::2] = 0.1
    tokens = sample(logits, how)[0].numpy()
    assert 1_980 < tokens[::2].max() < 2_000 and 290 < tokens[1::2].max() <= 300
    assert abs(tokens[::2].mean() - 1_000) < 50


def test_rows_do_not_depend_on_one_another() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 900)
    how = choice(6)
    how["temperature"][:] = (1, 0.7, 0, 1, 1.5, 1)
    how["top_k"][:] = (0, 0, 0, 4, 0, 20)
    how["top_p"][:] = (1, 0.9, 1, 1, 0.5, 0.9)
    how["made"] = range(6)
    tokens, logprobs = sample(logits.clone(), how)
    for row in range(6):
        alone = sample(logits[[row]].clone(), how[[row]])
        assert (alone[0], alone[1]) == (tokens[row], logprobs[row])
