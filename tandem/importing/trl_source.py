"""What a launch script, a YAML file or a Python script of TRL sets, without running it."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.counterparts import listed
from tandem.errors import UserError
from tandem.files import ROW_ENDINGS
from tandem.importing.on_import import first_act
from tandem.importing.outcome import ForeignConfig, read_yaml, unknown, yaml_keys
from tandem.importing.python_names import names_of, options_read
from tandem.importing.shell import Command, flags_of, launched, no_script, read_text, why_nothing

METHODS = {
    "online_dpo": "online_dpo", "sft": "sft", "dpo": "dpo", "grpo": "grpo", "gspo": "grpo", "rloo": "rloo",
    "reward": "reward", "kto": "kto", "orpo": "orpo", "ppo": "ppo",
}  # fmt: skip
"""How the name of a script or class begins -> the trainer that it runs."""


def read(
    path: Path, method: str | None = None, arguments: Sequence[str] = (), command: int | None = None
) -> ForeignConfig:
    """Of a `.py`, `.yaml` or any other file, which is taken for a shell script. Raises UserError.

    Args:
        method: Which trainer reads a YAML file, which does not say it itself, or a script of another name.
        arguments: Those of a shell script.
        command: Which of its trainings, from 1, where a shell script starts several.
    """
    if path.suffix in (".yaml", ".yml"):
        no_script(path, arguments, command)
        return ForeignConfig(method or _method_of_keys(read_yaml(path), path), read_yaml(path))
    text = read_text(path)
    if path.suffix == ".py":
        no_script(path, arguments, None)
        module = _module(text, path)
        called = "\n".join(_strings(module))
        found = _of_python(module, path, method, {}) or _of_commands(called, path, method, (), command)
    else:
        found = _of_commands(text, path, method, arguments, command)
    if found is None:
        raise UserError(
            f"{path}: no trainer of TRL is started in it; give a script with `trl grpo …` or `accelerate launch "
            "…/grpo.py …`, the YAML file of --config, or a Python script that makes a GRPOConfig (or another one), "
            "or a GRPOTrainer without args" + ("" if path.suffix == ".py" else why_nothing(path, text, arguments))
        )
    return found


def _method_of_keys(values: Iterable[str], path: Path) -> str:
    told = {"num_generations": "grpo", "max_completion_length": "grpo", "loss_type": "dpo", "packing": "sft"}
    found = {told[key] for key in values if key in told}
    if len(found) != 1:
        raise UserError(f"{path}: it does not say which trainer reads it; give --trainer {'|'.join(_names())}")
    return found.pop()


def _names() -> list[str]:
    return sorted(set(METHODS.values()) - {"online_dpo"})


def _method_of_name(name: str) -> str | None:
    return next((method for start, method in METHODS.items() if name.lower().startswith(start)), None)


def _of_commands(
    text: str, path: Path, method: str | None, arguments: Sequence[str], command: int | None
) -> ForeignConfig | None:
    """The command that starts a trainer."""

    def is_trainer(words: Sequence[str]) -> bool:
        name = _started(words)[1]
        of_trl = name is not None and (method or _method_of_name(name)) is not None
        return of_trl or _of_own_script(words, path, method, []) is not None

    launch = launched(path, text, is_trainer, arguments, command)
    if launch is None:
        launch = launched(path, text, lambda words: _started(words)[1] is not None, arguments, 1)
    if launch is None:
        return None
    notes = list[str]()
    if own := _of_own_script(launch.command.words, path, method, notes):
        values = launch.values(lambda command: _flags_of_own_script(command.words, path, method))
        return ForeignConfig(own.method, values, [*launch.notes, *notes])
    found = _started(launch.command.words)[1] or ""
    chosen = method or _method_of_name(found)
    if chosen is None:
        raise UserError(
            f"{path}: {found} is no trainer that has a counterpart here; those that have one: "
            f"{', '.join(_names())}. If it runs one of them under another name, give --trainer"
        )
    return ForeignConfig(chosen, launch.values(lambda command: _flags(command, path)), launch.notes)


def _of_own_script(words: Sequence[str], path: Path, method: str | None, notes: list[str]) -> ForeignConfig | None:
    """What a Python script of the user's own makes of the arguments that a launch script at `path` gives it.

    None where the command starts something else, or a script that takes the arguments of TRL.
    """
    place, name = _started(words)
    beside = (folder / words[place] for folder in (path.parent, Path.cwd()))
    file = next((file for file in beside if file.is_file()), None) if name and words[place].endswith(".py") else None
    if file is None:
        return None
    try:
        module = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    long = [re.sub("^-(?=[A-Za-z]$)", "--", word) for word in words[place + 1 :]]
    found = _of_python(module, file, method, flags_of(long))
    if found is not None:
        notes += found.notes
    return found


def _flags_of_own_script(words: Sequence[str], path: Path, method: str | None) -> dict[str, Any]:
    found = _of_own_script(words, path, method, [])
    return _of_launcher(words) | (found.values if found else {})


def _of_launcher(words: Sequence[str]) -> dict[str, Any]:
    given = flags_of(words[: _started(words)[0]])
    return {f"launcher.{key}": value for key, value in given.items() if key != "config_file"}


def _flags(command: Command, path: Path) -> dict[str, Any]:
    flags = flags_of(command.words[_started(command.words)[0] + 1 :])
    return _of_launcher(command.words) | _with_its_file(flags, command, path)


def _started(words: Sequence[str]) -> tuple[int, str | None]:
    """Where the trainer's arguments begin, and its name: `trl NAME`, `-m trl.scripts.NAME`, or the script NAME.py."""
    for place, word in enumerate(words):
        if word.startswith("trl.scripts.") and words[place - 1] == "-m":
            return place, word.rpartition(".")[2]
        if word == "trl" and place + 1 < len(words):
            name = words[place + 1]
            return place + 1, None if name in ("vllm-serve", "env", "chat", "skills") else name
        if word.endswith(".py") and any(
            launcher in words[:place] for launcher in ("launch", "python", "python3", "torchrun")
        ):
            return place, Path(word).stem
    return 0, None


