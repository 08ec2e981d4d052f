"""Programs on this machine, in a bubblewrap container of their own, or (where the user accepts that) without any.

The container has no network, no process and no file of the machine but the Python that runs it and the libraries under
it, read-only. The program is nobody: under root it changes to a user id that no one else has, else it lives in a user
namespace. Resource limits hold each process, the watcher holds them all.
"""

import math
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NamedTuple

from tandem.errors import TandemError, UserError
from tandem.sandbox.base import ExecutionResult, Limits
from tandem.sandbox.seccomp import denying_filter

_TRIAL_S = 60.0
"""For the first container, which shows that there can be any: what programs may have says nothing of a busy machine."""
LOOK_S = 0.02
"""Between looks at the memory of all processes."""
MAX_FILES = 256
_FIRST_USER = 1 << 30
"""From here to twice that nobody has a user id."""
_PACKAGES = "/packages"
_ENDED_WITH_US = ("bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--as-pid-1", "--die-with-parent")
"""Around the container, under root: bubblewrap has no right to kill a program of another user when its own parent has
died. As the first process of a namespace of processes that is root's, it takes all in there with it."""
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **dict.fromkeys(_THREADS, "1")}
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
_REFUSAL = """model-written code runs in a sandbox, and bubblewrap (`bwrap`) is not installed: run scripts/sandbox, or \
name a SandboxFusion server (sandbox_fusion_url), or accept the risk on a machine that has nothing to lose: \
run_untrusted_code_without_sandbox: true"""
_BOOT = """
import builtins, os, resource, sys
packages, *numbers = sys.argv[1:]
descriptor, user, *limits = map(int, numbers)
with open(descriptor, encoding="utf-8") as file:
    program = file.read()
kinds = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
for kind, limit in (*zip(kinds, limits), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (limit, limit))
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
builtins.exit = builtins.quit = sys.exit  # which `site` would define
sys.argv = ["program.py"]
sys.path += [place for place in packages.split(":") if place]
main = sys.modules["__main__"] = type(sys)("__main__")
main.__file__ = "program.py"
exec(compile(program, "program.py", "exec"), main.__dict__)
"""


