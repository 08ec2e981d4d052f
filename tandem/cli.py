"""The command line. Heavy imports happen inside the commands: `--help` answers at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tandem import __version__
from tandem.config import SftConfig, TrainConfig, load_config
from tandem.errors import TandemError, UserError

if TYPE_CHECKING:
    from tandem.controller.run import Job

Config = TypeVar("Config", TrainConfig, SftConfig)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
ConfigAndOverrides = Annotated[
    list[str] | None, typer.Argument(help="CONFIG.yaml, then any number of section.key=value", show_default=False)
]
Resume = Annotated[Path | None, typer.Option(help="Continue the run in this directory.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check configuration, data and rewards, then stop.")]
STOPPED = 130
"""Exit status after Ctrl-C, as shells have it (128 + SIGINT)."""


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Reinforcement-learning post-training for language models."""
    if show:
        print(f"tandem {__version__}")
        raise typer.Exit


@app.command()
def train(arguments: ConfigAndOverrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Reinforcement learning: PPO, GRPO and their kin."""
    config = _configure(TrainConfig, arguments or [], resume)
    _quiet_transformers()
    from tandem.controller.inputs import read_inputs
    from tandem.controller.rl import RlJob
    from tandem.data.dataset import RLHFDataset

    _run(config, read_inputs(config, RLHFDataset), RlJob, dry_run)


@app.command()
def sft(arguments: ConfigAndOverrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Supervised fine-tuning on demonstrations."""
    config = _configure(SftConfig, arguments or [], resume)
    _quiet_transformers()
    from tandem.controller.inputs import read_inputs
    from tandem.controller.sft import SftJob
    from tandem.data.sft import SftDataset

    _run(config, read_inputs(config, SftDataset), SftJob, dry_run)


@app.command(name="eval")
def evaluate(
    arguments: ConfigAndOverrides = None,
    out: Annotated[Path | None, typer.Option(help="Write the metrics to this JSON file.")] = None,
) -> None:
    """Score a model directory (model.path) on data.val_files, answering as generation.eval says."""
    config = _configure(TrainConfig, arguments or [], None)
    _quiet_transformers()
    from tandem.controller.inputs import read_inputs
    from tandem.controller.rl import evaluate_model
    from tandem.data.dataset import RLHFDataset
    from tandem.files import write_text

    metrics = evaluate_model(config, read_inputs(config, RLHFDataset, training=False))
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")
    if out is not None:
        write_text(out, json.dumps(metrics, indent=1) + "\n")


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="The data set: gsm8k.")],
    source: Annotated[Path, typer.Option("--in", help="The published files: a folder or one file.")],
    out: Annotated[Path, typer.Option(help="Where the parquet files go.")],
) -> None:
    """Turn a data set's published files into parquet."""
    from tandem.data.preprocess import CONVERTERS

    if name not in CONVERTERS:
        raise UserError(f"tandem data {name}: unknown data set; known are {', '.join(sorted(CONVERTERS))}")
    for what, count in CONVERTERS[name](source, out).items():
        print(f"{what} {count}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 a failure inside, 2 the user's mistake, 130 stopped."""
    try:
        typer.main.get_command(app).main(None if arguments is None else list(arguments), prog_name="tandem")
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 0
    return 0


def _configure(kind: type[Config], arguments: Sequence[str], resume: Path | None) -> Config:
    """The configuration of the command line: CONFIG and overrides; a resumed run brings its own CONFIG."""
    given = bool(arguments) and "=" not in arguments[0]
    overrides = list(arguments[1:] if given else arguments)
    if resume is not None:
        from tandem.controller.run import resumable_config

        overrides += [f"trainer.run_dir={resume}", "trainer.resume=true"]
        return load_config(kind, Path(arguments[0]) if given else resumable_config(resume), overrides)
    if not given:
        raise UserError("no configuration given; write tandem COMMAND CONFIG.yaml [section.key=value …]")
    return load_config(kind, Path(arguments[0]), overrides)


def _run(config: Any, inputs: Any, make_job: Callable[..., Job], dry_run: bool) -> None:
    """Say what was read, claim the run directory, run."""
    for dataset in filter(None, (inputs.train, inputs.val)):
        print(dataset.description)
    if dry_run:
        return
    from tandem.controller.run import claim_run_dir, run_job

    claim_run_dir(config)
    run_dir = config.trainer.run_dir
    if not run_job(config, make_job(config, inputs)):
        print(f"stopped; continue with --resume {run_dir}")
        raise typer.Exit(STOPPED)
    print(f"done: {run_dir}/report.html, {run_dir}/checkpoints/latest")


def _quiet_transformers() -> None:
    """Its progress bars and load reports would bury ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


if __name__ == "__main__":
    sys.exit(main())
