"""The commands `tandem data …`: data sets to parquet, and what a model reads of a row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from tandem.commands.shared import ConfigAndOverrides, configure, meant_command
from tandem.config.job import Job
from tandem.errors import UserError


class DataSetNames(TyperGroup):
    """`tandem data NAME` is `tandem data convert NAME`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["convert", *args])


data_app = typer.Typer(
    no_args_is_help=True,
    cls=DataSetNames,
    context_settings={"ignore_unknown_options": True},  # those of convert
    help="Data sets to parquet; what a model reads of a row.",
)


@data_app.command()
def show(
    arguments: ConfigAndOverrides = None,
    row: Annotated[int | None, typer.Option(help="Counted from 1, through all files.", min=1, show_default="1")] = None,
    prompt_index: Annotated[
        int | None, typer.Option(help="The data row of a run: counted from 0, without rows that are left out.", min=0)
    ] = None,
    split: Annotated[Literal["train", "val"], typer.Option(help="data.train_files or data.val_files.")] = "train",
    job: Annotated[
        Job | None, typer.Option(help="The command that the configuration is for.", show_default="by its keys and rows")
    ] = None,
) -> None:
    """What the model will read of a row: text, where tokens end, and which of them are learned."""
    if row is not None and prompt_index is not None:
        raise UserError("--row and --prompt-index both say which row; give one of them")
    from tandem.commands.job_of_config import job_of
    from tandem.config.load import split_arguments
    from tandem.planning.planned_jobs import KINDS

    path, overrides = split_arguments(arguments)
    job = job or (job_of(path, overrides) if path is not None else "train")
    others_may_be_bad = ["data.on_bad_row=skip"] if path is not None else []
    config: Any = configure(KINDS[job], [*(arguments or []), *others_may_be_bad], writes_run=False)
    from rich.console import Console

    from tandem.jobs.show import dataset_for, show_row

    console = Console(highlight=False, soft_wrap=True)
    row = 1 if row is None and prompt_index is None else row
    try:
        lines = show_row(config, dataset_for(config), split, row, prompt_index)
    except UserError as error:
        raise UserError(f"{error}{meant_command(KINDS[job], path, overrides) if path else ''}") from None
    for line in lines:
        console.print(line)


@data_app.command("convert", help="Also without the word: tandem data gsm8k --in FILE --out DIR.")
def convert_data(
    name: Annotated[str, typer.Argument(help="A data set of docs/data.md, such as gsm8k; columns; or episodes.")],
    out: Annotated[Path, typer.Option(help="Where the parquet files go.")],
    source: Annotated[
        Path | None, typer.Option("--in", help="The published files: a folder or one file.", show_default=False)
    ] = None,
    map: Annotated[list[str] | None, typer.Option(help="For columns: NEW=OLD or NEW='{OLD} …', repeatable.")] = None,
    rows: Annotated[int | None, typer.Option(help="For episodes: how many to train on.", min=1)] = None,
    val_rows: Annotated[int, typer.Option(help="For episodes: how many to validate on.", min=0)] = 0,
    prompt: Annotated[
        str, typer.Option(help="For episodes: what the policy is told before the first observation.")
    ] = "Answer what follows.",
) -> None:
    """Turn a data set's published files, or columns of your own, into parquet; or number an environment's episodes."""
    if (name == "episodes") != (rows is not None):
        raise UserError("tandem data episodes takes --rows N; the data sets and columns take none")
    if rows is not None:
        from tandem.data.preprocess.episodes import write_episodes

        if source is not None or map:
            raise UserError("tandem data episodes makes its rows from nothing; leave --in and --map out")
        _tell(write_episodes(out, prompt, rows, val_rows), out)
        return
    if source is None:
        raise UserError(f"tandem data {name}: say with --in where the files are")
    from tandem.data.preprocess import CONVERTERS
    from tandem.data.preprocess.convert import convert, mapping

    if name not in (*CONVERTERS, "columns"):
        raise UserError(f"tandem data {name}: unknown data set; known are {', '.join(CONVERTERS)}, columns, episodes")
    if (name == "columns") != bool(map) or not all("=" in pair for pair in map or []):
        raise UserError("tandem data columns takes --map NEW=OLD, once or more; the data sets take none")
    columns = dict(pair.split("=", 1) for pair in map or [])
    to_rows = mapping(columns) if columns else CONVERTERS[name]
    _tell(convert(to_rows, source, out, published=not columns), out)


def _tell(counts: Mapping[str, int], out: Path) -> None:
    """Rows by what became of them, and where a run finds them."""
    for what, count in counts.items():
        print(f"{what} {count}")
    written = [out / f"{what}.parquet" for what in counts if (out / f"{what}.parquet").is_file()]
    keys = {"train": "data.train_files", "val": "data.val_files", "test": "data.val_files"}
    for path in written:
        print(f"{keys[path.stem]}: [{path}]" if path.stem in keys else str(path))
