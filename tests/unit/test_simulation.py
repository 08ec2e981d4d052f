"""Runs in virtual time: laws that hold exactly, conservation, an independent simulation, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.cli import main
from tandem.config.load import dump_config
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.simulation import outcome_table
from tandem.simulation.continuous_batching import Decoding, SimulatedAnswers
from tandem.simulation.lengths import LognormalLengths
from tandem.simulation.measured import measure
from tandem.simulation.options import Options, count_steps, setup_of
from tandem.simulation.simulated_run import simulate
from tandem.simulation.speeds import EngineSpeed, Recorded, Setup, Speeds
from tandem.simulation.virtual import Deadlock, VirtualCluster
from tandem.simulation.virtual_workers import VirtualRewards

SPLIT = {"pools": {"train": [1], "gen": [1]}, "roles": {"rollout": "gen"}}


def config(
    k: int, prompts: int = 16, samples: int = 1, split: dict[str, Any] | None = SPLIT, ranks: int = 1, **generation: Any
) -> TrainConfig:
    native = {"max_running": 10_000, **generation}
    tree = {
        "model": {"path": "/nowhere"},
        "data": {"prompts_per_step": prompts},
        "algorithm": {"type": "grpo" if samples > 1 else "ppo", "group_size": samples},
        "generation": {"max_response_tokens": 100_000, **(generation if "type" in generation else native)},
        "trainer": {"run_dir": "/nowhere", "steps": 10, "max_staleness": k},
        "cluster": {"type": "ray"} if split else {"type": "ray", "ranks": ranks},
    }
    return TrainConfig.model_validate({**tree, **({"placement": split} if split else {})})


SERVED = {"type": "vllm"}


@dataclass(slots=True)
class Listed:
    """The same lengths in every step: `lengths` in turn, a row a sample."""

    lengths: Sequence[float]
    samples: int = 1
    prompt_tokens: int = 0

    def of(self, draw: int) -> tuple[Sequence[float], int]:
        first = draw * self.samples
        return [self.lengths[(first + i) % len(self.lengths)] for i in range(self.samples)], self.prompt_tokens


TAIL = [10.0] * 15 + [80.0]
"""One answer in 16 eight times longer."""


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("train_s", [2.0, 20.0, 70.0, 100.0])
def test_the_law_of_the_longest_answer(k: int, train_s: float) -> None:
    """Engines with room for all: T = max(T_train, (T_longest + T_train) / (k + 1)); an iteration takes a second."""
    setup = Setup(Speeds(EngineSpeed(1.0), train_step_s=train_s), Listed(TAIL))
    law = max(train_s, (80 + train_s) / (k + 1))
    assert simulate(config(k), setup, 60).step_s == pytest.approx(law, rel=0.01)


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
def test_the_law_of_full_engines(k: int) -> None:
    """16 places, 128 answers a step, of 10 tokens but for every 16th: T_gen = 128 * 14.375 / 16 = 115 s, if full."""
    lengths = [length for length in TAIL for _ in range(8)]
    Random(0).shuffle(lengths)
    setup = Setup(Speeds(EngineSpeed(1.0), train_step_s=30.0), Listed(lengths))
    law = max(30.0, 115.0, (80 + 30.0) / (k + 1))
    measured = simulate(config(k, prompts=128, max_running=16), setup, 60).step_s
    if k == 0:
        assert measured >= 115 + 30
    else:
        assert law <= measured <= 1.10 * law
    if k >= 4:
        assert measured == pytest.approx(law, rel=0.02)


@pytest.mark.parametrize(("generate", "train"), [(40.0, 40.0), (40.0, 20.0), (20.0, 40.0)])
def test_one_step_ahead_hides_the_shorter_of_the_two(generate: float, train: float) -> None:
    setup = Setup(Speeds(EngineSpeed(1.0), train_step_s=train), Listed([generate]))
    apart, ahead = (simulate(config(k), setup, 40).step_s for k in (0, 1))
    assert apart >= 0.95 * (generate + train)
    assert ahead <= 1.10 * max(generate, train)


def test_time_sharing_fills_the_tail_with_prompts_of_the_next_step() -> None:
    """k = 1 takes at most 0.65 of k = 0's time on a heavy tail, on one rank and on four, native and served."""
    lengths = LognormalLengths(8, mean=500, sigma=1.0, longest=8000)
    setup = Setup(Speeds(EngineSpeed(0.01, row_s=1e-5), train_step_s=2.0), lengths)
    for ranks in (1, 4):
        for generation in ({}, SERVED):
            shared = {"prompts": 32, "samples": 8, "split": None, "ranks": ranks, **generation}
            apart, ahead = (simulate(config(k, **shared), setup, 40).step_s for k in (0, 1))
            assert ahead <= 0.65 * apart


