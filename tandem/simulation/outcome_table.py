"""Outcomes of simulations, for people."""

from collections.abc import Iterator, Sequence

from tandem.config.tree import TrainConfig
from tandem.simulation.lengths import Lengths
from tandem.simulation.measured import engines_on
from tandem.simulation.simulated_run import SimulatedRun, refuse_unsimulated, simulate
from tandem.simulation.speeds import Recorded, Setup
from tandem.simulation.virtual import Deadlock

NEAR = 0.02
"""A step time that is so little above the fastest is as good."""
_TRUSTED = 0.1
"""How far the simulation of a run may be off it."""
_HEAD = "  k    step s   tokens/s  trainer waits  engines idle    rows  staleness"


def print_table(configs: Sequence[TrainConfig], setup: Setup, steps: int) -> None:
    """Simulate runs that differ in their staleness. Raises UserError for what is not simulated, and Deadlock where one
    would hang."""
    refuse_unsimulated(configs[0])
    for line in describe(configs[0], setup, steps):
        print(line, flush=True)
    if setup.recorded is not None:
        print(check(setup.recorded), flush=True)
    outcomes = [_simulate(config, setup, steps) for config in configs]
    for line in rows(outcomes):
        print(line)
    for line in extrapolated(outcomes, setup.recorded):
        print(line)


def _simulate(config: TrainConfig, setup: Setup, steps: int) -> SimulatedRun:
    try:
        return simulate(config, setup, steps)
    except Deadlock as error:
        raise Deadlock(f"k = {config.trainer.max_staleness}: {error}") from None


def best(outcomes: Sequence[SimulatedRun]) -> SimulatedRun:
    """The least staleness whose step takes hardly longer than the fastest."""
    fastest = min(outcome.step_s for outcome in outcomes)
    near = [outcome for outcome in outcomes if outcome.step_s <= (1 + NEAR) * fastest]
    return min(near, key=lambda outcome: outcome.max_staleness)


def describe(config: TrainConfig, setup: Setup, steps: int) -> Iterator[str]:
    """What is simulated, and of what speeds."""
    speeds, engine = setup.speeds, setup.speeds.engine
    prompts, samples = config.data.prompts_per_step, config.algorithm.group_size
    yield f"{steps} steps of {prompts} prompts x {samples} answers; {_placement(config)}"
    yield f"speeds of {setup.source}:"
    yield (
        f"  an iteration of an engine {engine.iteration_s * 1e3:.4g} ms + {engine.row_s * 1e6:.4g} us a row + "
        f"{engine.context_token_s * 1e9:.4g} ns a token of context; "
        f"prefill {engine.prefill_token_s * 1e6:.4g} us a token"
    )
    yield (
        f"  training {speeds.train_step_s:.4g} s a step + {speeds.train_token_s * 1e6:.4g} us a token; "
        f"publish {speeds.publish_s:.4g} s, pause {speeds.pause_s:.4g} s, scores {speeds.reward_s:.4g} s, "
        f"controller {speeds.controller_s:.4g} s a step"
    )
    yield f"  {_lengths(setup.lengths, prompts)}"


def check(recorded: Recorded) -> str:
    """The run that the speeds are of, beside its own simulation."""
    simulated_s = simulate(recorded.config, recorded.setup, 30).step_s
    off = simulated_s / recorded.step_s - 1
    told = f"  that run took {recorded.step_s:.3f} s a step; simulated from its speeds {simulated_s:.3f} s, {off:+.0%}"
    return told if abs(off) <= _TRUSTED else f"{told}: what follows is no nearer"


def extrapolated(outcomes: Sequence[SimulatedRun], recorded: Recorded | None) -> Iterator[str]:
    """What the run that the speeds are of does not show."""
    more = [] if recorded is None else [str(one.max_staleness) for one in outcomes if one.rows > recorded.rows]
    if recorded is not None and more:
        yield (
            f"k = {', '.join(more)}: engines decode more rows side by side than that run's, {recorded.rows} at most: "
            "how long an iteration of so many takes is a guess"
        )


def rows(outcomes: Sequence[SimulatedRun]) -> Iterator[str]:
    """A table with a line for each staleness, and which is best."""
    yield _HEAD
    for one in outcomes:
        yield (
            f"{one.max_staleness:>3} {one.step_s:>9.3f} {one.tokens_per_s:>10.0f} {one.trainer_waits:>14.0%} "
            f"{one.engines_idle:>13.0%} {one.rows:>7.1f} {one.mean_staleness:>10.2f}"
        )
    yield f"best: k = {best(outcomes).max_staleness}, the smallest within {NEAR:.0%} of the fastest"


def _placement(config: TrainConfig) -> str:
    ranks = sum(config.nodes_of("rollout"))
    engines = f"{engines_on(config.generation, ranks)} x {config.generation.type} on {ranks} ranks"
    roles = config.placement.roles
    first = next(iter(config.placement.pools), "")
    if roles.get("rollout", first) == roles.get("actor", first):
        return f"{engines}, which training takes in turns"
    return f"{engines}, training on {sum(config.nodes_of('actor'))} others"


def _lengths(lengths: Lengths, prompts: int) -> str:
    drawn = [lengths.of(draw) for draw in range(20 * prompts)]
    responses = sorted(length for answers, _ in drawn for length in answers)
    mean, prompt = sum(responses) / len(responses), sum(tokens for _, tokens in drawn) / len(drawn)
    return (
        f"answers of {mean:.0f} tokens on average, half of them below {responses[len(responses) // 2]:.0f}, "
        f"the longest of 20 steps {responses[-1]:.0f}; prompts of {prompt:.0f}"
    )
