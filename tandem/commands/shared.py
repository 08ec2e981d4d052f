"""What commands share: configurations from the command line, and a server's token."""

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tandem.errors import UserError

if TYPE_CHECKING:
    from tandem.config.tree import ModelsConfig

Config = TypeVar("Config", bound="ModelsConfig")

ConfigAndOverrides = Annotated[
    list[str] | None, typer.Argument(help="CONFIG.yaml, then any number of section.key=value", show_default=False)
]

MaxConnections = Annotated[int, typer.Option(help="Open at once; others wait.", min=1)]
ClientTimeout = Annotated[
    float, typer.Option(help="Seconds that a client may keep the server waiting, for each thing it is to do.", min=0.1)
]
MaxBodyMib = Annotated[float, typer.Option(help="The longest body of a request, in MiB.", min=0.001)]


def configure(
    kind: type[Config], arguments: Sequence[str] | None, resumed: str | None = None, *, writes_run: bool = True
) -> Config:
    """The configuration of the command line: CONFIG and overrides; a resumed run brings its own CONFIG.

    Raises UserError with every mistake that can be found before torch is imported.
    """
    from tandem.config.load import split_arguments
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
        given += [naming("trainer.run_dir", resume), "trainer.resume=true"]
    if path is None:
        raise UserError("no configuration given; write tandem COMMAND CONFIG.yaml [section.key=value …]")
    try:
        config = load_checked(kind, path, given, claims_run_dir=writes_run)
    except UserError as error:
        raise UserError(f"{error}{meant_command(kind, path, given)}") from None
    print(f"{path}: no mistakes so far; loading torch and transformers", file=sys.stderr, flush=True)  # for seconds
    return config


def meant_command(kind: "type[ModelsConfig]", path: Path, overrides: Sequence[str]) -> str:
    """A line that names the command whose configuration this seems to be, where it is none of `kind`."""
    from tandem.commands.job_of_config import job_of
    from tandem.config.tree import RewardModelConfig, SftConfig, TrainConfig

    trains_on_rows, job = issubclass(kind, SftConfig), job_of(path, overrides)
    if trains_on_rows and "algorithm" in _sections(path):
        meant = "tandem train"
    elif job == "dpo" and kind in (TrainConfig, SftConfig, RewardModelConfig):
        meant = "tandem dpo"
    elif job == "sft" and kind is TrainConfig:
        meant = "tandem sft or tandem reward-model"
    elif job == "reward-model" and kind in (TrainConfig, SftConfig):
        meant = "tandem reward-model or tandem dpo: its rows are pairs"
    else:
        return ""
    return f"\n{path} looks like a configuration of {meant}"


def of_run(arguments: Sequence[str] | None) -> list[str]:
    """The arguments of `tandem eval` with CONFIG and `model.path` in the place of the directory of a run that answers
    prompts. Raises UserError for any other directory."""
    from tandem.config.load import split_arguments

    path, given = split_arguments(arguments)
    if path is None or not path.is_dir():
        return list(arguments or [])
    asked = f"tandem eval CONFIG.yaml {naming('model.path', path)}"
    if (path / "config.yaml").is_file():
        sections = _sections(path / "config.yaml")
        if not sections or "algorithm" in sections:
            return [str(path / "config.yaml"), naming("model.path", path), *given]
        raise UserError(f"{path}: a run whose rows are no prompts with rewards; say what to ask its model: {asked}")
    if (path / "config.json").is_file():
        raise UserError(f"{path}: a model; say what to ask it: {asked}")
    raise UserError(f"{path}: neither a run (config.yaml) nor a model (config.json); give CONFIG.yaml, or one of these")


def _sections(config: Path) -> Mapping[str, Any]:
    """Those of the file; none of what is no configuration, as loading it tells."""
    from tandem.stored import DamagedFile, read_yaml

    try:
        return read_yaml(config, dict[str, Any])
    except DamagedFile:
        return {}


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


def naming(key: str, path: Path) -> str:
    """The override that sets a key to a path, whatever YAML takes its name for: 17, say, is a number."""
    return f"{key}={json.dumps(str(path), ensure_ascii=False)}"


def token() -> str:
    """Of a server: TANDEM_API_KEY, else a new one, which is printed."""
    token = os.environ.get("TANDEM_API_KEY")
    if not token:
        token = secrets.token_urlsafe(24)
        print(f"token: {token}", flush=True)
    return token