def _with_its_file(flags: dict[str, Any], command: Command, path: Path) -> dict[str, Any]:
    """`--config FILE` holds what the flags do not say; the script has written it, or it is beside the script, or in the
    folder of the command."""
    file = flags.pop("config", None)
    if file is None:
        return flags
    there, beside = command.folder / str(file), path.parent / str(file)
    if there in command.written:
        return yaml_keys(command.written[there], there) | flags
    return read_yaml(beside if beside.exists() else there) | flags


def _module(text: str, path: Path) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{path}: line {error.lineno}: it is no Python: {error.msg}") from None


def _strings(module: ast.Module) -> Iterator[str]:
    """What stands in a script as text of its own: how it is to be called."""
    for node in module.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def _of_python(module: ast.Module, path: Path, method: str | None, flags: Mapping[str, Any]) -> ForeignConfig | None:
    """The arguments of `GRPOConfig(…)`, `GRPOTrainer(…)`, `LoraConfig(…)` and `load_dataset(…)` in a script.

    None where nothing says what the trainer's configuration holds: it is parsed from a command line, for one.

    Args:
        flags: What the command line gives the script's argument parser.
    """
    names = names_of(module, flags)
    functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    values, loaded = dict[str, Any](), list[ast.Call]()
    configured: str | None = None
    with_defaults: str | None = None
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).rpartition(".")[2]
        found = _method_of_name(name)
        given = {part.arg: _value(part.value, names) for part in call.keywords if part.arg}
        if name.endswith("Config") and found and (given or not call.keywords):
            configured = found
            values |= given
        elif name.endswith("Trainer") and found:
            arguments = {part.arg: part.value for part in call.keywords}
            arguments |= dict(zip(_FIRST[found], call.args, strict=False))
            if None not in arguments and _value(arguments.get("args", _NONE), names) is None:
                with_defaults = found
            values |= _of_trainer(arguments, names)
        elif name == "LoraConfig":
            values |= {"use_peft": True} | {_LORA.get(key, key): value for key, value in given.items()}
        elif name == "load_dataset" and call.args:
            loaded.append(call)
    if loaded and "dataset_name" not in values and (rows := _rows(loaded[-1], names)):
        values |= {"dataset_name": rows.name} | ({"data_files": rows.files} if rows.files is not None else {})
    if configured is None and with_defaults is None:
        return None
    read = options_read(module)
    values |= {f"--{name}": value for name, value in flags.items() if name not in read}
    source = ForeignConfig(method or configured or with_defaults or "", values)
    if "reward_funcs" in values:
        values["reward_funcs"] = _rewards(values["reward_funcs"], functions, path, module, source.notes)
    return source


_NONE = ast.Constant(None)
_FIRST: Mapping[str, Sequence[str]] = {
    "sft": ("model", "args"), "reward": ("model", "args"), "orpo": ("model", "args"), "ppo": ("args",),
    "dpo": ("model", "ref_model", "args"), "kto": ("model", "ref_model", "args"),
    "grpo": ("model", "reward_funcs", "args"), "rloo": ("model", "reward_funcs", "args"), "online_dpo": ("model",),
}  # fmt: skip
"""Trainer -> its arguments that may stand without a name, as far as they tell something here."""
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}


