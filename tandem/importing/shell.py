"""What a launch script starts: a shell runs it in the sandbox, where the programs it starts write down their words.

So the words are a shell's own: branches, loops, functions, arrays, defaults and arithmetic are what they are. What the
script takes from elsewhere is unknown here: answers of programs, and variables and arguments that nobody gave. It runs
several times, each time with others of these; what changes with them is marked, never guessed.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from os import environ
from pathlib import Path
from typing import Any

from tandem.config.counterparts import parsed
from tandem.errors import UserError
from tandem.importing.outcome import UNKNOWN, unknown
from tandem.sandbox.base import Limits
from tandem.sandbox.local import LocalSandbox

_SPACE = "\u00a0"
"""Between the words of a mark, at which no shell splits it; it becomes a space again."""
_SECONDS = 10.0
"""For one run of a script, which in here has nothing to wait for."""
_START_S = 30.0
"""For the sandbox to come up and to end it, however busy the machine is."""
_TOOLS = (
    "awk", "base64", "basename", "bash", "bc", "cat", "comm", "cp", "cut", "date", "dirname", "env", "expr", "false",
    "find", "fold", "grep", "egrep", "head", "jq", "join", "ln", "ls", "md5sum", "mkdir", "mktemp", "mv", "nohup", "od",
    "paste", "printf", "pwd", "readlink", "realpath", "rev", "rm", "rmdir", "sed", "seq", "sha256sum", "shuf", "sort",
    "split", "stat", "tac", "tail", "tee", "test", "timeout", "touch", "tr", "true", "uniq", "wc", "xargs", "yes",
)  # fmt: skip
"""Programs that run: they work on text, files and dates."""
_STAND_INS = (
    "accelerate", "conda", "deepspeed", "docker", "git", "hostname", "huggingface-cli", "hf", "id", "llamafactory-cli",
    "mpirun", "nproc", "numactl", "nvidia-smi", "pip", "poetry", "pytest", "python", "python3", "python3.10",
    "python3.11", "python3.12", "ray", "srun", "swift", "taskset", "torchrun", "trl", "uname", "uv", "wandb", "whoami",
)  # fmt: skip
"""Those that others start, too (`nohup python3 …`); of all others, a shell finds that they are not there."""
_BESIDE = (".sh", ".bash", ".env", ".yaml", ".yml", ".json", ".jinja", ".txt", ".toml", ".cfg", ".conf", ".py")
"""Endings of files that a script may read, source or start."""
_LARGEST, _MOST = 256 << 10, 1000
_IMPORTED = re.compile(r"\bimport ([A-Za-z_]\w*)")
_NAME = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_ASSIGNED = re.compile(
    r"(?:^|[\s;(&|{])([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=|\bfor\s+([A-Za-z_]\w*)|\bread\b[^\n;|]*?\s([A-Za-z_]\w*)"
)
_WITH_DEFAULT = re.compile(r"\$\{!?([A-Za-z_]\w*)(?:\[[^]]*\])?:?[-=+]")
_OF_A_SHELL = re.compile(
    r"BASH\w*|COLUMNS|DIRSTACK|EPOCH\w+|EUID|FUNCNAME|GROUPS|HOME|HOSTTYPE|IFS|LANG|LC_\w+|LD_\w+|LINENO|LINES|MACHTYPE|"
    r"OLDPWD|OPTARG|OPTIND|OSTYPE|PATH|PIPESTATUS|PPID|PS\d|PWD|RANDOM|REPLY|SECONDS|SHELL|SHLVL|SRANDOM|TANDEM_\w+|UID|_"
)
_COMPLAINT = re.compile(
    r"line \d+: .*(?:No such file|not found|syntax error|unexpected|unbound variable|bad substitution)"
)
_POSITION = re.compile(r"\$(?:\{?([1-9])|\{?[@*#])")
_WORD = re.compile(r"[A-Za-z_]\w*")
_ARITHMETIC = re.compile(r"\(\((.*?)\)\)", re.DOTALL)
_NUMBERS = ("7", "24")
"""What programs, variables and arguments say in runs that calculate with it."""
_CALCULATES = re.compile(r"\(\(|\$\[|\b(?:expr|let|seq|bc|awk)\b")
_SIGNS = str.maketrans("（）＇＂＄；＆｜＜＞｀", "()'\"$;&|<>`")
_SECRET = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD)")
"""Variables whose values no file should have."""


@dataclass(frozen=True)
class Command:
    """A program that a script starts, with its arguments."""

    words: list[str]
    folder: Path
    """Where it is started."""
    written: Mapping[Path, str]
    """Texts of the files that the script itself has written and the program is given, by absolute paths."""


@dataclass(frozen=True)
class Launch:
    """A command of a script."""

    command: Command
    others: list[Command]
    """The same one where programs, variables and arguments say otherwise."""
    notes: list[str]

    def values(self, read: Callable[[Command], dict[str, Any]]) -> dict[str, Any]:
        """What `read` makes of the command, with what is not known here marked."""
        found, others = read(self.command), [read(command) for command in self.others]
        for key in {key for values in (found, *others) for key in values}:
            texts = [values.get(key) for values in (found, *others)]
            if any(text != texts[0] for text in texts):
                told = next((text for text in texts if isinstance(text, str) and UNKNOWN.search(text)), None)
                apart = dict.fromkeys("nothing" if text is None else str(text) for text in texts)
                found[key] = told or unknown(" or ".join(apart))
        return found


def launched(
    path: Path,
    text: str,
    is_trainer: Callable[[Sequence[str]], bool],
    arguments: Sequence[str] = (),
    command: int | None = None,
) -> Launch | None:
    """The one command of a script for which `is_trainer` holds; None where there is none.

    Args:
        text: The script, which is at `path`.
        arguments: Those of the script, `$1` and so on.
        command: Which one, from 1, where it starts several.

    Raises:
        UserError: there are several, the script does not come to an end, or this machine has no sandbox.
    """
    runs = _run(path, text, arguments)
    of_each = [[command for command in _commands(run) if is_trainer(command.words)] for run in runs]
    first = next((place for place, starts in enumerate(of_each) if starts), None)
    if first is None:
        said = [line for run in runs for line in run["errors"].splitlines()]
        if refused := next((line for line in said if "syntax error" in line or "EOF" in line), None):
            raise UserError(f"{path}: a shell refuses it: {refused}")
        if any(run["status"] is None for run in runs):
            raise UserError(f"{path}: run without its programs, it does not come to an end within {_SECONDS:g} s")
        return None
    starts = of_each[first]
    words = [start.words for start in starts]
    if command is None and any(other != words[0] for other in words):
        raise UserError(f"{path}: it starts {len(words)} trainings; give --command 1 to {len(words)}\n" + _apart(words))
    if command is not None and not 1 <= command <= len(words):
        raise UserError(f"{path}: --command {command}: it starts {len(words)}")
    place = (command or 1) - 1
    others = [
        same for found in of_each if found and found is not starts and (same := _same(place, starts, found)) is not None
    ]
    notes = list(_notes(path, runs[first], is_trainer, [len(found) for found in of_each]))
    return Launch(starts[place], others, notes)


def _commands(run: Mapping[str, Any]) -> Iterator[Command]:
    """Those of a run, in the order of their starts."""
    written = {Path(path): _as_said(text) for path, text in run["written"].items()}
    for _, folder, *words in run["starts"]:
        yield Command([*map(_as_said, words)], Path(folder), written)


def _as_said(text: str) -> str:
    """Marks with the signs that a stand-in wrote otherwise, for shells that read what it says."""
    return UNKNOWN.sub(lambda mark: mark[0].translate(_SIGNS), text)


def _same(place: int, starts: Sequence[Command], found: Sequence[Command]) -> Command | None:
    """The command of another run that is `starts[place]` there; None where that run does not come so far."""
    if len(found) == len(starts):
        return found[place]
    likest = max(found, key=lambda other: _likeness(starts[place], other))
    of_it = [_likeness(start, likest) for start in starts]
    return likest if of_it[place] == max(of_it) else None


def why_nothing(path: Path, text: str, arguments: Sequence[str]) -> str:
    """What may be the reason that a script starts no training: what its shell said, and what nobody gave."""
    first = _run(path, text, arguments)[0]
    said = [line for line in first["errors"].splitlines() if not line.startswith("+")][-1:]
    found = "".join(f"; a shell said: {line}" for line in said)
    found += f"; it ended with status {first['status']}" if first["status"] else ""
    read = _with_what_it_names(text, _files_beside(path.resolve()))
    missing = sorted(_not_given(read) - environ.keys())
    if missing:
        found += (
            f"; nobody gave {', '.join(missing)}, which may stand before the command ({missing[0]}=… tandem import)"
        )
    if not arguments and _POSITION.search(text):
        found += "; it reads arguments, which follow the script"
    return found


def _run(path: Path, text: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Runs in which programs succeed and say nothing; say who they are, or a number, as do variables that nobody gave;
    and fail. Arguments that nobody gave are there in runs of their own, for a script may end where it has none, or
    where it does not know them."""
    if not shutil.which("bwrap"):
        raise UserError(
            f"{path}: a launch script runs in the sandbox, where its programs are not; bubblewrap (`bwrap`) is not "
            "installed: run scripts/sandbox, or give the configuration itself as YAML"
        )
    script, folder = path.resolve(), Path.cwd()
    files = _files_beside(script)
    read = _with_what_it_names(text, files)
    known = {
        name: environ[name] for name in set(_WORD.findall(read)) & environ.keys() if not _OF_A_SHELL.fullmatch(name)
    }
    known |= {name: unknown(name) for name in known if _SECRET.fullmatch(name)}
    missing, calculated = _not_given(read) - known.keys(), _calculated(read)
    positions = 0 if arguments else max((int(number) for number in _POSITION.findall(text) if number), default=0)
    runs: list[dict[str, Any]] = [{"variables": known, "arguments": list(arguments), "says": "", "status": 0}]
    for says in (_SPACE, *(_NUMBERS if _CALCULATES.search(read) else ())):
        told = {name: says if says in _NUMBERS else unknown(name) for name in missing}
        told |= {name: _NUMBERS[0] for name in missing & calculated if says == _SPACE}
        dummies = [says if says in _NUMBERS else unknown(f"argument{_SPACE}{place + 1}") for place in range(positions)]
        for words in ([*arguments], dummies) if dummies else ([*arguments],):
            runs.append({"variables": known | told, "arguments": words, "says": says, "status": 0})
    runs.append(runs[0] | {"status": 1})
    given: dict[str, Any] = {
        "script": str(script), "folder": str(folder), "now": int(time.time()), "seconds": _SECONDS,
        "modules": [name for name in set(_IMPORTED.findall(text)) if find_spec(name)],
        "files": files | {str(script): text}, "stand_ins": _STAND_INS,
    }  # fmt: skip
    return list(_answers(path, given, runs))


