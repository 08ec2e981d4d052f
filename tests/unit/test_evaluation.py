"""`tandem eval`: estimates against brute force, intervals and tests against simulated truth, and the command."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tandem.cli import main
from tandem.errors import UserError
from tandem.evaluation.answered import Answered, check_same_prompts, without_accuracy
from tandem.evaluation.estimates import best_of, estimates, majority_of
from tandem.evaluation.intervals import UNBOUNDED, Interval, bounds_of, mean_interval, student
from tandem.evaluation.paired import compare, detectable, p_value
from tandem.evaluation.summary import lines, pair_lines, summarize, summarize_pair
from tandem.jobs.validation import summarize as metrics_of
from tandem.rollout.transcript import trajectory_without_turns
from tandem.tracking.jsonl import read_metrics
from tandem.types import Group, Prompt, Score, Status

UNIT = Interval(0.0, 1.0)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_best_of_k_is_the_mean_over_all_subsets(k: int) -> None:
    for values in ([0.0, 1.0, 0.0, 0.0, 1.0], [0.3, 0.1, 0.1, 0.9, 0.5], [0.0] * 5, [1.0] * 5):
        brute = np.mean([max(chosen) for chosen in combinations(values, k)])
        assert best_of(values, k) == pytest.approx(brute)


def test_the_majority_of_k_is_the_mean_over_all_subsets() -> None:
    predictions, values = ["4", "4", None, "5", "6"], [1.0, 1.0, 0.0, 0.0, 0.0]

    def vote(chosen: tuple[int, ...]) -> float:
        said = [predictions[i] for i in chosen]
        most = max(map(said.count, said))
        return float(np.mean([one == "4" for one in set(said) if said.count(one) == most]))

    assert majority_of(predictions, values, 5, np.random.default_rng(0)) == vote((0, 1, 2, 3, 4)) == 1
    brute = np.mean([vote(chosen) for chosen in combinations(range(5), 3)])
    drawn = [majority_of(predictions, values, 3, np.random.default_rng(seed)) for seed in range(20)]
    assert np.mean(drawn) == pytest.approx(brute, abs=0.02)


def test_answers_without_a_score_are_counted_and_never_zero() -> None:
    prompts = [Answered("a", [1.0, 0.0], [1.0, 0.0], ["x", "y"]), Answered("a", [1.0], [1.0], ["x"], unscored=1)]
    found = estimates(prompts, seed=0)
    assert found["acc/mean"].tolist() == [0.5, 1.0]
    assert found["acc/best@2"][0] == 1 and np.isnan(found["acc/best@2"][1])
    summary = summarize([*prompts, Answered("b", unscored=2)], seed=0)
    assert summary["a"]["answers"] == 4 and summary["a"]["unscored"] == 1
    assert summary["a"]["metrics"]["acc/best@2"] == {"value": 1.0, "low": None, "high": None, "prompts": 1}
    assert summary["b"] == {"prompts": 1, "answers": 2, "unscored": 2, "without_acc": 0, "metrics": {}}


def test_a_validation_metric_keeps_its_name_where_a_score_is_lost() -> None:
    prompt = Prompt(0, np.zeros(1, np.int32), "a", "sums", None, {})
    group = Group([trajectory_without_turns(prompt, 0, Status.COMPLETED, "")] * 3, [])
    group.scores = [Score(1.0), Score(None, failure=Status.REWARD_ERROR), Score(0.0)]
    assert metrics_of([group]) == {"val/sums/unscored": 1.0, "val/sums/reward/mean@3": 0.5}


def coverage(prompts: int, answers: int, a: float, b: float, k: int) -> float:
    """Of 1,000 evaluations of prompts whose accuracy is Beta(a, b), the share of intervals with the true pass@k."""
    rng = np.random.default_rng(5)
    truth = 1 - np.prod([(b + i) / (a + b + i) for i in range(k)])
    of_count = np.array([best_of([1.0] * right + [0.0] * (answers - right), k) for right in range(answers + 1)])
    values_NP = of_count[rng.binomial(answers, rng.beta(a, b, size=(1000, prompts)))]
    return float(np.mean([holds(mean_interval(values_P, UNIT), truth) for values_P in values_NP]))


def holds(interval: Interval | None, truth: float) -> bool:
    """Also where nothing is said."""
    return interval is None or interval.low <= truth <= interval.high


DESIGNS: list[tuple[int, int, float, float, int]] = [
    (200, 4, 2, 2, 1),
    (200, 8, 0.5, 1, 4),
    (100, 4, 1, 3, 2),
    (200, 4, 9, 1, 2),
    (200, 1, 9, 1, 1),
    (100, 1, 9, 1, 1),
    (200, 16, 19, 1, 1),
    (50, 4, 2, 2, 1),
    (30, 1, 2, 2, 1),
    (30, 16, 0.3, 0.3, 1),
    (30, 16, 1, 19, 1),
]


@pytest.mark.parametrize("design", DESIGNS)
def test_intervals_hold_the_truth_as_often_as_they_say(design: tuple[int, int, float, float, int]) -> None:
    assert coverage(*design) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("design", [(60, 4, 9, 1, 2), (30, 4, 9, 1, 2), (100, 4, 9, 1, 4)])
def test_of_few_failures_intervals_hold_the_truth_more_often_than_they_say(
    design: tuple[int, int, float, float, int],
) -> None:
    assert coverage(*design) >= 0.95


def test_intervals_of_differences_and_of_rewards_without_bounds_hold_the_truth() -> None:
    rng = np.random.default_rng(5)
    accuracy_NP = rng.beta(9, 1, size=(1000, 30))
    differences_NP = (rng.binomial(4, accuracy_NP) - rng.binomial(4, accuracy_NP)) / 4
    for values_NP in (differences_NP, rng.normal(size=(1000, 30))):
        held = [holds(mean_interval(values_P), 0.0) for values_P in values_NP]
        assert np.mean(held) == pytest.approx(0.95, abs=0.02)


def test_bounds_are_those_of_verdicts_and_of_signs_else_there_are_none() -> None:
    assert bounds_of(np.array([0.25, 1.0])) == UNIT
    assert bounds_of(np.array([-1.0, 1.0])) == (-1, 1)
    assert bounds_of(np.array([0.5, 2.0])) == UNBOUNDED
    low, high = mean_interval(np.array([1.0] * 29 + [0.0]), UNIT) or UNBOUNDED
    assert 0 < low < 0.9 and 29 / 30 < high < 1
    doubled = mean_interval(np.array([1.0] * 29 + [-1.0]), Interval(-1.0, 1.0))
    assert doubled == pytest.approx((2 * low - 1, 2 * high - 1))


def test_where_every_answer_is_right_there_may_still_be_wrong_ones() -> None:
    low, high = mean_interval(np.ones(100), UNIT) or UNBOUNDED
    assert high == 1 and low**100 / 2 == pytest.approx(0.025)


@pytest.mark.parametrize(("right", "count"), [(255, 256), (256, 256), (20, 40), (1, 30), (0, 5)])
def test_outside_the_interval_of_verdicts_so_many_right_ones_are_rare(right: int, count: int) -> None:
    """More than were found, or fewer, and half the chance of as many: 2.5% at the bounds."""

    def chance(found: int, share: float) -> float:
        return math.comb(count, found) * share**found * (1 - share) ** (count - found)

    low, high = mean_interval(np.array([1.0] * right + [0.0] * (count - right)), UNIT) or UNBOUNDED
    assert (low == 0.0) == (right == 0) and (high == 1.0) == (right == count)
    if right:
        more = sum(chance(found, low) for found in range(right + 1, count + 1))
        assert more + chance(right, low) / 2 == pytest.approx(0.025)
    if right < count:
        fewer = sum(chance(found, high) for found in range(right))
        assert fewer + chance(right, high) / 2 == pytest.approx(0.025)


@pytest.mark.parametrize("prompts", [2, 3, 5])
def test_of_very_few_prompts_intervals_are_not_too_narrow(prompts: int) -> None:
    assert min(coverage(prompts, 2, 20, 20, 1), coverage(prompts, 4, 2, 2, 1)) >= 0.93


def test_prompts_of_one_value_between_the_bounds_say_nothing_of_how_prompts_vary() -> None:
    for values in ([0.5], [0.5, 0.5], [3.0, 3.0, 3.0]):
        assert mean_interval(np.array(values), bounds_of(np.array(values))) is None
    answered = [Answered("a", [0.0, 1.0], [0.0, 1.0], [None, None]) for _ in range(2)]
    summary = summarize(answered, seed=0)
    assert summary["a"]["metrics"]["acc/mean"] == {"value": 0.5, "low": None, "high": None, "prompts": 2}
    assert "  acc/mean         0.5000  (no interval of equal prompts)" in lines(summary)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281)])
def test_quantiles_are_students(freedom: int, quantile: float) -> None:
    assert student(0.975, freedom) == pytest.approx(quantile, rel=2e-3)


def simulated_p_values(difference: float, evaluations: int = 2000, prompts: int = 60) -> np.ndarray:
    rng = np.random.default_rng(7)
    accuracy_NP1 = rng.beta(1, 1, size=(evaluations, prompts, 1))
    means_NP2 = rng.binomial(4, np.repeat(accuracy_NP1, 2, axis=2)) / 4
    differences_NP = means_NP2[..., 0] - means_NP2[..., 1] + difference
    return np.array([p_value(differences_P, n, exchanges=500) for n, differences_P in enumerate(differences_NP)])


def test_equal_models_are_told_apart_in_one_evaluation_of_twenty() -> None:
    assert np.mean(simulated_p_values(0.0) <= 0.05) == pytest.approx(0.05, abs=0.02)


def test_the_detectable_difference_is_found_with_the_power_it_names() -> None:
    rng = np.random.default_rng(7)
    accuracy_P1 = rng.beta(1, 1, size=(100_000, 1))
    means_P2 = rng.binomial(4, np.repeat(accuracy_P1, 2, axis=1)) / 4
    spread = float((means_P2[:, 0] - means_P2[:, 1]).std())
    sample_P = np.resize([spread, -spread], 60) * np.sqrt(59 / 60)  # its standard deviation is `spread`
    assert np.mean(simulated_p_values(detectable(sample_P)) <= 0.05) == pytest.approx(0.8, abs=0.04)


def test_a_model_does_not_differ_from_itself() -> None:
    found = compare(np.zeros(10), seed=0)
    assert (found.difference, found.low, found.high, found.p_value, found.detectable) == (0, None, None, 1, None)
    (_, line) = pair_lines({"sums": {"acc/mean": asdict(found)}}, "other", {})
    assert "all 10 prompts differ not at all: how far others would is not known" in line


REWARD = """
def digits(completion, ground_truth):
    right = len(completion) % 2
    return {"score": float(right), "acc": float(right), "pred": completion[:1]}
