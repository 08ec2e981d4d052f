"""The commands `tandem reward …`: trying reward functions."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError

reward_app = typer.Typer(no_args_is_help=True, help="Try reward functions.")


@reward_app.command("test")
def reward_test(
    function: Annotated[str, typer.Argument(help="FILE.py:FUNCTION or MODULE:FUNCTION; or built-in, by data_source.")],
    data: Annotated[Path, typer.Option(help="Rows with a ground truth and a right answer (extra_info.answer).")],
    answer: Annotated[
        str | None,
        typer.Option(
            help="The column of right answers.", show_default="extra_info.answer, completion, solution, answer"
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="How many, spread over the file.", min=1)] = 100,
    argument: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the function, repeatable.")] = None,
    pass_above: Annotated[float, typer.Option(help="An answer passes with acc, or a reward, above this.")] = 0.5,
    timeout_s: Annotated[float, typer.Option(help="For one call.")] = 30.0,
) -> None:
    """Run a reward on right, wrong, changed and adversarial answers, and report what it gets wrong."""
    from tandem.config import yaml12
    from tandem.config.reward import RewardConfig
    from tandem.data.preprocess.recognised import command_for
    from tandem.data.reward_trial_rows import read_answered
    from tandem.reward.bench import examine, report
    from tandem.reward.functions import check_functions

    if ":" not in function and function != "built-in":
        raise UserError(
            f"reward test {function}: write FILE.py:FUNCTION or MODULE:FUNCTION; or built-in, for the reward that "
            "Tandem has for the data_source of the rows"
        )
    given = {name: yaml12.read(value) for name, _, value in (pair.partition("=") for pair in argument or [])}
    functions = [] if function == "built-in" else [{"function": function, "arguments": given}]
    config = RewardConfig.model_validate({"functions": functions, "timeout_s": timeout_s})
    prompts, answers = read_answered(data, rows, answer)
    unnamed = not functions and prompts[0].data_source == "default"
    if unnamed and (command := command_for(dict(prompts[0].row), data)):
        raise UserError(
            f"{data}: rows as they are published name no reward; test it on those that this makes: {command}"
        )
    check_functions(config, {prompt.data_source for prompt in prompts}, {str(data): prompts})
    print(report(examine(config, prompts, answers, pass_above)))
