"""The command line. Heavy imports happen inside the commands: `--help` answers at once."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import tandem
from tandem.commands.data import data_app
from tandem.commands.plan import plan
from tandem.commands.reward import reward_app
from tandem.commands.search import search_app
from tandem.commands.shared import (
    ClientTimeout,
    ConfigAndOverrides,
    MaxBodyMib,
    MaxConnections,
    configure,
    naming,
    of_run,
    token,
)
from tandem.errors import TandemError, UserError, for_terminal, with_notes
from tandem.files import make_room_for
from tandem.importing.command import import_app
from tandem.output import messages_may_end, output_may_end, silence
from tandem.serving.limits import USUAL, ServerLimits
from tandem.signals import StopReason
from tandem.simulation.command import simulate

if TYPE_CHECKING:
    from tandem.tracking.console import Startup

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(data_app, name="data")
app.add_typer(reward_app, name="reward")
app.add_typer(import_app, name="import")
app.add_typer(search_app, name="search")


_MISUSE = cast(type[Exception], typer.BadParameter.__bases__[0])
"""UsageError: of arguments that no command takes. Its module is another in other versions of typer."""
Resume = Annotated[
    str | None,
    typer.Option(help="Continue the run in this directory, or the one that has its checkpoints at this URL."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check configuration, data and rewards, then stop.")]


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Reinforcement-learning post-training for language models."""
    if show:
        print(f"tandem {tandem.__version__}")
        raise typer.Exit


@app.command()
def train(
    arguments: ConfigAndOverrides = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    debug_rollout: Annotated[
        bool, typer.Option("--debug-rollout", help="Generate, score and save trajectories; no training.")
    ] = False,
    debug_train: Annotated[
        Path | None, typer.Option(help="Train on saved trajectories, a file or a folder; no generation.")
    ] = None,
) -> None:
    """Reinforcement learning: PPO, GRPO and their kin."""
    if debug_rollout and debug_train:
        raise UserError("--debug-rollout and --debug-train are two halves of a run; give one of them")
    config = configure(tandem.TrainConfig, arguments, resume)
    with _loading():
        from tandem.data.dataset import RLHFDataset
        from tandem.jobs import debug, rl

    run = rl.train
    if debug_rollout:
        run = debug.debug_rollout
    elif debug_train:
        run = partial(debug.debug_train, saved=debug_train)
    _run(config, RLHFDataset, run, dry_run)


