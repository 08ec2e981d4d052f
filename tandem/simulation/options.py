"""The options of `tandem simulate` -> speeds and lengths; what is not given comes from a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.simulation.lengths import Drawn, Lengths, LognormalLengths, RecordedLengths
from tandem.simulation.measured import measure, on_other_ranks
from tandem.simulation.speeds import DEFAULT_MAX_RUNNING, EngineSpeed, Setup, Speeds


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


def setup_of(options: Options, config: TrainConfig) -> Setup:
    """Raises UserError with all that is missing, or for a run that does not show its speeds."""
    max_running = options.max_running or DEFAULT_MAX_RUNNING
    if options.run is None:
        _check_complete(options)
        speeds, groups, source = Speeds(EngineSpeed(0.0)), [], "the command line"
    else:
        measured = measure(options.run, max_running)
        speeds = on_other_ranks(measured.speeds, measured.training_ranks, sum(config.nodes_of("actor")))
        groups, source = measured.groups, f"the last {measured.steps} steps of {options.run}, and the command line"
    speeds = _with_given(speeds, options)
    if speeds.engine == EngineSpeed(0.0):
        raise UserError("engines that take no time: give --iteration-ms")
    return Setup(speeds, _lengths(options, config, groups), max_running, source)


def _check_complete(options: Options) -> None:
    missing = [
        name
        for name, given in {
            "--iteration-ms": options.iteration_ms,
            "--train-s or --train-us-per-token": options.train_s or options.train_us_per_token,
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


def _lengths(options: Options, config: TrainConfig, groups: Sequence[Drawn]) -> Lengths:
    samples, longest = config.algorithm.group_size, config.generation.max_response_tokens
    if options.response_tokens is None:
        return RecordedLengths(groups, samples, options.seed)
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
        options.prompt_tokens or 0,
        0.5 if options.prompt_share is None else options.prompt_share,
        options.seed,
    )
