"""The command `tandem simulate`: its options, and what they ask for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.errors import UserError

if TYPE_CHECKING:
    from tandem.simulation.options import Options

Amount = float | None


def simulate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="CONFIG.yaml, unless --from; then any number of section.key=value", show_default=False),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--from", help="A run with trainer.max_staleness: 0: its speeds and lengths.", show_default=False),
    ] = None,
    staleness: Annotated[str, typer.Option(help="Values of trainer.max_staleness, with commas.")] = "0,1,2,4,8",
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each simulated run, 4 (k + 1) or more.", min=4, show_default="50, or as many"),
    ] = None,
    iteration_ms: Annotated[Amount, typer.Option(help="An engine's iteration: a token a row.", min=0)] = None,
    row_us: Annotated[Amount, typer.Option(help="An iteration's more time for each row.", min=0)] = None,
    context_ns: Annotated[Amount, typer.Option(help="The same for each token of context of any row.", min=0)] = None,
    prefill_us: Annotated[Amount, typer.Option(help="A token of a prompt, or of a context anew.", min=0)] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Samples at once in an engine of its own process.", min=1, show_default="256")
    ] = None,
    train_s: Annotated[Amount, typer.Option(help="Training, each step.", min=0)] = None,
    train_us_per_token: Annotated[Amount, typer.Option(help="More for each prompt and response token.", min=0)] = None,
    publish_s: Annotated[Amount, typer.Option(help="New weights to the engines.", min=0)] = None,
    pause_s: Annotated[Amount, typer.Option(help="Engines to sleep, and the same to wake them.", min=0)] = None,
    reward_s: Annotated[Amount, typer.Option(help="From a complete group to its scores.", min=0)] = None,
    controller_s: Annotated[Amount, typer.Option(help="Metrics and records, each step.", min=0)] = None,
    response_tokens: Annotated[Amount, typer.Option(help="Mean length of an answer.", min=1)] = None,
    response_sigma: Annotated[
        Amount, typer.Option(help="Of its logarithm: standard deviation.", min=0, max=10, show_default="0.7")
    ] = None,
    prompt_share: Annotated[
        Amount, typer.Option(help="Share of that variance that siblings share.", min=0, max=1, show_default="0.5")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a prompt.", min=0, show_default="those of --from, or 0")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the lengths.", min=0)] = 0,
) -> None:
    """How long steps would take at several trainer.max_staleness: the run's controller in virtual time."""
    from tandem.simulation.options import Options

    options = Options(
        run=run, iteration_ms=iteration_ms, row_us=row_us, context_ns=context_ns, prefill_us=prefill_us,
        max_running=max_running, train_s=train_s, train_us_per_token=train_us_per_token, publish_s=publish_s,
        pause_s=pause_s, reward_s=reward_s, controller_s=controller_s, response_tokens=response_tokens,
        response_sigma=response_sigma, prompt_share=prompt_share, prompt_tokens=prompt_tokens, seed=seed,
    )  # fmt: skip
    _print_simulations(options, arguments, staleness, steps)


def _print_simulations(options: "Options", arguments: list[str] | None, staleness: str, steps: int | None) -> None:
    """What the options ask for. Raises UserError for what is wrong with them."""
    from tandem.config.load import load_config, split_arguments
    from tandem.config.tree import TrainConfig
    from tandem.simulation.options import count_steps, load_for_each, read_staleness, setup_of
    from tandem.simulation.outcome_table import print_table

    path, overrides = split_arguments(arguments)
    if path is None and options.run is not None:
        path = options.run / "config.yaml"
    if path is None:
        raise UserError("no configuration given; write tandem simulate CONFIG.yaml [key=value …], or --from RUN")
    values = read_staleness(staleness)
    steps = count_steps(steps, values)
    config = load_config(TrainConfig, path, overrides)
    configs = load_for_each(values, path, overrides)
    setup = setup_of(options, config)
    print_table(configs, setup, steps)