@app.command()
def sft(arguments: ConfigAndOverrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Supervised fine-tuning on demonstrations."""
    config = configure(tandem.SftConfig, arguments, resume)
    with _loading():
        from tandem.data.sft import SftDataset
        from tandem.jobs.sft import train as run

    _run(config, SftDataset, run, dry_run)


@app.command()
def dpo(arguments: ConfigAndOverrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Direct preference optimization and its kin, on pairs of answers or, KTO, on answers that are good or bad."""
    config = configure(tandem.DpoConfig, arguments, resume)
    with _loading():
        from tandem.data.preference import dataset_of
        from tandem.jobs.preference import train_dpo

    _run(config, dataset_of(config), train_dpo, dry_run)


@app.command(name="reward-model")
def reward_model(arguments: ConfigAndOverrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """A model of which of two answers is better, trained on pairs of answers."""
    config = configure(tandem.RewardModelConfig, arguments, resume)
    with _loading():
        from tandem.data.preference import PreferenceDataset
        from tandem.jobs.preference import train_reward_model

    _run(config, PreferenceDataset, train_reward_model, dry_run)


@app.command(name="eval")
def evaluate(
    arguments: ConfigAndOverrides = None,
    out: Annotated[Path | None, typer.Option(help="Write the metrics to this JSON file.")] = None,
    answers: Annotated[Path | None, typer.Option(help="Write the answers to this parquet file.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare with the answers that --answers of another evaluation wrote.")
    ] = None,
) -> None:
    """Score a model (model.path) on data.val_files and data.val_sets, as generation.eval and the sets say.

    A run's directory in the place of CONFIG.yaml: its newest model, on its own validation rows.
    """
    if answers is not None and answers.suffix != ".parquet":
        raise UserError(f"--answers {answers}: what is written is parquet; say {answers.with_suffix('.parquet')}")
    make_room_for({"--out": out, "--answers": answers})
    if against is not None and not against.is_file():
        raise UserError(f"--against {against}: no such file; another evaluation writes it with --answers {against}")
    config = configure(tandem.EvalConfig, of_run(arguments), writes_run=False)
    with _loading():
        from tandem.data.dataset import RLHFDataset
        from tandem.evaluation.summary import lines, pair_lines
        from tandem.evaluation.summary_table import table
        from tandem.files import write_text
        from tandem.jobs.evaluation import evaluate_model
        from tandem.jobs.inputs import rows_of

    print(f"model: {config.model.path}", file=sys.stderr, flush=True)
    inputs = _read(config, RLHFDataset)
    for line in rows_of(config, inputs):
        print(for_terminal(line), file=sys.stderr, flush=True)
    found = evaluate_model(config, inputs, answers, against)
    for name, value in found.metrics.items():
        print(f"{name} {value:.4f}")
    for line in (*lines(found.data), *pair_lines(found.against, str(against), found.lacking)):
        print(line)
    if len(found.data) > 1:
        print(*table(found.data, found.against), sep="\n")
    if out is not None:
        compared = {"against": {"answers": str(against), "data": found.against}} if against else {}
        write_text(out, json.dumps({**found.metrics, "data": found.data, **compared}, indent=1) + "\n")


@app.command()
def check(arguments: ConfigAndOverrides = None) -> None:
    """Do engine, trainer and tokenizer agree? A few prompts, a large one, three at learning rate 0; verdicts."""
    config = configure(tandem.TrainConfig, arguments, writes_run=False)
    from tandem.data.dataset import RLHFDataset
    from tandem.jobs.check import check as run

    failed = 0
    for verdict in run(config, _read(config, RLHFDataset)):
        print(f"{'pass' if verdict.passed else 'FAIL'}  {verdict.check:<34} {verdict.found}", flush=True)
        if not verdict.passed:
            print(f"      likely cause: {verdict.cause}", flush=True)
            failed += 1
    if failed:
        raise typer.Exit(1)


app.command()(plan)
app.command()(simulate)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run directory; the run may have ended in any way.")]) -> None:
    """Write RUN/report.html anew: curves and sample trajectories, as far as the run has come."""
    from tandem.tracking.report import write_report

    print(write_report(run))


@app.command()
def runs(directory: Annotated[Path, typer.Argument(help="Where runs are, or a run.")] = Path("runs")) -> None:
    """The runs below a directory: running, finished, stopped, failed or killed; their step, and the best reached."""
    from tandem.jobs.runs import find_runs, table

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(table(find_runs(directory), directory, columns))


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="A Hugging Face model directory, or a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Any number of model.KEY=VALUE and generation.KEY=VALUE, as in a configuration.", show_default=False
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="native, vllm or sglang: generation.type.")] = "native",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16: model.dtype.")] = "float32",
    host: Annotated[str, typer.Option(help="Loopback unless you say otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model.", show_default="its directory's name")
    ] = None,
    calls: Annotated[
        str, typer.Option(help="How the model writes calls of tools: auto, or as conversation.calls.")
    ] = "auto",
    capture: Annotated[
        bool, typer.Option("--capture", help="Record agents' exact tokens, a key a session: POST /sessions.")
    ] = False,
    session_limit: Annotated[
        float, typer.Option(help="Seconds after which a session is closed that nobody ends.", min=1)
    ] = 3600,
    max_samples: Annotated[
        int, typer.Option(help="The most samples that one request may ask for: its prompts times n.", min=1)
    ] = USUAL.samples,
    max_connections: MaxConnections = USUAL.connections,
    client_timeout: ClientTimeout = USUAL.client_timeout_s,
    max_body_mib: MaxBodyMib = USUAL.body_mib,
) -> None:
    """An OpenAI-compatible endpoint. Its token is TANDEM_API_KEY, else a new one that is printed."""
    given = [naming("model.path", model), f"model.dtype={dtype}", f"generation.type={engine}"]
    from tandem.config.load import config_of, refuse
    from tandem.config.tree import ServeConfig
    from tandem.jobs.preflight.models import find_directory_mistakes

    config = config_of(ServeConfig, [*given, *(overrides or [])])
    refuse("command line", list(find_directory_mistakes(config)))
    try:
        from tandem.serving.server import reserve
        from tandem.serving.sessions import Sessions
    except ModuleNotFoundError as error:
        raise UserError(f"tandem serve needs {error.name}: pip install -e '.[serve]' in a clone of Tandem") from None
    with closing(reserve(host, port)) as reserved:  # before the model is loaded, which takes its time
        secret = token()
        print(f"{model}: loading torch and the model", file=sys.stderr, flush=True)  # for seconds
        from tandem.jobs.serve import run

        sessions = Sessions(session_limit) if capture else None
        limits = ServerLimits(max_connections, client_timeout, max_body_mib, max_samples)
        stopped_by = run(config, reserved, secret, name or model.absolute().name, calls, sessions, limits)
    print("stopped" if stopped_by is None else "stopped before there was anything to serve")
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)  # as shells have it


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME of a model on the Hub; made where it is not there.")],
    step: Annotated[str, typer.Option(help="Of the checkpoint: latest, best, or a number.")] = "latest",
    private: Annotated[bool, typer.Option("--private", help="Where it is made, make it private.")] = False,
    revision: Annotated[str | None, typer.Option(help="A branch, made where it is not there.")] = None,
) -> None:
    """Upload a run's model to the Hub, with a card that says how it was made."""
    from tandem.jobs.push import push as upload

    print(f"uploaded: {upload(run, repo, step, private, revision)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 a failure inside, 2 the user's mistake.

    129, 130 and 143: a run that SIGHUP, Ctrl-C or SIGTERM stopped, and that `--resume` continues.
    """
    _silence_transformers()
    with messages_may_end():
        try:
            return _written(_status_of(arguments))
        except OSError:
            if _written(0) == 0:  # it was no failure of standard output
                raise
            return 1


def _written(status: int) -> int:
    """The exit status, 1 where what is printed cannot be written, which is told unless whoever reads it has gone."""
    try:
        sys.stdout.flush()
    except OSError as error:
        silence(sys.stdout)
        if error.errno != errno.EPIPE:
            print(f"tandem: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _status_of(arguments: Sequence[str] | None) -> int:
    try:
        given = None if arguments is None else list(arguments)
        status = typer.main.get_command(app).main(given, prog_name="tandem", standalone_mode=False)
    except TandemError as error:
        print(f"tandem: {with_notes(error)}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except SystemExit as ending:
        if isinstance(ending.code, str):  # sys.exit("a reason"), in a user's own code
            print(ending.code, file=sys.stderr)
            return 1
        return ending.code or 0
    except _MISUSE as error:
        if message := _of_misuse(error):
            print(f"tandem: {for_terminal(message)}", file=sys.stderr)
        return 2
    return status or 0  # what typer.Exit says; commands themselves return nothing


def _of_misuse(error: Any) -> str:
    """What typer says of arguments, with the value where it leaves that out. Nothing where it has shown the help."""
    from pydantic import ValidationError

    message, cause = error.format_message().strip(), error.__cause__
    if not message:
        return ""
    if isinstance(cause, ValidationError):
        (item, *_) = cause.errors()
        message = message.replace(": Value error, ", ": ").replace(": Input ", ": input ")
        message += "" if item["type"] == "value_error" else f", not {item['input']!r}"
    command = error.ctx.command_path if error.ctx else "tandem"
    return f"{message[0].lower()}{message[1:].removesuffix('.')}; see {command} --help"


def _read(config: Any, dataset: Callable[..., Any]) -> Any:
    from tandem.jobs.inputs import read_inputs
    from tandem.tracking.console import Startup

    with Startup("reading data"):
        return read_inputs(config, dataset)


def _loading() -> "Startup":
    """Around imports that take seconds."""
    from tandem.tracking.console import Startup

    return Startup("loading torch and transformers")


def _silence_transformers() -> None:
    """Its progress bars and load reports would bury ours, the workers' above all. It reads this when it is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@output_may_end()
def _run(config: Any, dataset: Callable[..., Any], run: Callable[..., StopReason | None], dry_run: bool) -> None:
    from tandem.jobs.inputs import rows_of
    from tandem.jobs.notes import disk_line, endless_note, notes, tokenizer_notes
    from tandem.jobs.run import claim_run_dir

    inputs = _read(config, dataset)
    for line in chain(rows_of(config, inputs), disk_line(config)):
        print(for_terminal(line))
    told = (notes(config, len(inputs.train)), tokenizer_notes(config, inputs.tokenizer), endless_note(config, inputs))
    for note in chain.from_iterable(told):
        print(f"note: {note}")
    if dry_run:
        print("dry run: nothing is wrong with this, and nothing was started")
        return
    run_dir = config.trainer.run_dir
    try:
        with claim_run_dir(config):
            stopped_by = run(config, inputs)
    except KeyboardInterrupt:
        print(f"stopped at once, without a checkpoint; --resume {run_dir} goes on from the last one, if there is any")
        raise typer.Exit(128 + Signals.SIGINT) from None
    if stopped_by is not None:
        print(f"stopped; continue with --resume {run_dir}")
        assert isinstance(stopped_by, Signals), "commands have no callbacks"
        raise typer.Exit(128 + stopped_by)  # as shells have it
    print(f"done: {run_dir}")