def _of_trainer(arguments: Mapping[str | None, ast.expr], names: dict[str, ast.expr]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(model := _value(arguments.get("model", _NONE), names), str):
        found["model_name_or_path"] = model
    if (rewards := _value(arguments.get("reward_funcs", _NONE), names)) is not None:
        found["reward_funcs"] = [str(reward).strip("⟨⟩") for reward in listed(rewards)]
    trained = _rows(arguments.get("train_dataset", _NONE), names)
    if trained:
        told = zip(_DATA, (trained.name, trained.configuration, trained.split, trained.files), strict=True)
        found |= {key: value for key, value in told if value is not None}
    held_out = arguments.get("eval_dataset", _NONE)
    of_split = _rows(held_out, names)
    if trained and of_split and trained._replace(split=of_split.split) == of_split and of_split.split is not None:
        found["dataset_test_split"] = of_split.split
    elif of_split and own_files(of_split):
        found["eval_data_files"] = own_files(of_split)
    elif _value(held_out, names) is not None:
        found["eval_dataset"] = unknown(ast.unparse(held_out))
    return found


_DATA = ("dataset_name", "dataset_config", "dataset_train_split", "data_files")


class DatasetSource(NamedTuple):
    """What `load_dataset` is asked for, or an entry of `datasets` in a YAML file."""

    name: Any
    configuration: Any
    split: Any
    files: Any
    """`data_files`: one, several, or those of each split by its name."""


def own_files(rows: DatasetSource) -> list[str]:
    """The files of `load_dataset("json", data_files=…)` that can be read here as they are; else none."""
    by_split: Any = rows.files if isinstance(rows.files, dict) else {"train": rows.files}
    split = rows.split or "train"
    files = listed(by_split.get(split)) if isinstance(split, str) else []
    local = (isinstance(file, str) and re.fullmatch(r"[^⟨⟩*?:]+", file) is not None for file in files)
    readable = all(local) and all(file.lower().endswith(ROW_ENDINGS) for file in files)
    return files if rows.name in ("json", "parquet") and readable else []


def _rows(node: ast.expr, names: dict[str, ast.expr]) -> DatasetSource | None:
    """Those of `load_dataset(…)`, `rows["train"]` or `rows.map(…)`; None: of something else."""
    match node:
        case ast.Name(id=name) if name in names:
            return _rows(names[name], {key: value for key, value in names.items() if key != name})
        case ast.Subscript(value=rows, slice=ast.Constant(value=str() as split)):
            return found._replace(split=split) if (found := _rows(rows, names)) else None
        case ast.Call(func=ast.Attribute(value=rows, attr="map" | "filter" | "shuffle" | "select")):
            return _rows(rows, names)
        case ast.Call(args=[first, *more]) if ast.unparse(node.func).endswith("load_dataset"):
            given = {"name": more[0] if more else _NONE} | {part.arg: part.value for part in node.keywords}
            asked = (given.get(key, _NONE) for key in ("name", "split", "data_files"))
            return DatasetSource(_value(first, names), *(_value(node, names) for node in asked))
        case _:
            return None


def _rewards(named: list[str], functions: set[str], path: Path, module: ast.Module, notes: list[str]) -> list[str]:
    """Functions of the script itself as `script.py:name`, unless an import of the script would do its work."""
    own = [name for name in named if name in functions]
    act = first_act(module)
    if not own or act is None:
        return [f"{path}:{name}" if name in own else _imported(name, path, module) for name in named]
    theirs = ", ".join(own)
    notes.append(
        f"reward.functions: {theirs} of {path}: to import the file runs its line {act.lineno}, "
        f"{ast.unparse(act.func)}(…); move {theirs} into a file of its own, or put all that is not a definition below "
        f'`if __name__ == "__main__":`; then write that file in the place of REWARDS.py'
    )
    return named


def _imported(name: str, path: Path, module: ast.Module) -> str:
    """A function that the script imports, as `file.py:name` where it is from a file beside it, else `package.name`."""
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.level < 2:
            theirs = next((one.name for one in node.names if name == (one.asname or one.name)), None)
            file = path.parent / f"{node.module.replace('.', '/')}.py"
            if theirs is not None:
                return f"{file}:{theirs}" if file.is_file() else f"{node.module}.{theirs}"
    return name


def _value(node: ast.expr, names: dict[str, ast.expr]) -> Any:
    """What is written there; `⟨its text⟩` where only a run would tell."""
    match node:
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple():
            return [_value(element, names) for element in node.elts]
        case ast.Dict():
            keys = [key.value if isinstance(key, ast.Constant) else "" for key in node.keys]
            return {str(key): _value(value, names) for key, value in zip(keys, node.values, strict=True)}
        case ast.Name() | ast.Attribute(value=ast.Name()) if ast.unparse(node) in names:
            return _value(names[ast.unparse(node)], {})
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[first, *_]):
            return _value(first, names)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return name
        case _:
            return unknown(ast.unparse(node))