class LocalSandbox:
    """Runs programs with this Python and its standard library. `contained=False`: resource limits are all there is."""

    def __init__(
        self, limits: Limits, contained: bool = True, packages: Mapping[str, Path] | None = None,
        writable_root: bool = False,
    ) -> None:  # fmt: skip
        """Raises UserError when this machine has no bubblewrap, or one that cannot make a container.

        `packages`: what programs can import besides the standard library, by name. `writable_root`: they may make files
        anywhere, all of which are gone with the container.
        """
        self.limits = limits
        self._packages = packages or {}
        self.modules = [name.removesuffix(".py") for name in self._packages]
        self._contained = contained
        self._writable_root = writable_root
        if contained and not shutil.which("bwrap"):
            raise UserError(_REFUSAL)
        if contained and (trial := self._run("print(6 * 7)", "", _TRIAL_S)).stdout != "42\n":
            raise UserError(f"bubblewrap cannot make a container on this machine: {trial.stderr.strip() or trial}")

    def run(self, program: str, stdin: str = "", timeout_s: float = math.inf) -> ExecutionResult:
        return self._run(program, stdin, min(timeout_s, self.limits.timeout_s))

    def _run(self, program: str, stdin: str, timeout_s: float) -> ExecutionResult:
        with ExitStack() as opened:
            given, out, err = (opened.enter_context(_file(content)) for content in (stdin.encode(), b"", b""))
            for file in (given, out, err):  # the program, another user, may open /dev/stdin and its kin
                os.fchmod(file.fileno(), 0o666)
            start = time.monotonic()
            container = self.start(program, (given.fileno(), out.fileno(), err.fileno()), self.limits.timeout_s)
            try:
                stopped = self._watch(container, timeout_s, start + timeout_s)
            finally:
                exit_code = container.end()
            return ExecutionResult(exit_code, _content(out), _content(err), time.monotonic() - start, stopped)

    def start(self, program: str, streams: tuple[int, int, int], cpu_s: float) -> "Container":
        """Start `program` with these descriptors as its standard input, output and error; `cpu_s` is what each process
        may have of CPU time.

        Whoever starts it must end it, and the *thread* that called this must last: bubblewrap's --die-with-parent takes
        it for the parent.
        """
        contents = (program.encode(), denying_filter() if self._contained else b"", b"")
        source, calls, facts = (_file(content) for content in contents)
        stdin, stdout, stderr = streams
        try:
            process = subprocess.Popen(
                [*self._container(calls.fileno(), facts.fileno()), "-I", "-S", "-c", _BOOT,
                 *self._arguments(source, cpu_s)],
                pass_fds=[file.fileno() for file in (source, calls, facts)], stdin=stdin, stdout=stdout, stderr=stderr,
                env={} if self._contained else _ENVIRONMENT, cwd="/", start_new_session=True,
            )  # fmt: skip
        except BaseException:
            facts.close()
            raise
        finally:
            source.close()
            calls.close()
        return Container(process, facts)

    def _container(self, filter_descriptor: int, facts_descriptor: int) -> list[str]:
        """The command up to Python, which sees its own files as /python."""
        if not self._contained:
            return [sys.executable]
        libraries = [place for place in ("/lib", "/lib64", "/usr/lib", "/usr/lib64") if os.path.isdir(place)]
        read_only = [(place, place) for place in libraries] + [(sys.base_prefix, "/python")]
        read_only += [(str(path), f"{_PACKAGES}/{name}") for name, path in self._packages.items()]
        root = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        anywhere = ("--perms", "0777", "--size", str(self.limits.scratch_mib << 20), "--tmpfs", "/")
        anywhere += ("--perms", "0777", "--dir", "/usr")
        return [
            *(() if os.geteuid() else _ENDED_WITH_US),
            *("bwrap", *_NAMESPACES, *(("--unshare-user",) if os.geteuid() else root), "--as-pid-1", "--new-session"),
            *("--die-with-parent", "--clearenv"),
            *("--seccomp", str(filter_descriptor), "--info-fd", str(facts_descriptor)),
            *(anywhere if self._writable_root else ()),
            *("--perms", "0755", "--dir", _PACKAGES),
            *(word for source, place in read_only for word in ("--ro-bind", source, place)),
            *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
            *("--perms", "1777", "--size", str(self.limits.scratch_mib << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"),
            *(() if self._writable_root else ("--remount-ro", "/")),
            *("--setenv", "HOME", "/tmp", "--setenv", "LD_LIBRARY_PATH", "/python/lib"),
            *(word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)),
            f"/python/bin/python{sys.version_info.major}.{sys.version_info.minor}",
        ]  # fmt: skip

    def _arguments(self, source: IO[bytes], cpu_s: float) -> Iterator[str]:
        """What `_BOOT` reads."""
        folders = {str(path.parent) for path in self._packages.values()}
        yield _PACKAGES if self._contained else ":".join(sorted(folders))
        user = 0 if os.geteuid() or not self._contained else _FIRST_USER + secrets.randbelow(_FIRST_USER)
        seconds = resource.RLIM_INFINITY if math.isinf(cpu_s) else math.ceil(cpu_s)
        kernel = (seconds, self.limits.memory_mib << 20, self.limits.processes)
        yield from map(str, (source.fileno(), user, *kernel, self.limits.file_mib << 20, MAX_FILES))

    def _watch(self, container: "Container", timeout_s: float, deadline: float) -> str | None:
        """Wait for the end; returns the limit that was passed before it came."""
        while not container.has_ended_within(LOOK_S):
            if time.monotonic() > deadline:
                return f"took longer than {timeout_s:.3g} s"
            if container.usage().resident_bytes > self.limits.memory_mib << 20:
                return f"used more than {self.limits.memory_mib} MiB of memory"
        return None


class Usage(NamedTuple):
    """What a container uses, all processes together."""

    resident_bytes: int
    """Pages that processes share count for each."""
    cpu_s: float
    """From the start, ended processes included."""


class Container:
    """A program that was started, from outside."""

    def __init__(self, process: subprocess.Popen[bytes], facts: IO[bytes]) -> None:
        """`facts`: where bubblewrap tells of its container."""
        self._process = process
        self._facts = facts
        self._ended = os.pidfd_open(process.pid)
        self._first: int | None = None

    def has_ended_within(self, seconds: float) -> bool:
        return _ends_within(self._ended, seconds)

    def usage(self) -> Usage:
        """Of the program and its descendants at this moment."""
        pages, ticks, waiting = 0, 0, [self._process.pid]
        while waiting:
            number = waiting.pop()
            with suppress(OSError):  # it ended meanwhile
                numbers = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()  # from the third field on
                pages += int(numbers[21])
                ticks += sum(map(int, numbers[11:15]))
                waiting += _children(number)
        return Usage(pages * os.sysconf("SC_PAGESIZE"), ticks / os.sysconf("SC_CLK_TCK"))

    def kill(self) -> None:
        """Kill the program, not yet waiting for its end."""
        first = self._first_process()
        if self.has_ended_within(0):  # then the number of the first process may be another's, as in `end`
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended if first is None else first, signal.SIGKILL)

    def end(self) -> int:
        """Kill what is left, and wait for the program: as the first process of its container it dies last. Returns its
        exit code. Raises TandemError where it does not end."""
        with ExitStack() as opened:
            opened.callback(self._facts.close)
            opened.callback(os.close, self._ended)
            first = self._first_process()
            if first is not None:
                opened.callback(os.close, first)
            # Else bubblewrap has waited for the first process, whose number may be another process's by now.
            is_running = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            exit_code = self._process.wait()
            if first is None:
                return exit_code
            if is_running:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(first, signal.SIGKILL)
            if not _ends_within(first, 10):
                raise TandemError("a sandbox did not end within 10 s of being killed")
            return exit_code

    def _first_process(self) -> int | None:
        """A descriptor of the first process of the container, once bubblewrap has told of it; None if there is none.

        Its number there is that of bubblewrap's own namespace of processes: here it is the end of a line of children.
        """
        if self._first is None and _content(self._facts):
            with suppress(OSError, IndexError):  # it ended meanwhile
                bubblewrap = self._process.pid if os.geteuid() else _children(self._process.pid)[0]
                self._first = os.pidfd_open(_children(bubblewrap)[0])
        return self._first


def _children(process: int) -> list[int]:
    """Of all its threads. Raises OSError where it has ended."""
    tasks = f"/proc/{process}/task"
    return [int(child) for thread in os.listdir(tasks) for child in Path(tasks, thread, "children").read_text().split()]


def _ends_within(process: int, seconds: float) -> bool:
    """Whether the process of this descriptor ends in time. `select` could not wait for a descriptor above 1023."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _file(content: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - run closes it
    file.write(content)
    file.seek(0)
    return file


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
