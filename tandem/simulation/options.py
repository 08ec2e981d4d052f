"""The options of `tandem simulate` -> speeds and lengths; what is not given comes from a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tandem.config.generation import NativeGenerationConfig
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.simulation.lengths import GroupLengths, Lengths, LognormalLengths, RecordedLengths
from tandem.simulation.measured import measure, on_other_ranks
from tandem.simulation.speeds import DEFAULT_MAX_RUNNING, EngineSpeed, Recorded, Setup, Speeds


@dataclass(frozen=True, slots=True)
class Options:
    """Those of the command line, in its units; None: not given."""

    run: Path | None = None
    iteration_ms: float | None = None
    row_us: float | None = None
    context_ns: float | None = None
    prefill_us: float | None = None
    max_running: int | None = None
    train_s: float | None = None
    train_us_per_token: float | None = None
    publish_s: float | None = None
    pause_s: float | None = None
    reward_s: float | None = None
    controller_s: float | None = None
    response_tokens: float | None = None
    response_sigma: float | None = None
    prompt_share: float | None = None
    prompt_tokens: int | None = None
    seed: int = 0


def read_staleness(text: str) -> list[int]:
    """`0,1,2` -> its numbers, ascending. Raises UserError."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or values[0] < 0:
        raise UserError(f"--staleness {text}: give numbers from 0 on with commas between them, as 0,1,2,4")
    return values


def count_steps(given: int | None, staleness: Sequence[int]) -> int:
    """`--steps`, or its default. Raises UserError where a run would end before it goes evenly."""
    most = max(staleness)
    least = 4 * (most + 1)
    if given is None:
        return max(50, least)
    if given < least:
        raise UserError(
            f"--steps {given}: with k = {most} a run goes evenly from step {2 * (most + 1)} on, and is measured from "
            f"there; give {least} or more, or leave it out"
        )
    return given


def load_for_each(staleness: Sequence[int], path: Path, overrides: Sequence[str]) -> list[TrainConfig]:
    """The configuration with each trainer.max_staleness. Raises UserError where `tandem train` would refuse it."""
    configs: list[TrainConfig] = []
    for value in staleness:
        try:
            configs.append(load_config(TrainConfig, path, [*overrides, f"trainer.max_staleness={value}"]))
        except UserError as error:
            raise UserError(f"--staleness: tandem train refuses this configuration with k = {value}: {error}") from None
    return configs


def setup_of(options: Options, config: TrainConfig) -> Setup:
    """Raises UserError with all that is missing, or for a run that does not show its speeds."""
    _check_values(options, config)
    max_running = options.max_running or DEFAULT_MAX_RUNNING
    if options.run is None:
        _check_complete(options)
        speeds, groups, source, recorded = Speeds(EngineSpeed(0.0)), [], "the command line", None
    else:
        measured = measure(options.run, max_running)
        speeds = on_other_ranks(measured.speeds, measured.training_ranks, sum(config.nodes_of("actor")))
        groups, source = measured.groups, f"the last {measured.steps} steps of {options.run}, and the command line"
        lengths = RecordedLengths(groups, measured.config.algorithm.group_size, options.seed)
        own = Setup(measured.speeds, lengths, max_running)
        recorded = Recorded(measured.config, own, measured.step_s, measured.rows)
    speeds = _with_given(speeds, options)
    if replace(speeds.engine, prefill_token_s=0.0) == EngineSpeed(0.0):
        if options.run is not None:
            raise UserError(
                f"--from {options.run}: answers did not take longer for being longer, as where other work disturbs a "
                "run, so that it shows no speed of its engines; give another run, or --iteration-ms"
            )
        raise UserError("engines that take no time: give --iteration-ms")
    return Setup(speeds, _lengths(options, config, groups), max_running, source, recorded)


def _check_values(options: Options, config: TrainConfig) -> None:
    for one in fields(options):
        value = getattr(options, one.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{one.name.replace('_', '-')} {value}: give a finite number")
    if options.max_running is not None and isinstance(config.generation, NativeGenerationConfig):
        raise UserError(
            f"--max-running {options.max_running}: the native engine decodes generation.max_running samples at once; "
            "set that"
        )
    shapes = {"--response-sigma": options.response_sigma, "--prompt-share": options.prompt_share}
    if options.response_tokens is None and (given := [name for name, value in shapes.items() if value is not None]):
        raise UserError(f"{', '.join(given)}: shape the lengths that --response-tokens asks for; give it, too")


def _check_complete(options: Options) -> None:
    missing = [
        name
        for name, given in {
            "--iteration-ms": options.iteration_ms,
            "--train-s or --train-us-per-token": options.train_us_per_token
            if options.train_s is None
            else options.train_s,
            "--response-tokens": options.response_tokens,
        }.items()
        if given is None
    ]
    if missing:
        raise UserError(f"nothing says how fast this would be: give --from RUN, or {', '.join(missing)}")


def _with_given(speeds: Speeds, options: Options) -> Speeds:
    engine = {
        "iteration_s": _scaled(options.iteration_ms, 1e-3),
        "row_s": _scaled(options.row_us, 1e-6),
        "context_token_s": _scaled(options.context_ns, 1e-9),
        "prefill_token_s": _scaled(options.prefill_us, 1e-6),
    }
    whole = {
        "train_step_s": options.train_s,
        "train_token_s": _scaled(options.train_us_per_token, 1e-6),
        "publish_s": options.publish_s,
        "pause_s": options.pause_s,
        "reward_s": options.reward_s,
        "controller_s": options.controller_s,
    }
    return replace(speeds, engine=replace(speeds.engine, **_given(engine)), **_given(whole))


def _given(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _lengths(options: Options, config: TrainConfig, groups: Sequence[GroupLengths]) -> Lengths:
    samples, longest = config.algorithm.group_size, config.generation.max_response_tokens
    if options.response_tokens is None:
        return RecordedLengths(_adapted(groups, options.prompt_tokens, longest), samples, options.seed)
    if not 1 <= options.response_tokens <= longest:
        raise UserError(
            f"--response-tokens {options.response_tokens:g}: a mean between 1 and generation.max_response_tokens: "
            f"{longest} is possible"
        )
    return LognormalLengths(
        samples,
        options.response_tokens,
        0.7 if options.response_sigma is None else options.response_sigma,
        longest,
        _prompt_tokens(options, groups),
        0.5 if options.prompt_share is None else options.prompt_share,
        options.seed,
    )


def _adapted(groups: Sequence[GroupLengths], prompt_tokens: int | None, longest: int) -> list[GroupLengths]:
    """Recorded groups as this configuration would have them: answers cut, prompts of the tokens that were asked for."""
    return [
        ([min(length, float(longest)) for length in lengths], recorded if prompt_tokens is None else prompt_tokens)
        for lengths, recorded in groups
    ]


def _prompt_tokens(options: Options, groups: Sequence[GroupLengths]) -> int:
    """Those that were asked for; else the run's, on average; else none."""
    if options.prompt_tokens is not None:
        return options.prompt_tokens
    return round(sum(tokens for _, tokens in groups) / len(groups)) if groups else 0
