"""What a launch script or a YAML file of verl sets, and which of its programs reads it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.config.counterparts import parsed
from tandem.errors import UserError
from tandem.importing.outcome import ForeignConfig, read_yaml
from tandem.importing.shell import flags_of, launched, no_script, read_text, why_nothing
from tandem.importing.verl_methods import METHODS

_PROGRAMS: Mapping[str, str] = {
    "main_ppo": "ppo", "main_ppo_sync": "ppo", "main_dapo": "ppo",
    "one_step_off_policy.main_ppo": "one_step_off", "one_step_off_policy.async_main_ppo": "one_step_off",
    "fully_async_policy.fully_async_main": "fully_async",
    "fsdp_sft_trainer": "sft", "sft_trainer": "sft", "sft_trainer_ray": "sft",
}  # fmt: skip
"""How the module of a program ends -> what it does."""
_OTHERS = ("vla.main_ppo",)
"""Ends of modules that are not what their last name says."""
_FLAG = re.compile(r"\+{0,2}[A-Za-z_][\w.@/-]*=")
_OWN_DEFAULTS = re.compile(
    r"(ppo|ppo_megatron|sft|fully_async_ppo|one_step_off_ppo|fully_async_ppo_megatron|dapo)\w*_trainer\w*"
)


def read(
    path: Path, method: str | None = None, arguments: Sequence[str] = (), command: int | None = None
) -> ForeignConfig:
    """The keys of a script (`.sh`, or anything else) or of a YAML file, flat. Raises UserError.

    Args:
        method: What a program does that is none of verl's own.
        arguments: Those of the script.
        command: Which of its trainings, from 1, where it starts several.
    """
    if path.suffix in (".yaml", ".yml"):
        no_script(path, arguments, command)
        values = read_yaml(path)
        of_rows = not any(key.startswith("actor_rollout_ref.") for key in values)
        return ForeignConfig(
            method or ("sft" if of_rows and any(key.startswith("optim.") for key in values) else "ppo"), values
        )
    text = read_text(path)
    launch = launched(path, text, lambda words: method_of(words, method) is not None, arguments, command)
    if launch is None:
        other = launched(path, text, lambda words: program_of(words) is not None and bool(_flags(words)), arguments, 1)
        if other is None:
            raise UserError(
                f"{path}: no program of verl is started in it; give its launch script or YAML file"
                + why_nothing(path, text, arguments)
            )
        raise UserError(
            f"{path}: {program_of(other.command.words)} has no counterpart here; these programs of verl have one: "
            f"{', '.join(_PROGRAMS)}. If it runs one of them under another name, give --trainer {'|'.join(METHODS)}"
        )
    given = launch.values(lambda command: _flags(command.words))
    values, notes = _with_its_file(given, launch.command.folder)
    return ForeignConfig(method_of(launch.command.words, method) or "", values, [*launch.notes, *notes])


def program_of(words: Sequence[str]) -> str | None:
    """The module that is run, whether as `-m MODULE` or as a file; None: something else is started."""
    for place, word in enumerate(words):
        if word.startswith("-m") and not word.startswith("--") and place + 1 < len(words):
            return words[place + 1]
        if word.endswith(".py"):
            return word.removesuffix(".py").replace("/", ".").strip(".")
    return None


def method_of(words: Sequence[str], given: str | None = None) -> str | None:
    """What the program does, or `given` where it is none of verl's but gets keys like one; None: it is another one."""
    program = program_of(words)
    if program is None:
        return None
    ends = [end for end in (*_PROGRAMS, *_OTHERS) if program == end or program.endswith(f".{end}")]
    if not ends:
        return given if _flags(words) else None
    return _PROGRAMS.get(max(ends, key=len))


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """`key.of.theirs` -> its value, of the words after the program."""
    start = next((place for place, word in enumerate(words) if word.startswith("-m") or word.endswith(".py")), 0)
    launcher = {name.replace("-", "_"): value for name, value in flags_of(words[:start]).items()}
    found = {f"torchrun.{name}": launcher[name] for name in ("nnodes", "nproc_per_node") if name in launcher}
    for place, word in enumerate(words[start + 1 :], start + 1):
        if _FLAG.match(word):
            key, _, value = word.partition("=")
            found[key.lstrip("+")] = parsed(value)
        elif named := re.fullmatch(r"(--config-(?:path|name))(?:=(.*))?", word):
            found[named[1]] = named[2] if named[2] is not None else "".join(words[place + 1 : place + 2])
    return found


def _with_its_file(given: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """With the keys of a configuration of the user's own, which `--config-path` and `--config-name` name."""
    name, place = (str(given.pop(key, "")).strip("'\"") for key in ("--config-name", "--config-path"))
    stem = name.removesuffix(".yaml")
    if "megatron" in stem:
        given.setdefault("actor_rollout_ref.actor.strategy", "megatron")
    if not stem or _OWN_DEFAULTS.fullmatch(stem):
        return given, []
    file = folder / place / f"{stem}.yaml"
    if not file.is_file():
        return given, [f"--config-name {name}: {file} is not there, so what it sets is missing here"]
    defaults = {key: value for key, value in read_yaml(file).items() if key.split(".")[0] not in ("defaults", "hydra")}
    return defaults | given, []
