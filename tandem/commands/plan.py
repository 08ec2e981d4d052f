"""The command `tandem plan`: its options, and what they ask for."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.config.job import Job


def plan(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="CONFIG.yaml, then any number of section.key=value", show_default=False)
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="8xH100, or 2x8xH100 for two nodes. --search uses all; memory is of the configuration's processes.",
            show_default="8xH100, or as many as the configuration has processes",
        ),
    ] = None,
    job: Annotated[
        Job | None, typer.Option(help="The command that the configuration is for.", show_default="by its keys")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run the real engine on fake tensors instead of formulas: a minute or more.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="How long a step takes, by stage, and which placement is the fastest.")
    ] = False,
    response_tokens: Annotated[
        float | None, typer.Option(help="With --search: of an answer, on average. Default: half of the longest.", min=1)
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="With --search: a run directory, whose measured stages scale the predicted ones."),
    ] = None,
) -> None:
    """Memory of every role and phase against a GPU's, and what to change where it does not fit. Needs no GPU.

    Of models the config.json is enough. Exit status 2: it does not fit.
    """
    from tandem.planning.command import print_plan

    if not print_plan(arguments, gpus, job, trace, search, response_tokens, calibrate):
        raise typer.Exit(2)
