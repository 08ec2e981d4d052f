"""Runs a launch script where nothing can happen: a program of the sandbox, of the standard library alone (`shell.py`).

A shell runs the script. Programs that work on text, files and dates run as well; in the place of all others stands one
that writes down the words it was started with. Each run gives these other answers, which shows what depends on them.
Folders, files to source and programs that the script names by a path, and that are not here, are made before it gets
there.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TOOLS = Path("/packages")
LARGEST, MOST = 64 << 10, 8
"""Bytes of a file that a script writes and a program of it reads, and how many of them are looked at."""
HOME, BIN, STARTS = Path("/tmp/home"), Path("/tmp/bin"), Path("/tmp/starts")
STAND_IN = r"""#!/packages/bash -p
name=${0##*/}
[ "$name" = stand-in ] || set -- "$name" "$@"
if [ "$1" = ray ]; then  # a job of Ray is the command after --
    place=1
    for word; do
        place=$((place + 1))
        [ "$word" != -- ] || exec /tmp/bin/env "${@:place}"
    done
fi
import='^python[0-9.]* -c import ([A-Za-z_][A-Za-z_0-9]*)$'
if [[ "$1 $2 $3" =~ $import ]]; then
    [[ " $TANDEM_MODULES " == *" ${BASH_REMATCH[1]} "* ]]
    exit
fi
for ((place = 1; place + 2 <= $#; place++)); do  # a command in quotes
    next=$((place + 1))
    case "${!place##*/} ${!next}" in
        "bash -c" | "sh -c" | "bash -lc" | "sh -lc") exec /packages/bash -c "${@:place + 2:1}" ;;
    esac
done
[ -p /proc/self/fd/1 ] && asked=yes || asked=
[ -n "$TANDEM_LOOKS" ] || printf '%s\0' "$asked" "$PWD" "$@" > "/tmp/starts/$EPOCHREALTIME.$$"
said="$*"
case $TANDEM_SAYS in
    "") ;;
    [0-9]*) echo "$TANDEM_SAYS" ;;
    *)  # what a shell would read as its own, where the answer stands in a command that one is given
        said=${said//\(/（} said=${said//\)/）} said=${said//\'/＇} said=${said//\"/＂} said=${said//\$/＄}
        said=${said//;/；} said=${said//\&/＆} said=${said//|/｜} said=${said//</＜} said=${said//>/＞}
        said=${said//\`/｀}
        printf '⟨%s⟩\n' "${said//[[:space:]]/$TANDEM_SAYS}"
        ;;
esac
exit $TANDEM_STATUS
"""
BEFORE_EACH_SHELL = r"""command_not_found_handle() { /tmp/bin/stand-in "$@"; }
tandem_makes() {  # the folders, files and programs of a command, in a shell of its own
    trap - DEBUG
    set +eux
    exec 2> /dev/null
    export TANDEM_LOOKS=1
    local rest=$1 place to name words=()
    while [[ $rest =~ \>[\>\|\&]?[[:space:]]*([^][:space:]\<\>\&\|\;\(\)]+)(.*) ]]; do
        place=${BASH_REMATCH[1]} rest=${BASH_REMATCH[2]}
        to=$(eval "printf %s $place")
        [[ $to != */* ]] || /packages/mkdir -p "${to%/*}"
    done
    rest=$1
    until (eval "words=($rest)"); do  # which fails on redirections, at the end of a command as a rule
        [[ $rest == *[\<\>]* ]] || exit
        rest=${rest%[<>]*}
    done
    eval "words=($rest)"
    set -- "${words[@]}"
    local before='[A-Za-z_][A-Za-z_0-9]*=.*|-.*|[0-9.]+[smh]?|exec|command|builtin|nohup|env|nice|timeout|time'
    while [[ $1 =~ ^($before)$ ]]; do
        shift
    done
    case $1 in
        cd | pushd) [[ -z ${!#} || ${!#} == -* ]] || /packages/mkdir -p "${!#}" ;;
        source | .)
            if [[ $2 == */* && ! -e $2 ]]; then
                /packages/mkdir -p "${2%/*}" && : > "$2"
                printf '%s\0' yes "$PWD" source "$2" > "/tmp/starts/$EPOCHREALTIME.$BASHPID"
            fi ;;
        */*)
            if [[ ! -e $1 ]]; then
                name=${1##*/}
                [ -e "/tmp/bin/$name" ] || name=stand-in
                /packages/mkdir -p "${1%/*}" && /packages/ln -s "/tmp/bin/$name" "$1"
            fi ;;
    esac
}
tandem_before() {
    local TANDEM_LOOKS=1  # a shell of its own has the trap, too
    case $1 in
        \[\[* | \(\(*) ;;
        cd\ * | pushd\ * | */* | *\$*) (tandem_makes "$1") || : ;;
    esac
}
set -o functrace
trap '[ -n "${TANDEM_LOOKS-}" ] || tandem_before "$BASH_COMMAND" || :' DEBUG
"""
"""A trap before each command of a script, which its own shells, functions and substitutions have, too."""
WRAPPERS = {
    "sh": '#!/packages/bash -p\nexec /packages/bash "$@"\n',
    "sleep": "#!/packages/bash -p\n",
    "date": '#!/packages/bash -p\n[[ " $*" == *" -d"* || " $*" == *" --date"* ]] || set -- -d "@$TANDEM_NOW" "$@"\n'
    'exec /packages/date "$@"\n',
    **{
        name: f'#!/packages/bash -p\n/packages/{name} "$@" 2> /dev/null\nexit 0\n'
        for name in ("mkdir", "touch", "cp", "mv", "rm", "ln", "chmod")
    },
}
"""What changes files does so in here alone, and a place that is not here fails nothing."""


def prepare(given):
    for folder in (HOME, BIN, STARTS, Path(given["folder"]), Path("/bin"), Path("/usr/bin")):
        folder.mkdir(parents=True, exist_ok=True)
    for path, text in given["files"].items():
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(0o755)
    for tool in TOOLS.iterdir():
        (BIN / tool.name).symlink_to(tool)
    programs = {name: STAND_IN for name in ("stand-in", *given["stand_ins"])}
    for name, text in (programs | WRAPPERS).items():
        (BIN / name).unlink(missing_ok=True)
        (BIN / name).write_text(text)
        (BIN / name).chmod(0o755)
    for program in BIN.iterdir():  # as the first lines of scripts name them
        for folder in ("/bin", "/usr/bin"):
            Path(folder, program.name).symlink_to(program)
    Path("/tmp/before").write_text(BEFORE_EACH_SHELL)


def started():
    """[[`yes` where its output is read, its folder, its words …], …] in the order of the starts."""
    found = []
    for file in sorted(STARTS.iterdir()) if STARTS.is_dir() else ():  # a script may remove all
        asked, _, words = file.read_text(errors="replace").partition("\0")
        if words.count("\0"):  # else it was ended while it wrote
            found.append([asked, *words.split("\0")[:-1]])
        file.unlink()
    return found


def written(starts, given):
    """Texts of the files that the script made and that words of its programs name, `--config=FILE` too."""
    named = {Path(folder, word.rpartition("=")[2]) for _, folder, *words in starts for word in words if len(word) < 500}
    own = [path for path in named if str(path) not in given["files"] and path.suffix in (".yaml", ".yml", ".json")]
    small = [path for path in own if path.is_file() and path.stat().st_size <= LARGEST]
    return {str(path): path.read_text(errors="replace") for path in small[:MOST]}


def run(given, variables, arguments, says, status):
    environment = {"PATH": str(BIN), "HOME": str(HOME), "LANG": "C.UTF-8", "BASH_ENV": "/tmp/before"}
    environment |= {"TANDEM_MODULES": " ".join(given["modules"])}
    environment |= {"TANDEM_NOW": str(given["now"]), "TANDEM_SAYS": says, "TANDEM_STATUS": str(status), **variables}
    command = ["/packages/bash", given["script"], *arguments]
    with open("/tmp/errors", "w+") as errors:
        shell = subprocess.Popen(
            command, cwd=given["folder"], env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        ended = wait_for_all(shell.pid, time.monotonic() + given["seconds"])
        errors.seek(0)
        starts = started()
        return {
            "starts": starts, "written": written(starts, given), "status": ended, "errors": errors.read()[-2000:],
        }  # fmt: skip


def wait_for_all(shell, deadline):
    """The status of the shell once it and all that it left behind have ended; None where they do not."""
    status = None
    while True:
        try:
            process, how = os.waitpid(-1, os.WNOHANG)  # the first process of a container gets those without a parent
        except ChildProcessError:
            return status
        if process == shell:
            status = os.waitstatus_to_exitcode(how)
        elif not process:
            if time.monotonic() > deadline:
                os.kill(-1, signal.SIGKILL)
                while True:
                    try:
                        os.waitpid(-1, 0)
                    except ChildProcessError:
                        return None
            time.sleep(0.002)


given = json.load(sys.stdin)
prepare(given)
json.dump(run(given, **given["how"]), sys.stdout)
