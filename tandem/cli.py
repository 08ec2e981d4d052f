"""The command line. Heavy imports happen inside the commands: `--help` answers at once."""

import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperGroup

from tandem import __version__
from tandem.config.load import config_of, refuse, split_arguments
from tandem.config.tree import (
    DpoConfig,
    EvalConfig,
    ModelsConfig,
    RewardModelConfig,
    ServeConfig,
    SftConfig,
    TrainConfig,
)
from tandem.errors import TandemError, UserError, with_notes
from tandem.files import make_room_for
from tandem.importing.command import import_app
from tandem.planning.command import KINDS, Job, job_of, plan
from tandem.signals import StopReason
from tandem.simulation.command import simulate

if TYPE_CHECKING:
    from tandem.tracking.console import Startup

Config = TypeVar("Config", bound=ModelsConfig)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
reward_app = typer.Typer(no_args_is_help=True, help="Try reward functions.")
app.add_typer(reward_app, name="reward")
app.add_typer(import_app, name="import")
search_app = typer.Typer(no_args_is_help=True, help="Search in passages: an index, and a server of it.")
app.add_typer(search_app, name="search")


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
app.add_typer(data_app, name="data")
ConfigAndOverrides = Annotated[
    list[str] | None, typer.Argument(help="CONFIG.yaml, then any number of section.key=value", show_default=False)
]
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
        print(f"tandem {__version__}")
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
    config = _configure(TrainConfig, arguments, resume)
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
    config = _configure(SftConfig, arguments, resume)
    with _loading():
        from tandem.data.sft import SftDataset
        from tandem.jobs.sft import train as run

    _run(config, SftDataset, run, dry_run)