@pytest.mark.parametrize("split", [None, SPLIT])
@pytest.mark.parametrize("generation", [{}, SERVED, {"max_running": 24}])
@pytest.mark.parametrize("partial", [True, False])
def test_every_token_is_generated_once(split: Any, generation: dict[str, Any], partial: bool) -> None:
    """What engines made is what was trained and what was still under way; no token is too stale."""
    lengths = LognormalLengths(4, mean=60, sigma=0.8, longest=400, prompt_tokens=20)
    speeds = Speeds(
        EngineSpeed(0.01, 1e-4, 1e-7, 1e-5), train_step_s=1.0, train_token_s=1e-4, publish_s=0.1, pause_s=0.1
    )
    speeds = replace(speeds, reward_s=0.3, controller_s=0.2)
    for k in (0, 1, 3):
        tree = config(k, prompts=8, samples=4, split=split, partial_rollouts=partial, **generation)
        outcome = simulate(tree, Setup(speeds, lengths), 25)
        under_way = sum(sum(lengths.of(draw)[0]) for draw in range(8 * 25, 8 * (25 + k + 1)))
        trained = sum(sum(lengths.of(draw)[0]) for draw in range(8 * 25))
        assert outcome.trained_response_tokens == pytest.approx(trained)
        assert trained - 1e-6 <= outcome.work.tokens <= trained + under_way + 1e-6
        if k == 0:
            assert outcome.work.tokens == pytest.approx(trained)
        assert outcome.most_staleness <= k
        assert 0 <= outcome.mean_staleness <= k + 1e-9
        if not partial:
            assert outcome.mean_staleness == pytest.approx(k)