"""


@pytest.fixture
def config(grpo_config: Path, sort4: Path, tmp_path: Path) -> str:
    """Six rows, four short answers each, of the untrained model."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "val.jsonl").write_text("".join((sort4 / "val.jsonl").read_text().splitlines(keepends=True)[:6]))
    tree = yaml.safe_load(grpo_config.read_text())
    tree["data"]["val_files"] = [str(tmp_path / "val.jsonl")]
    tree["reward"] = {"functions": [f"{tmp_path}/reward.py:digits"], "workers": 1}
    grpo_config.write_text(yaml.safe_dump(tree))
    return str(grpo_config)


SAMPLED = ("generation.eval.samples=4", "generation.eval.temperature=1", "generation.max_response_tokens=4")


SOME_ACC = REWARD.replace('"acc": float(right), ', '**({"acc": float(right)} if right else {}), ')
"""`acc` for right answers alone: a mean over those who have it would be 1."""


def test_an_accuracy_of_some_answers_is_none_and_told(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, out, run = tmp_path / "answers.parquet", tmp_path / "metrics.json", tmp_path / "run"
    (tmp_path / "reward.py").write_text(SOME_ACC)
    assert main(["eval", config, *SAMPLED, "--answers", str(answers), "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    assert not any(name.startswith("acc/") for name in found["data"]["sort4"]["metrics"])
    lacking = found["data"]["sort4"]["without_acc"]
    assert 0 < lacking < 24 and found["val/sort4/acc/share"] == pytest.approx(1 - lacking / 24)
    assert [name for name in found if name.startswith("val/sort4/acc/")] == ["val/sort4/acc/share"]
    assert f"  acc/…          none: {lacking} of 24 scored answers have no acc\n" in capsys.readouterr().out

    (tmp_path / "reward.py").write_text(REWARD)
    assert main(["eval", config, *SAMPLED, "--against", str(answers), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert f"  acc/…          not compared: {lacking} of 24 scored answers there have no acc\n" in told
    assert json.loads(out.read_text())["data"]["sort4"]["without_acc"] == 0 and "none: " not in told

    (tmp_path / "reward.py").write_text(SOME_ACC)
    trainer = f"trainer={{run_dir: {run}, steps: 2, eval_every: 1}}"
    assert main(["train", config, *SAMPLED, trainer, "data.prompts_per_step=4", "algorithm.group_size=4"]) == 0
    printed = capsys.readouterr().out
    begin = (
        r"^validation of step 0: (\d+) of 24 scored answers to sort4 have no acc, so there is no val/sort4/acc/mean@N"
    )
    told = re.findall(begin, printed, re.MULTILINE)
    records = read_metrics(run / "metrics.jsonl")
    assert printed.count("have no acc") == len(told) == 1 and records[0]["val/sort4/acc/share"] == pytest.approx(
        1 - int(*told) / 24
    )
    of_steps = [record for record in records if "reward/acc" in record]
    assert of_steps and all(record["reward/acc"] == 1 and record["reward/acc/share"] < 1 for record in of_steps)
    assert not any("/acc/mean" in name for record in records for name in record)


def test_two_evaluations_are_compared_prompt_by_prompt(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, out = tmp_path / "answers.parquet", tmp_path / "metrics.json"
    assert main(["eval", config, *SAMPLED, "--answers", str(answers)]) == 0
    assert "sort4: 6 prompts, 24 answers; 95% intervals\n" in capsys.readouterr().out
    assert main(["eval", config, *SAMPLED, "--against", str(answers), "--out", str(out)]) == 0
    told = f"sort4: difference to {answers}\n  reward/mean     +0.0000  all 6 prompts differ not at all"
    assert told in capsys.readouterr().out
    found: dict[str, Any] = json.loads(out.read_text())
    metrics = found["data"]["sort4"]["metrics"]
    assert {*metrics} == {"reward/mean", "acc/mean", "acc/best@2", "acc/best@4", "acc/maj@4"}
    assert metrics["acc/mean"]["value"] == pytest.approx(found["val/sort4/acc/mean@4"])
    assert metrics["acc/best@4"]["value"] == pytest.approx(found["val/sort4/acc/best@4"])
    assert metrics["acc/maj@4"]["value"] == pytest.approx(found["val/sort4/acc/maj@4"])
    assert found["against"]["data"]["sort4"]["acc/mean"]["p_value"] == 1

    assert main(["eval", config, *SAMPLED, "seed=1", "--against", str(answers), "--out", str(out)]) == 0
    other: dict[str, Any] = json.loads(out.read_text())
    difference = other["against"]["data"]["sort4"]["acc/mean"]["difference"]
    mean = other["data"]["sort4"]["metrics"]["acc/mean"]["value"]
    assert difference == pytest.approx(mean - metrics["acc/mean"]["value"])


def test_answers_to_other_prompts_are_refused(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers, val = tmp_path / "answers.parquet", tmp_path / "val.jsonl"
    assert main(["eval", config, *SAMPLED, "--answers", str(answers)]) == 0
    rows = val.read_text().splitlines(keepends=True)
    val.write_text("".join(rows[:5]))
    assert main(["eval", config, *SAMPLED, "--against", str(answers)]) == 2
    told = (
        f"--against {answers}: it has 6 prompts, and the configuration's validation data 5; compare over the same rows"
    )
    assert told in capsys.readouterr().err
    val.write_text("".join(reversed(rows)))
    assert main(["eval", config, *SAMPLED, "--against", str(answers)]) == 2
    assert f"--against {answers}: row 0 has data source and ground truth ('sort4', " in capsys.readouterr().err
    assert main(["eval", config, *SAMPLED, "--against", str(val)]) == 2
    assert f"{val}: not a file of trajectories" in capsys.readouterr().err


def asked(index: int, question: str, text: str = "") -> Prompt:
    row = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]}
    return Prompt(index, np.zeros(0, np.int32), text or f"<user>{question}<end>", "letters", "B", row)


def against(saved: list[Prompt], prompts: list[Prompt]) -> None:
    groups = [Group([trajectory_without_turns(prompt, 0, Status.COMPLETED, "")], []) for prompt in saved]
    check_same_prompts(groups, prompts, Path("a.parquet"))


def test_questions_with_the_same_ground_truth_are_told_apart() -> None:
    """Ground truths that are letters say little."""
    rows = [asked(0, "Which  is\nred?"), asked(1, "Which is blue?")]
    against(rows, rows)
    against([asked(0, "", "[INST] Which is red? [/INST]"), asked(1, "", "[INST] Which is blue? [/INST]")], rows)
    against([asked(0, "", "&lt;1"), asked(1, "", "&lt;2")], rows)  # a template that writes what is asked in its own way
    for saved in ([asked(0, "Which is blue?"), asked(1, "Which is red?")], [rows[0], asked(1, "Which is green?")]):
        with pytest.raises(UserError, match=r"row [01] asks something else there than 'Which is"):
            against(saved, rows)


def test_a_run_is_evaluated_by_its_directory(
    config: str, sort4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(sort4 / "model", run / "checkpoints/step_000003/model")
    (run / "checkpoints/latest").write_text("step_000003")
    tree = yaml.safe_load(Path(config).read_text())
    tree["model"]["path"] = "where/it/began"
    (run / "config.yaml").write_text(yaml.safe_dump(tree | {"algorithm": {"type": "grpo"}}))
    assert main(["eval", str(run), *SAMPLED, "generation.eval.samples=1"]) == 0
    told = capsys.readouterr()
    assert f"model: {run}/checkpoints/step_000003/model" in told.err
    assert "sort4: 6 prompts, 6 answers; 95% intervals" in told.out

    (run / "config.yaml").write_text("data: {rows_per_step: 4}\n")
    for directory, said in (
        (run, f'no prompts with rewards; say what to ask its model: tandem eval CONFIG.yaml model.path="{run}"'),
        (sort4 / "model", f'a model; say what to ask it: tandem eval CONFIG.yaml model.path="{sort4}/model"'),
        (run / "checkpoints", "neither a run (config.yaml) nor a model (config.json)"),
    ):
        assert main(["eval", str(directory)]) == 2
        assert f"tandem: {directory}: " in (message := capsys.readouterr().err) and said in message


def test_what_is_compared_with_must_be_there(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "answers.parquet"
    assert main(["eval", config, "--against", str(missing)]) == 2
    assert capsys.readouterr().err == (
        f"tandem: --against {missing}: no such file; another evaluation writes it with --answers {missing}\n"
    )


def test_of_several_sources_the_one_that_lacks_acc_is_told() -> None:
    whole, some = Answered("a", [1.0, 0.0], [1.0, 0.0]), Answered("b", [1.0, 0.0], [1.0, None], unscored=1)
    never = Answered("c", [1.0], [None])
    assert without_accuracy([whole, some, never, some]) == {"b": (2, 4)}
    found = summarize([whole, some, never], seed=0)
    assert [found[source]["without_acc"] for source in "abc"] == [0, 1, 0]
    assert [line for line in lines(found) if "no acc" in line] == [
        "  acc/…          none: 1 of 2 scored answers have no acc"
    ]


def test_verdicts_and_partial_credit_are_compared_by_the_same_names() -> None:
    verdicts, partial = [1.0, 0.0], [0.5, 0.25]
    pair = [[Answered("a", values, values, [None, None])] * 3 for values in (verdicts, partial)]
    compared = summarize_pair(*pair, seed=0)["a"]
    assert {*compared} == {"reward/mean", "acc/mean", "acc/best@2"}
    assert compared["acc/best@2"]["difference"] == 0.5
