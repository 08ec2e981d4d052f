"""Runs a launch script where nothing can happen: a program of the sandbox, of the standard library alone (shell.py).

A shell runs the script. Programs that work on text, files and dates run as well; in the place of all others stands one
that writes down the words it was started with. Each run gives these other answers, which shows what depends on them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TOOLS = Path("/packages")
ROOT, HOME, BIN, STARTS = Path("/tmp/root"), Path("/tmp/home"), Path("/tmp/bin"), Path("/tmp/starts")
"""Below ROOT the files of the machine stand at their own paths."""
STAND_IN = """#!/packages/bash
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
printf '%s\\0' "$asked" "$PWD" "$@" > "/tmp/starts/$EPOCHREALTIME.$$"
said="$*"
[ -z "$TANDEM_SAYS" ] || printf '⟨%s⟩\\n' "${said//[[:space:]]/$TANDEM_SAYS}"
exit $TANDEM_STATUS
"""
BEFORE_EACH_SHELL = 'command_not_found_handle() { /tmp/bin/stand-in "$@"; }\n'
WRAPPERS = {
    "sh": '#!/packages/bash\nexec /packages/bash "$@"\n',
    "sleep": "#!/packages/bash\n",
    "date": '#!/packages/bash\n[[ " $*" == *" -d"* || " $*" == *" --date"* ]] || set -- -d "@$TANDEM_NOW" "$@"\n'
    'exec /packages/date "$@"\n',
    **{
        name: f'#!/packages/bash\n/packages/{name} "$@" 2> /dev/null\nexit 0\n'
        for name in ("mkdir", "touch", "cp", "mv", "rm", "ln", "chmod")
    },
}
"""What changes files does so in here alone, and a place that is not here fails nothing."""


def prepare(given):
    for folder in (HOME, BIN, STARTS, ROOT / given["folder"].lstrip("/")):
        folder.mkdir(parents=True, exist_ok=True)
    for path, text in given["files"].items():
        place = ROOT / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    for tool in TOOLS.iterdir():
        (BIN / tool.name).symlink_to(tool)
    programs = {name: STAND_IN for name in ("stand-in", *given["stand_ins"])}
    for name, text in (programs | WRAPPERS).items():
        (BIN / name).unlink(missing_ok=True)
        (BIN / name).write_text(text)
        (BIN / name).chmod(0o755)
    Path("/tmp/before").write_text(BEFORE_EACH_SHELL)


def started():
    """[[`yes` where its output is read, its folder, its words …], …] in the order of the starts."""
    found = []
    for file in sorted(STARTS.iterdir()):
        found.append(file.read_text(errors="replace").split("\0")[:-1])
        file.unlink()
    return found


def run(given, variables, arguments, says, status):
    environment = {"PATH": str(BIN), "HOME": str(HOME), "LANG": "C.UTF-8", "BASH_ENV": "/tmp/before"}
    environment |= {"TANDEM_MODULES": " ".join(given["modules"])}
    environment |= {"TANDEM_NOW": str(given["now"]), "TANDEM_SAYS": says, "TANDEM_STATUS": str(status), **variables}
    command = ["/packages/bash", str(ROOT / given["script"].lstrip("/")), *arguments]
    with open("/tmp/errors", "w+") as errors:
        shell = subprocess.Popen(
            command, cwd=ROOT / given["folder"].lstrip("/"), env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        ended = wait_for_all(shell.pid, time.monotonic() + given["seconds"])
        errors.seek(0)
        return {"starts": started(), "status": ended, "errors": errors.read()[-2000:]}


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
json.dump([run(given, **how) for how in given["runs"]], sys.stdout)