def _answers(path: Path, given: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each run, in a container of its own; after two that did not come to an end there are no more."""
    tools = {tool: Path(found) for tool in _TOOLS if (found := shutil.which(tool))}
    limits = Limits(timeout_s=_SECONDS + _START_S, memory_mib=2048, processes=128)
    program = Path(__file__).with_name("script_run.py").read_text(encoding="utf-8")
    sandbox, endless = LocalSandbox(limits, packages=tools, writable_root=True), 0
    for how in runs:
        ran = sandbox.run(program, stdin=json.dumps({**given, "how": how}))
        if ran.exit_code:
            raise UserError(f"{path}: the sandbox did not run it: {ran.stopped or ran.stderr.strip()[-500:]}")
        answer: dict[str, Any] = json.loads(ran.stdout)
        answer["starts"] = [[_outside(word) for word in start] for start in answer["starts"]]
        answer["written"] = {_outside(file): _outside(text) for file, text in answer["written"].items()}
        answer["errors"] = _outside(answer["errors"])
        yield answer
        endless += answer["status"] is None
        if endless == 2:
            return


def _outside(word: str) -> str:
    """A word, where the script's home is `~`."""
    return word.replace("/tmp/home", "~").replace(_SPACE, " ")


def _likeness(one: Command, other: Command) -> int:
    """How many words two commands have in common."""
    return len(set(one.words).intersection(other.words))


def _with_what_it_names(text: str, files: Mapping[str, str]) -> str:
    """A script with the files beside it whose names stand in it, or in one of those: it may source or start them."""
    left, found = dict(files), [text]
    for part in found:
        for path in [path for path in left if Path(path).name in part]:
            found.append(left.pop(path))
    return "\n".join(found)


def _not_given(text: str) -> set[str]:
    """Variables that a script reads, and neither sets nor has a default for."""
    read = {*_NAME.findall(text), *_calculated(text)}
    assigned = {name for names in _ASSIGNED.findall(text) for name in names if name}
    return {name for name in read - assigned - set(_WITH_DEFAULT.findall(text)) if not _OF_A_SHELL.fullmatch(name)}


def _calculated(text: str) -> set[str]:
    """Variables with which a script calculates, where a mark would be an error."""
    return {name for part in _ARITHMETIC.findall(text) for name in _WORD.findall(part)}


def _files_beside(script: Path) -> dict[str, str]:
    """Small texts in the script's folder and in those above it up to its repository's, which it may read."""
    found: dict[str, str] = {}
    for folder in (script.parent, *script.parents[1:4]):
        for file in sorted(folder.glob("*")):
            with suppress(OSError):  # what may not be read is as what is not there, also to the script
                small = file.suffix in _BESIDE and file.is_file() and file.stat().st_size <= _LARGEST
                if small and len(found) < _MOST:
                    found[str(file)] = file.read_text(encoding="utf-8", errors="replace")
        if (folder / ".git").exists():
            break
    return found


def _apart(commands: Sequence[Sequence[str]]) -> str:
    """A line for each command, with the words that not all of them have."""
    common = set(commands[0]).intersection(*commands[1:])
    lines = (" ".join(word for word in words if word not in common) or "the same" for words in commands)
    return "\n".join(f"  {number}: {line[:150]}" for number, line in enumerate(lines, 1))


def _notes(
    path: Path, run: Mapping[str, Any], is_trainer: Callable[[Sequence[str]], bool], counts: Sequence[int]
) -> Iterator[str]:
    others = (start for start in run["starts"] if start[0] and not is_trainer(start[2:]))
    if asked := sorted({" ".join(start[2:])[:80] for start in others}):
        yield f"{path.name} reads what other programs say, which did not run: {'; '.join(asked)}"
    if len({count for count in counts if count}) > 1:
        yield f"how many trainings {path.name} starts depends on what other programs, variables and arguments say"
    for line in run["errors"].splitlines():
        if _COMPLAINT.search(line):
            yield f"its shell said: {line}"


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name value value`, `--name`, `--no_name`; what follows `-n` is not read."""
    found: dict[str, Any] = {}
    name, values = "", list[str]()
    for word in (*words, "--"):
        if not re.match(r"--(?:[A-Za-z]|$)|-[A-Za-z]$", word):
            values.append(word)
            continue
        if name:
            key, value = _flag(name, values)
            found[key] = value
        name, _, value = word[2:].partition("=")  # of `-n` nothing is left
        values = [value] if value else []
    return found


def _flag(name: str, values: Sequence[str]) -> tuple[str, Any]:
    name = name.replace("-", "_")
    given = [parsed(value.rstrip(",")) for value in values]
    if not given:
        return (name.removeprefix("no_"), False) if name.startswith("no_") else (name, True)
    return name, given[0] if len(given) == 1 else given


def no_script(path: Path, arguments: Sequence[str], command: int | None) -> None:
    """Raises UserError where something is said of a script that `path` is not."""
    if arguments or command is not None:
        raise UserError(f"{path}: it is no shell script, of which arguments and --command are")


def read_text(path: Path) -> str:
    """The whole file. Raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: it cannot be read: {error}") from None