def independent(k: int, lengths: list[float], slots: int, train_s: float, steps: int) -> float:
    """Single answers, one engine that never waits to take the next: seconds a step in the end, by a plain loop."""
    size, free = len(lengths), [0.0] * slots
    published, ends, done = [0.0], [], []
    for step in range(steps):
        admitted = published[max(0, step - k)]
        for length in lengths:
            free.sort()
            start = max(free[0], admitted)
            free[0] = start + length
            done.append(free[0])
        ready = max(done[step * size : (step + 1) * size])
        ends.append(max(ready, published[-1]) + train_s)
        published.append(ends[-1])
    return (ends[-1] - ends[steps // 2]) / (steps - 1 - steps // 2)


@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("slots", [4, 16, 64])
def test_it_agrees_with_an_independent_simulation(k: int, slots: int) -> None:
    """Where only iterations take time, a row is a machine that takes the answers in their order."""
    random = Random(3)
    lengths = [float(random.randint(20, 400)) for _ in range(32)]
    setup = Setup(Speeds(EngineSpeed(1.0), train_step_s=150.0), Listed(lengths))
    simulated = simulate(config(k, prompts=32, max_running=slots), setup, 41).step_times_s[21:]
    assert float(np.mean(simulated)) == pytest.approx(independent(k, lengths, slots, 150.0, 41), rel=0.02)


def token_by_token(speed: EngineSpeed, rows: list[tuple[int, int]], places: int, padded: bool) -> list[float]:
    """When each row of (length, prompt) ends; an iteration at a time."""
    ends, waiting, running, now = [0.0] * len(rows), list(range(len(rows))), dict[int, int](), 0.0
    now += speed.prefill_token_s * sum(prompt for _, prompt in rows)
    while waiting or running:
        while waiting and len(running) < places:
            running[waiting.pop(0)] = 0
        contexts = [rows[row][1] + made + 0.5 for row, made in running.items()]
        context = len(contexts) * max(contexts) if padded else sum(contexts)
        now += speed.iteration_s + speed.row_s * len(running) + speed.context_token_s * context
        for row in list(running):
            running[row] += 1
            if running[row] == rows[row][0]:
                ends[row] = now
                del running[row]
    return ends


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("places", [3, 100])
def test_decoding_is_that_of_token_by_token(places: int, padded: bool) -> None:
    random, speed = Random(1), EngineSpeed(0.01, 1e-3, 1e-5, 1e-4)
    rows = [(random.randint(1, 90), random.randint(0, 50)) for _ in range(20)]
    decoding = Decoding(speed, places, padded)
    answers = [SimulatedAnswers(number, prompt, [float(length)]) for number, (length, prompt) in enumerate(rows)]
    for one in answers:
        decoding.add(one)
    first = decoding.next_event(1)
    for until in np.arange(0, 40, 0.37):  # in pieces
        decoding.run(float(until))
    assert [one.ended_at for one in answers] == pytest.approx(token_by_token(speed, rows, places, padded), rel=1e-6)
    assert first == pytest.approx(min(one.ended_at for one in answers))
    assert decoding.work.tokens == pytest.approx(sum(length for length, _ in rows))
    assert not decoding.unfinished


def test_a_busy_controller_holds_up_native_engines() -> None:
    """Shared devices: answers of 40 s, training and the controller of 10 s each, of which none happens at once."""
    setup = Setup(Speeds(EngineSpeed(0.01), train_step_s=10.0, controller_s=10.0), Listed([4000.0]))
    step_s = [simulate(config(k, split=None), setup, 60).step_s for k in (0, 1, 2, 4)]
    assert step_s == pytest.approx([20 + 40 / (k + 1) for k in (0, 1, 2, 4)], rel=0.01)


@pytest.mark.parametrize(
    ("mean", "sigma", "longest"), [(20, 3.0, 1024), (2, 1.0, 50), (500, 0.0, 1000), (90, 10.0, 100)]
)
def test_lengths_have_the_mean_that_was_asked_for(mean: float, sigma: float, longest: int) -> None:
    lengths = LognormalLengths(4, mean, sigma, longest, prompt_share=0)
    drawn = [length for draw in range(20_000) for length in lengths.of(draw)[0]]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert min(drawn) >= 1 and max(drawn) <= longest


def test_versions_of_tokens() -> None:
    """A row of 100 tokens that a publish meets after 30: 30 of version 0, 70 of version 1."""
    decoding, one = Decoding(EngineSpeed(1.0), 4), SimulatedAnswers(0, 0, [100.0])
    decoding.add(one)
    decoding.run(30.0)
    decoding.publish(1)
    decoding.run(200.0)
    assert one.version_tokens == pytest.approx(70) and one.oldest_version == 0


def test_a_wait_for_nothing_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="everything is idle"):
        VirtualCluster().watch()


def test_the_best_is_the_smallest_of_the_fast() -> None:
    setup = Setup(Speeds(EngineSpeed(1.0), train_step_s=40.0), Listed([80.0]))
    outcomes = [simulate(config(k), setup, 30) for k in (0, 1, 2, 4)]
    assert [round(one.step_s) for one in outcomes] == [120, 60, 40, 40]
    assert outcome_table.best(outcomes).max_staleness == 2
    assert outcomes[0].trainer_waits == pytest.approx(2 / 3, abs=0.01)
    assert outcomes[0].engines_idle == pytest.approx(1 / 3, abs=0.01)
    assert outcomes[2].engines_idle == pytest.approx(0, abs=0.01)


SPEED = EngineSpeed(0.01, 1e-4, 1e-7, 1e-5)


def recorded(run: Path, steps: int = 8, k: int = 0, replaced: Sequence[int] = ()) -> Path:
    """A run of two native engines with a training process beside them, as it would be recorded with these speeds.

    `replaced`: steps in which groups were replaced by those of further prompts, 30 s later.
    """
    (run / "trajectories").mkdir(parents=True)
    tree = config(k, prompts=6, samples=4, split={"pools": {"t": [1], "g": [2]}, "roles": {"rollout": "g"}})
    (run / "config.yaml").write_text(dump_config(tree))
    lines = []
    for step in range(1, steps + 1):
        random = Random(step)
        lengths = [[float(random.randint(5, 200)) for _ in range(4)] for _ in range(6)]
        prompts, ends = [random.randint(1, 40) for _ in range(6)], dict[int, float]()
        for share in ((0, 1, 2), (3, 4, 5)):
            decoding = Decoding(SPEED, 10_000, padded=True)
            for number in share:
                decoding.add(SimulatedAnswers(number, prompts[number], lengths[number]))
            decoding.run(1e9)
            ends |= {one.number: one.ended_at for one in decoding.done}
        rows = [(number, length) for number in range(6) for length in lengths[number]]
        columns = {
            "group": [number for number, _ in rows],
            "branch": [0] * len(rows),
            "response_ids": [[7] * int(length) for _, length in rows],
            "prompt_ids": [[7] * prompts[number] for number, _ in rows],
            "generation_s": [ends[number] for number, _ in rows],
        }
        pq.write_table(pa.table(columns), run / f"trajectories/step_{step:06d}.parquet")
        tokens, longest = sum(length + prompts[number] for number, length in rows), max(ends.values())
        times = {"preparation_s": 0.5, "advantages_s": 0.1, "update_s": 1.0 + 1e-3 * tokens, "publish_s": 0.25}
        times |= {"generation_s": longest + 0.03 + (30 if step in replaced else 0), "reward_s": 0.04}
        times["step_s"] = sum(times.values()) + 0.2
        metrics = {f"time/{name}": value for name, value in times.items()}
        metrics |= {"perf/tokens": tokens, "rollout/resample/replaced": 2.0 if step in replaced else 0.0}
        lines.append(json.dumps({"step": step, **metrics}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return run


def test_the_run_that_speeds_are_of_is_simulated_beside_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path / "run")
    fast = ["--train-s", "0.01", "--train-us-per-token", "0", "--publish-s", "0", "--controller-s", "0"]
    assert main(["simulate", "--from", str(run), "--staleness", "0,4", *fast]) == 0
    told = capsys.readouterr().out
    assert re.search(r"that run took (\d\.\d+) s a step; simulated from its speeds \d\.\d+ s, [+-]\d%\n", told)
    assert "k = 4: engines decode more rows side by side than that run's, 12 at most" in told
    own = Setup(Speeds(EngineSpeed(1.0), train_step_s=40.0), Listed([80.0]))
    assert outcome_table.check(Recorded(config(0), own, step_s=100.0, rows=1)).endswith(
        "120.000 s, +20%: what follows is no nearer"
    )
    even = pq.read_table(run / "trajectories/step_000003.parquet").to_pydict()
    even["generation_s"] = [0.0] * len(even["generation_s"])
    for file in (run / "trajectories").iterdir():
        pq.write_table(pa.table(even), file)
    assert main(["simulate", "--from", str(run)]) == 2
    assert "answers did not take longer for being longer" in capsys.readouterr().err


def test_speeds_of_a_run_are_found(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    tree = config(0, prompts=6, samples=4, split={"pools": {"t": [4], "g": [2]}, "roles": {"rollout": "g"}})
    setup = setup_of(Options(run=run, pause_s=0.7), tree)
    engine, speeds = setup.speeds.engine, setup.speeds
    assert [engine.iteration_s, engine.row_s, engine.context_token_s] == pytest.approx([0.01, 1e-4, 1e-7], rel=1e-4)
    assert engine.prefill_token_s == pytest.approx(1e-5, rel=1e-3)
    assert speeds.train_step_s == pytest.approx(1.6) and speeds.train_token_s == pytest.approx(1e-3 / 4)  # four ranks
    assert [speeds.publish_s, speeds.pause_s] == pytest.approx([0.25, 0.7])
    assert [speeds.reward_s, speeds.controller_s] == pytest.approx([0.07, 0.2])
    groups = {tuple(setup.lengths.of(draw)[0]) for draw in range(500)}
    assert len(groups) == 6 * 7  # whole groups of the steps after the first


def test_steps_with_further_rounds_of_answers_are_left_out(tmp_path: Path) -> None:
    """Where groups were replaced the wait for their successors is none for scores, and 3 other steps are enough."""
    tree = config(0, prompts=6, samples=4)
    setup = setup_of(Options(run=recorded(tmp_path / "run", replaced=(5, 6, 7, 8))), tree)
    assert setup.speeds.reward_s == pytest.approx(0.07)
    assert len({tuple(setup.lengths.of(draw)[0]) for draw in range(500)}) == 6 * 3
    run = recorded(tmp_path / "always", replaced=(4, 5, 6, 7, 8))
    with pytest.raises(
        UserError, match=r"dynamic sampling replaced groups in all but 2 of 7 steps, .*resample_rounds: 0"
    ):
        setup_of(Options(run=run), tree)


def test_lengths_of_a_run_with_options(tmp_path: Path) -> None:
    """Prompts as --prompt-tokens says, else those of the run; answers cut at generation.max_response_tokens."""
    run, tree = recorded(tmp_path / "run"), config(0, prompts=6, samples=4)
    assert {setup_of(Options(run=run, prompt_tokens=7), tree).lengths.of(draw)[1] for draw in range(50)} == {7}
    mean = round(float(np.mean([tokens for _, tokens in measure(run).groups])))
    assert setup_of(Options(run=run, response_tokens=50), tree).lengths.of(0)[1] == mean > 10
    short = tree.model_copy(update={"generation": tree.generation.model_copy(update={"max_response_tokens": 30})})
    cut = [length for draw in range(50) for length in setup_of(Options(run=run), short).lengths.of(draw)[0]]
    assert max(cut) == 30 and min(cut) < 30


def test_the_command_predicts_a_run_from_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run")
    assert main(["simulate", "--from", str(run), "--staleness", "0,1", "--steps", "20"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith("  ") and line[:3].strip().isdigit()]
    step_s = {int(row[0]): float(row[1]) for row in rows}
    measured = np.mean([json.loads(line)["time/step_s"] for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert step_s[0] == pytest.approx(measured, rel=0.05) and step_s[1] < step_s[0]
    assert "2 x native on 2 ranks, training on 1 others" in printed and "best: k = 1" in printed


CONVERSATION = "{environment: {tools: [tools.py:weather]}}"
NEEDED = ["--iteration-ms", "10", "--train-s", "5", "--response-tokens", "100"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing says how fast this would be: give --from RUN, or --iteration-ms, --train-s or"),
        ([*NEEDED, "--staleness", "0,x"], "--staleness 0,x: give numbers from 0 on"),
        ([*NEEDED, "--staleness", "-1"], "--staleness -1"),
        ([*NEEDED, "--response-tokens", "5000"], "--response-tokens 5000: a mean between 1 and"),
        ([*NEEDED, "--iteration-ms", "0"], "engines that take no time: give --iteration-ms"),
        ([*NEEDED, "--iteration-ms", "0", "--prefill-us", "10"], "engines that take no time: give --iteration-ms"),
        ([*NEEDED, "--train-s", "inf"], "--train-s inf: give a finite number"),
        ([*NEEDED, "--context-ns", "inf"], "--context-ns inf: give a finite number"),
        ([*NEEDED, "--response-sigma", "11"], "input should be less than or equal to"),
        ([*NEEDED, "--response-tokens", "1.4", "--response-sigma", "0"], "answers of 1.4 tokens on average cannot be"),
        ([*NEEDED, "--max-running", "8"], "--max-running 8: the native engine decodes generation.max_running samples"),
        (["--response-sigma", "1", "--prompt-share", "0"], "--response-sigma, --prompt-share: shape the lengths that"),
        ([*NEEDED, "--steps", "20"], "--steps 20: with k = 8 a run goes evenly from step 18 on, and is measured from"),
        ([*NEEDED, "algorithm={type: rloo, group_size: 2}"], "refuses this configuration with k = 1: "),
        ([*NEEDED, "algorithm={type: remax}", "--staleness", "0"], "algorithm.type: remax has a greedy answer"),
        (
            [*NEEDED, "algorithm={type: on_policy_distillation, teacher: {url: u, model: m}}", "--staleness", "0"],
            "algorithm.teacher: a served teacher is not simulated",
        ),
        (
            [
                *NEEDED,
                "algorithm={type: on_policy_distillation, top_k: 4}",
                "model.teacher_path=/nowhere",
                "--staleness=0",
            ],
            "algorithm.top_k: it is not simulated",
        ),
        ([*NEEDED, "model.reward_model_path=/nowhere"], "model.reward_model_path: a reward model is not simulated"),
        ([*NEEDED, "generation={type: vllm, replicas: 2}"], "generation.replicas: several engines on a rank"),
        ([*NEEDED, f"conversation={CONVERSATION}"], "conversation: answers of several turns are not simulated"),
        ([*NEEDED, "generation.typ=vllm"], "generation.typ: unknown key"),
        (["--from", "nowhere"], "--from nowhere: there is no run"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(config(0, 4, 2, split=None)).replace("100000", "1000"))
    assert main(["simulate", str(tmp_path / "config.yaml"), *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err


def test_training_may_take_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(config(0, 4, 2, split=None)).replace("100000", "1000"))
    options = [*NEEDED, "--response-sigma", "0", "--train-s", "0", "--staleness", "0", "--steps", "4"]
    assert main(["simulate", str(tmp_path / "config.yaml"), *options]) == 0
    assert "  0     1.000 " in capsys.readouterr().out  # 100 iterations of 10 ms


def test_steps_are_enough_for_the_largest_staleness() -> None:
    assert [count_steps(None, [0, 1]), count_steps(None, [30]), count_steps(8, [0, 1])] == [50, 124, 8]


def test_a_run_that_does_not_show_its_speeds(tmp_path: Path) -> None:
    tree = config(0, prompts=6, samples=4)
    with pytest.raises(UserError, match=r"it has trainer\.max_staleness: 2; speeds are seen in a run with 0"):
        setup_of(Options(run=recorded(tmp_path / "stale", k=2)), tree)
    with pytest.raises(UserError, match="2 steps after the first have metrics"):
        setup_of(Options(run=recorded(tmp_path / "short", steps=3)), tree)


def test_a_run_of_conversations_shows_no_speed_of_its_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the configuration that is simulated has none."""
    run = recorded(tmp_path / "run")
    without = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(without.replace("conversation: null", f"conversation: {CONVERSATION}"))
    for more in ([], ["conversation=null"]):
        assert main(["simulate", "--from", str(run), *more]) == 2
        assert f"--from {run}: its answers are conversations, whose waits for tools" in capsys.readouterr().err


def test_a_run_that_hangs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Exit status 1: with scores that never come."""
    monkeypatch.setattr(VirtualRewards, "submit", lambda self, siblings, step, done: None)
    (tmp_path / "config.yaml").write_text(dump_config(config(1, 4, 2)).replace("100000", "1000"))
    assert main(["simulate", str(tmp_path / "config.yaml"), *NEEDED, "--staleness", "1"]) == 1
    assert " s of virtual time everything is idle, and the controller waits" in capsys.readouterr().err