@app.command()
def dpo(arguments: ConfigAndOverrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Direct preference optimization and its kin, on pairs of answers or, KTO, on answers that are good or bad."""
    config = _configure(DpoConfig, arguments, resume)
    with _loading():
        from tandem.data.preference import dataset_of
        from tandem.jobs.preference import train_dpo

    _run(config, dataset_of(config), train_dpo, dry_run)


@app.command(name="reward-model")
def reward_model(arguments: ConfigAndOverrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """A model of which of two answers is better, trained on pairs of answers."""
    config = _configure(RewardModelConfig, arguments, resume)
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
    """Score a model (model.path) on data.val_files and data.val_sets, as generation.eval and the sets say."""
    make_room_for({"--out": out, "--answers": answers})
    config = _configure(EvalConfig, arguments, writes_run=False)
    with _loading():
        from tandem.data.dataset import RLHFDataset
        from tandem.evaluation.summary import lines, pair_lines
        from tandem.files import write_text
        from tandem.jobs.evaluation import evaluate_model

    print(f"model: {config.model.path}", file=sys.stderr, flush=True)
    found = evaluate_model(config, _read(config, RLHFDataset), answers, against)
    for name, value in found.metrics.items():
        print(f"{name} {value:.4f}")
    for line in (*lines(found.data), *pair_lines(found.against, str(against))):
        print(line)
    if out is not None:
        compared = {"against": {"answers": str(against), "data": found.against}} if against else {}
        write_text(out, json.dumps({**found.metrics, "data": found.data, **compared}, indent=1) + "\n")


@app.command()
def check(arguments: ConfigAndOverrides = None) -> None:
    """Do engine, trainer and tokenizer agree? A few prompts, a large one, three at learning rate 0; verdicts."""
    config = _configure(TrainConfig, arguments, writes_run=False)
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

    print(table(find_runs(directory), directory))


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
) -> None:
    """An OpenAI-compatible endpoint. Its token is TANDEM_API_KEY, else a new one that is printed."""
    given = [_naming("model.path", model), f"model.dtype={dtype}", f"generation.type={engine}"]
    config = config_of(ServeConfig, [*given, *(overrides or [])])
    from tandem.jobs.preflight.models import find_directory_mistakes

    refuse("command line", list(find_directory_mistakes(config)))
    try:
        from tandem.serving.server import reserve
        from tandem.serving.sessions import Sessions
    except ModuleNotFoundError as error:
        raise UserError(f"tandem serve needs {error.name}: pip install -e '.[serve]' in a clone of Tandem") from None
    with closing(reserve(host, port)) as reserved:  # before the model is loaded, which takes its time
        token = _token()
        from tandem.jobs.serve import run

        sessions = Sessions(session_limit) if capture else None
        stopped_by = run(config, reserved, token, name or model.absolute().name, calls, sessions)
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


@data_app.command()
def show(
    arguments: ConfigAndOverrides = None,
    row: Annotated[int, typer.Option(help="Counted from 1, through all files.", min=1)] = 1,
    split: Annotated[Literal["train", "val"], typer.Option(help="data.train_files or data.val_files.")] = "train",
    job: Annotated[
        Job | None, typer.Option(help="The command that the configuration is for.", show_default="by its keys")
    ] = None,
) -> None:
    """What the model will read of a row: text, where tokens end, and which of them are learned."""
    path, _ = split_arguments(arguments)
    job = job or (job_of(path) if path is not None else "train")
    config: Any = _configure(KINDS[job], arguments, writes_run=False)
    from rich.console import Console

    from tandem.jobs.show import dataset_for, show_row

    console = Console(highlight=False, soft_wrap=True)
    for line in show_row(config, dataset_for(config), split, row):
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
        for what, count in write_episodes(out, prompt, rows, val_rows).items():
            print(f"{what} {count}")
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
    for what, count in convert(to_rows, source, out, published=not columns).items():
        print(f"{what} {count}")


@reward_app.command("test")
def reward_test(
    function: Annotated[str, typer.Argument(help="FILE.py:FUNCTION or MODULE:FUNCTION; or built-in, by data_source.")],
    data: Annotated[Path, typer.Option(help="Rows with a ground truth and a right answer (extra_info.answer).")],
    rows: Annotated[int, typer.Option(help="How many, spread over the file.", min=1)] = 100,
    argument: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the function, repeatable.")] = None,
    pass_above: Annotated[float, typer.Option(help="An answer passes with acc, or a reward, above this.")] = 0.5,
    timeout_s: Annotated[float, typer.Option(help="For one call.")] = 30.0,
) -> None:
    """Run a reward on right, wrong, changed and adversarial answers, and report what it gets wrong."""
    from tandem.config import yaml12
    from tandem.config.tree import RewardConfig
    from tandem.data.answered import read_answered
    from tandem.reward.bench import examine, report
    from tandem.reward.functions import check_functions

    given = {name: yaml12.read(value) for name, _, value in (pair.partition("=") for pair in argument or [])}
    functions = [] if function == "built-in" else [{"function": function, "arguments": given}]
    config = RewardConfig.model_validate({"functions": functions, "timeout_s": timeout_s})
    prompts, answers = read_answered(data, rows)
    check_functions(config, {prompt.data_source for prompt in prompts}, {str(data): prompts})
    print(report(examine(config, prompts, answers, pass_above)))


@search_app.command("index")
def search_index(
    corpus: Annotated[Path, typer.Argument(help="Rows {id, title, text}: a parquet or JSON-lines file.")],
    out: Annotated[Path, typer.Argument(help="The index: a directory that is not there yet.")],
    dense: Annotated[
        Path | None, typer.Option(help="By vectors of this sentence-embedding model's directory, not by words.")
    ] = None,
    query_prefix: Annotated[str, typer.Option(help="With --dense: what goes before each query.")] = "",
    passage_prefix: Annotated[str, typer.Option(help="With --dense: what goes before each passage.")] = "",
) -> None:
    """Index passages for search by words (BM25), or by vectors."""
    if dense is None and (query_prefix or passage_prefix):
        raise UserError("--query-prefix and --passage-prefix are for --dense; words are compared as they are")
    from tandem.jobs.search import make_index
    from tandem.search.vectors import Embedding

    embedding = Embedding(str(dense.absolute()), query_prefix, passage_prefix) if dense else None
    print(f"passages {make_index(corpus, out, embedding)}")


@search_app.command("serve")
def search_serve(
    index: Annotated[Path, typer.Argument(help="What tandem search index has made.")],
    stdio: Annotated[bool, typer.Option("--stdio", help="MCP over standard input and output, without HTTP.")] = False,
    host: Annotated[str, typer.Option(help="Loopback unless you say otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 8001,
) -> None:
    """Search as an MCP server, and over plain HTTP. Its token is TANDEM_API_KEY, else a new one that is printed."""
    try:
        from tandem.serving import search as needed  # noqa: F401
        from tandem.serving.server import reserve
    except ModuleNotFoundError as error:
        extras = "pip install -e '.[agents,search,serve]' in a clone of Tandem"
        raise UserError(f"tandem search serve needs {error.name}: {extras}") from None
    from tandem.jobs.search import serve_over_http, serve_over_stdio

    if stdio:
        serve_over_stdio(index)
        return
    with closing(reserve(host, port)) as reserved:
        serve_over_http(index, reserved, _token())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 a failure inside, 2 the user's mistake.

    130 and 143: a run that Ctrl-C or SIGTERM stopped, and that `--resume` continues.
    """
    _silence_transformers()
    try:
        typer.main.get_command(app).main(None if arguments is None else list(arguments), prog_name="tandem")
    except TandemError as error:
        print(f"tandem: {with_notes(error)}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except SystemExit as ending:
        if isinstance(ending.code, str):  # sys.exit("a reason"), in a user's own code
            print(ending.code, file=sys.stderr)
            return 1
        return ending.code or 0
    return 0


def _configure(
    kind: type[Config], arguments: Sequence[str] | None, resumed: str | None = None, *, writes_run: bool = True
) -> Config:
    """The configuration of the command line: CONFIG and overrides; a resumed run brings its own CONFIG.

    Raises UserError with every mistake that can be found before torch is imported.
    """
    from tandem.jobs.preflight import load_checked

    path, given = split_arguments(arguments)
    if resumed is not None and "://" in resumed:
        resumed, given = _fetch(resumed, given, kind)
    if resumed is not None:
        resume = Path(resumed)
        if path is None and not (resume / "config.yaml").exists():
            raise UserError(f"--resume {resume}: there is no run (no config.yaml); to start one give its CONFIG, too")
        path = path or resume / "config.yaml"
        if any(override.startswith("trainer.run_dir=") for override in given):
            raise UserError(f"--resume {resume} says which run it is; leave trainer.run_dir=… out")
        given += [_naming("trainer.run_dir", resume), "trainer.resume=true"]
    if path is None:
        raise UserError("no configuration given; write tandem COMMAND CONFIG.yaml [section.key=value …]")
    config = load_checked(kind, path, given, claims_run_dir=writes_run)
    print(f"{path}: no mistakes so far; loading torch and transformers", file=sys.stderr, flush=True)  # for seconds
    return config


def _fetch(url: str, given: Sequence[str], kind: Any) -> tuple[str, list[str]]:
    """Fetch the run at a URL into its directory: that of the overrides, or else the one that it had. Returns the
    directory, and the other overrides."""
    from tandem.checkpoint.remote import RemoteCheckpoints
    from tandem.checkpoint.run_dir import refuse_to_fetch_into
    from tandem.config import yaml12

    remote = RemoteCheckpoints(url)
    own = [override.partition("=")[2] for override in given if override.startswith("trainer.run_dir=")]
    text = remote.config()
    described: Any = yaml12.read(text)
    run_dir = yaml12.read(own[-1]) if own else described["trainer"]["run_dir"]
    path = Path(str(run_dir)).expanduser()
    refuse_to_fetch_into(path, kind, text)
    remote.fetch(path)
    return str(run_dir), [override for override in given if not override.startswith("trainer.run_dir=")]


def _naming(key: str, path: Path) -> str:
    """The override that sets a key to a path, whatever YAML takes its name for: 17, say, is a number."""
    return f"{key}={json.dumps(str(path), ensure_ascii=False)}"


def _read(config: Any, dataset: Callable[..., Any]) -> Any:
    from tandem.jobs.inputs import read_inputs
    from tandem.tracking.console import Startup

    with Startup("reading data"):
        return read_inputs(config, dataset)


def _loading() -> "Startup":
    """Around imports that take seconds."""
    from tandem.tracking.console import Startup

    return Startup("loading torch and transformers")


def _token() -> str:
    """Of a server: TANDEM_API_KEY, else a new one, which is printed."""
    token = os.environ.get("TANDEM_API_KEY")
    if not token:
        token = secrets.token_urlsafe(24)
        print(f"token: {token}", flush=True)
    return token


def _silence_transformers() -> None:
    """Its progress bars and load reports would bury ours, the workers' above all. It reads this when it is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _run(config: Any, dataset: Callable[..., Any], run: Callable[..., StopReason | None], dry_run: bool) -> None:
    from tandem.jobs.notes import notes
    from tandem.jobs.run import claim_run_dir

    inputs = _read(config, dataset)
    for read in filter(None, (inputs.train, inputs.val)):
        print(read.description)
    for note in notes(config, len(inputs.train)):
        print(f"note: {note}")
    if dry_run:
        print("dry run: nothing is wrong with this, and nothing was started")
        return
    run_dir = config.trainer.run_dir
    with claim_run_dir(config):
        try:
            stopped_by = run(config, inputs)
        except KeyboardInterrupt:
            print(
                f"stopped at once, without a checkpoint; --resume {run_dir} goes on from the last one, if there is any"
            )
            raise typer.Exit(128 + Signals.SIGINT) from None
    if stopped_by is not None:
        print(f"stopped; continue with --resume {run_dir}")
        assert isinstance(stopped_by, Signals), "commands have no callbacks"
        raise typer.Exit(128 + stopped_by)  # as shells have it
    print(f"done: {run_dir}")
