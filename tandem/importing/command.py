"""The commands `tandem import …`: configurations of other frameworks, as ours."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.errors import UserError
from tandem.files import make_room_for, write_text
from tandem.importing.verl_methods import METHODS

if TYPE_CHECKING:
    from tandem.importing.outcome import Imported

import_app = typer.Typer(no_args_is_help=True, help="Configurations of other frameworks, as ours.")
ImportedInto = Annotated[Path, typer.Option("--out", help="The configuration: a YAML file that is not there yet.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Those of the script, as it would be started; first `--`.")]
Command = Annotated[int | None, typer.Option(help="Which of the trainings that a script starts, from 1.")]


@import_app.command("verl")
def import_verl(
    source: Annotated[Path, typer.Argument(help="A launch script of a trainer of verl, or its configuration, .yaml.")],
    out: ImportedInto,
    arguments: Arguments = None,
    command: Command = None,
    trainer: Annotated[
        str | None, typer.Option(help=f"What a program does that is none of verl's: {', '.join(METHODS)}.")
    ] = None,
) -> None:
    """Write a configuration from verl's, and say what became of each of its keys. No program is started."""
    from tandem.importing import verl, verl_source

    _refuse_to_overwrite(out)
    if trainer is not None and trainer not in METHODS:
        raise UserError(f"--trainer {trainer}: there are {', '.join(METHODS)}")
    found = verl_source.read(source, trainer, arguments or [], command)
    _import(verl.convert(found), "verl", source, out, verl.COMMANDS[found.method])


@import_app.command("trl")
def import_trl(
    source: Annotated[Path, typer.Argument(help="A launch or Python script of TRL, or the YAML file of its --config.")],
    out: ImportedInto,
    arguments: Arguments = None,
    command: Command = None,
    trainer: Annotated[
        str | None, typer.Option(help="Whose arguments they are, where the file does not say it: sft, dpo, grpo, …")
    ] = None,
) -> None:
    """Write a configuration from TRL's, and say what became of each of its arguments. No program is started."""
    from tandem.importing import trl, trl_source

    _refuse_to_overwrite(out)
    if trainer is not None and trainer not in trl.COMMANDS:
        raise UserError(f"--trainer {trainer}: has no counterpart here; these have one: {', '.join(trl.COMMANDS)}")
    found = trl_source.read(source, trainer, arguments or [], command)
    _import(trl.convert(found), "trl", source, out, trl.COMMANDS[found.method])


@import_app.command("openrlhf")
def import_openrlhf(
    source: Annotated[Path, typer.Argument(help="A script that starts openrlhf.cli.train_….")],
    out: ImportedInto,
    arguments: Arguments = None,
    command: Command = None,
) -> None:
    """Write a configuration from OpenRLHF's, and say what became of each of its arguments. No program is started."""
    from tandem.importing import openrlhf

    _refuse_to_overwrite(out)
    found = openrlhf.read(source, arguments or [], command)
    _import(openrlhf.convert(found), "openrlhf", source, out, openrlhf.COMMANDS[found.method])


def _refuse_to_overwrite(out: Path) -> None:
    if out.exists():
        raise UserError(f"--out {out}: it is there already; give another file")
    make_room_for({"--out": out})


def _import(made: "Imported", framework: str, source: Path, out: Path, command: str) -> None:
    from tandem.importing.outcome import report, written

    print("\n".join(report(made)))
    write_text(out, written(made, framework, source.name))
    print(f"written: {out}; try it: tandem {command} {out} --dry-run")
