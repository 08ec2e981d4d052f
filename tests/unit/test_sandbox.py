"""The sandbox: programs run, limits hold, and nobody gets out."""

import json
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_attacks import ATTACKS, FORGERIES, HONEST, TESTS
from sandbox_solutions import RIGHT

from tandem.config.reward import RewardConfig, RewardFunctionConfig
from tandem.errors import UserError
from tandem.reward.functions import check_functions
from tandem.reward.rules.code import unit_tests
from tandem.sandbox import build, seccomp
from tandem.sandbox.base import Limits
from tandem.sandbox.build import make_sandbox
from tandem.sandbox.local import LocalSandbox
from tandem.sandbox.tests import run_tests
from tests.endpoint import wait_until
from tests.sandboxes import sandboxed

DATA = Path(__file__).parents[3] / "shared" / "data"

LIMITS = Limits(timeout_s=3, memory_mib=256 + os.getpid() % 97, processes=16, file_mib=4, scratch_mib=16)
"""The odd number tells our sandboxes from those of tests that run at the same time."""


def processes_of_sandboxes() -> list[str]:
    """Command lines of processes that run a program in one of our sandboxes, or watch over one."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [line] if "RLIMIT_NOFILE" in line and f" {LIMITS.memory_mib << 20} " in line else []
    return found


@sandboxed
class TestRuns:
    def test_a_program_reads_its_input_and_prints(self) -> None:
        run = LocalSandbox(LIMITS).run("import sys; print(sys.stdin.read() * 2); sys.exit(3)", "é")
        assert (run.stdout, run.stderr, run.exit_code, run.stopped) == ("éé\n", "", 3, None)

    def test_the_scratch_folder_is_writable_and_fresh(self) -> None:
        sandbox = LocalSandbox(LIMITS)
        program = "import os; print(os.listdir('/tmp'), os.getcwd()); open('x', 'w').write('1')"
        assert [sandbox.run(program).stdout for _ in range(2)] == ["[] /tmp\n"] * 2

    def test_a_writable_root_is_fresh_too_and_small(self) -> None:
        program = (
            "import os; os.makedirs('/mnt/a'); open('/mnt/a/x', 'w').write('1'); print(os.statvfs('/mnt').f_blocks)"
        )
        sandbox = LocalSandbox(LIMITS, writable_root=True)
        runs = [sandbox.run(program) for _ in range(2)]
        assert [(run.stdout, run.exit_code) for run in runs] == [
            (f"{(16 << 20) // os.sysconf('SC_PAGESIZE')}\n", 0)
        ] * 2
        assert sandbox.run("open('/usr/lib/x', 'w')").exit_code == 1
        assert LocalSandbox(LIMITS).run(program).exit_code == 1

    def test_limits_stop_the_whole_run(self) -> None:
        assert LocalSandbox(Limits(timeout_s=0.3)).run("while True: pass").stopped == "took longer than 0.3 s"
        sandbox = LocalSandbox(Limits(timeout_s=9, memory_mib=128))
        hungry = (
            "import os, time\nfor _ in range(4):\n    if os.fork() == 0: x = bytearray(60 << 20); break\ntime.sleep(9)"
        )
        assert sandbox.run(hungry).stopped == "used more than 128 MiB of memory"

    def test_a_program_that_waits_is_killed_with_all_that_it_started(self) -> None:
        waiting = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: os.setsid(); break\ntime.sleep(3600)"
        assert LocalSandbox(LIMITS).run(waiting, timeout_s=0.3).stopped == "took longer than 0.3 s"
        assert processes_of_sandboxes() == []

    def test_a_program_dies_with_the_process_that_runs_it(self) -> None:
        """Under root the program is another user's, which bubblewrap alone has no right to kill."""
        runner = f"""
from tandem.sandbox.local import LocalSandbox, Limits
sandbox = LocalSandbox(Limits(memory_mib={LIMITS.memory_mib}))
print("tried", flush=True)
sandbox.run("import os, time; os.fork() or os.setsid(); time.sleep(3600)")
"""
        with subprocess.Popen([sys.executable, "-c", runner], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"tried\n"
            wait_until(lambda: sum("bwrap" not in line for line in processes_of_sandboxes()) == 2)
            process.kill()
        deadline = time.monotonic() + 10
        wait_until(lambda: processes_of_sandboxes() == [] or time.monotonic() > deadline)
        assert processes_of_sandboxes() == []

    def test_all_of_the_output_is_read(self) -> None:
        run = LocalSandbox(LIMITS).run("print('x' * 3_000_000)")
        assert run.stdout == "x" * 3_000_000 + "\n"

    @pytest.mark.parametrize(
        "program",
        [
            "print(6)\nexit()",
            "print(6)\nquit(0)",
            "print(sum(map(int, open('/dev/stdin').read().split())))",
            "open('/dev/stdout', 'w').write('6')",
            "import pickle\nclass P: x = 6\nprint(pickle.loads(pickle.dumps(P())).x)",
            "import typing\nclass A: x: 'A'\nassert typing.get_type_hints(A)['x'] is A\nprint(6)",
            "import __main__\nx = 6\nprint(__main__.x)",
        ],
    )
    def test_programs_find_what_scripts_find(self, program: str) -> None:
        run = LocalSandbox(LIMITS).run(program, "1 2\n3")
        assert (run.stdout.strip(), run.stderr, run.exit_code) == ("6", "", 0)

    def test_every_test_has_a_fresh_process_with_the_solution_in_it(self) -> None:
        solution = "seen = []\ndef f(x): seen.append(x); return len(seen)"
        tests = [
            "assert f(1) == 1",
            "assert f(2) == 1",
            "assert f(3) == 2, 'fresh'",
            "x = (",
            "while True: pass",
            "seen",
        ]
        reasons, stopped = run_tests(LocalSandbox(LIMITS), solution, tests, test_timeout_s=0.3)
        assert reasons[:3] == ["", "", "AssertionError: fresh"]
        assert reasons[3].startswith("SyntaxError") and reasons[4] == "took longer than 0.3 s"
        assert (reasons[5], stopped) == ("", None)

    @pytest.mark.parametrize("sent", ["b'0' * 8", "b'0000000000000002[]'", "b'0' * 16 + b'[' * 4000", "b'9' * 16"])
    def test_a_hostile_test_spoils_no_other(self, sent: str) -> None:
        """As those that a model writes: it may write to whatever descriptor it has."""
        hostile = f"""
import os, time
for fd in range(3, 64):
    try: os.write(fd, {sent})
    except OSError: pass
time.sleep(60)
"""
        tests = ["assert f() == 1", hostile, "assert f() == 1"]
        reasons, stopped = run_tests(LocalSandbox(LIMITS), "def f(): return 1", tests, test_timeout_s=0.5)
        assert reasons[0] == reasons[2] == "" and stopped is None
        assert reasons[1] in ("its process ended before the test did", "its process sent something else than a reason")

    def test_the_process_of_the_verdicts_cannot_be_interrupted(self) -> None:
        solution = "import os, signal\nfor number in range(1, 32): os.kill(1, number)\ndef f(): return 1"
        assert run_tests(LocalSandbox(LIMITS), solution, ["assert f() == 1"]) == ([""], None)

    def test_what_ordinary_solutions_use_works(self) -> None:
        solution = (
            "from __future__ import annotations\nimport asyncio, threading, subprocess, sys, tempfile\n"
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
            "thread = threading.Thread(target=print); thread.start(); thread.join()\nasyncio.run(asyncio.sleep(0))\n"
            "tempfile.TemporaryFile().write(b'x')\nsubprocess.run([sys.executable, '-c', ''], check=True)\n"
        )
        assert run_tests(LocalSandbox(LIMITS), solution, ["assert A(1) == A(x=1)"]) == ([""], None)


@sandboxed
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_solution_passes(name: str) -> None:
    solution, test = RIGHT[name]
    verdict = unit_tests("x", f"```python\n{solution}\n```", [test], **vars(Limits(timeout_s=8)))
    assert verdict["reason"] is None


@sandboxed
def test_the_preamble_is_on_both_sides_and_its_classes_on_the_solutions() -> None:
    preamble = "import math\nclass Box:\n    def __init__(self, x): self.x = x\ndef inverse(x): return 1 / x\n"
    solution = "inverse = lambda x: 0\ndef f(box): return Box(math.floor(box.x) + 1)"
    truth = {"preamble": preamble, "tests": ["assert f(Box(2.5)).x == 3 and inverse(f(Box(3)).x) == 0.25"]}
    assert unit_tests("x", solution, truth, **vars(LIMITS))["reason"] is None


@sandboxed
class TestPackages:
    SOLUTION = """
import numpy as np
def f(n): return np.arange(n) * 1.5
def g(a): return a.mean()
def h(a): a *= 2
"""
    TEST = """
import numpy as np
np.testing.assert_allclose(f(3), np.array([0, 1.5, 3]))
assert f(3).shape == (3,) and isinstance(f(2), np.ndarray) and g(np.ones((2, 2))) == 1.0
a = np.ones(3)
h(a)
assert (a == 2).all()
"""

    def test_a_package_that_is_asked_for_is_there(self) -> None:
        alone = unit_tests("x", self.SOLUTION, ["assert f(0) == 0"])
        assert str(alone["reason"]).startswith("test 1 failed: ModuleNotFoundError: No module named 'numpy'")
        with pytest.raises(ValueError, match="test 1 imports numpy, which the sandbox has not; name it in `packages`"):
            unit_tests("x", self.SOLUTION, [self.TEST])
        assert unit_tests("x", self.SOLUTION, [self.TEST], packages=["numpy"])["reason"] is None
        changed = self.SOLUTION.replace("1.5", "1.25")
        assert "Not equal" in unit_tests("x", changed, [self.TEST], packages=["numpy"])["reason"]

    def test_tables_cross_whole(self) -> None:
        pytest.importorskip("pandas", reason="pandas is not installed")
        solution = """
import pandas as pd
def totals(table): return table.groupby('k').sum()
def kinds(column): return column.astype('category')
def days(): return pd.date_range('2024-01-01', periods=2)
"""
        test = """
import pandas as pd
table = pd.DataFrame({'k': ['a', 'b', 'a'], 'v': [1, 2, 3], 'w': [.5, 1, 2]})
expected = pd.DataFrame({'v': [4, 2], 'w': [2.5, 1.0]}, index=pd.Index(['a', 'b'], name='k'))
pd.testing.assert_frame_equal(totals(table), expected)
column = pd.Series(['x', 'y', 'x'], name='c')
pd.testing.assert_series_equal(kinds(column), column.astype('category'))
assert list(days()) == [pd.Timestamp('2024-01-01'), pd.Timestamp('2024-01-02')]
"""
        assert unit_tests("x", solution, [test], packages=["pandas"])["reason"] is None
        wrong = solution.replace("sum()", "max()")
        assert "AssertionError" in unit_tests("x", wrong, [test], packages=["pandas"])["reason"]

    def test_it_cannot_be_changed_and_brings_what_it_requires(self) -> None:
        sandbox = make_sandbox(packages=["sympy"])
        assert "mpmath" in sandbox.modules
        run = sandbox.run("import os, sympy\nprint(sympy.sqrt(4))\nopen(sympy.__file__, 'a')")
        assert run.stdout == "2\n" and "Error: [Errno" in run.stderr

    def test_one_that_is_not_installed_is_refused_before_the_run(self) -> None:
        named = {"function": "tandem.reward.rules.code:unit_tests", "arguments": {"packages": ["numpy", "nowhere"]}}
        with pytest.raises(UserError, match=r"reward\.functions: packages: 'nowhere' is not installed here"):
            check_functions(RewardConfig(functions=[RewardFunctionConfig(**named)]), ["mbpp"])
        with pytest.raises(UserError, match=r"'numpy' is no list; write \[numpy\]"):
            make_sandbox(packages="numpy")
        with pytest.raises(UserError, match="a SandboxFusion server has its own"):
            make_sandbox(packages=["numpy"], sandbox_fusion_url="http://localhost")


@sandboxed
class TestAttacks:
    @pytest.fixture
    def port(self) -> Iterator[int]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server.getsockname()[1]

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="some attacks name system calls by x86-64's numbers")
    @pytest.mark.parametrize("attack", ATTACKS)
    def test_nobody_gets_out(
        self, attack: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("TANDEM_TEST_SECRET", "SECRET")
        secret = tmp_path / "secret"
        secret.write_text("kept")
        solution = ATTACKS[attack].replace("{secret!r}", repr(str(secret))).replace("{port}", str(port))
        ground_truth = ["assert escaped, 'it did not get out'"]
        verdict = unit_tests("x", solution, ground_truth, test_timeout_s=0.5, **vars(LIMITS))
        assert (verdict["score"], verdict["acc"]) == (0.0, 0.0)
        assert verdict["reason"].startswith("test 1 failed: ")
        assert secret.read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["secret"]
        assert processes_of_sandboxes() == []

    @pytest.mark.parametrize("forgery", FORGERIES)
    def test_no_verdict_is_forged(self, forgery: str) -> None:
        test, solution = FORGERIES[forgery]
        verdict = unit_tests("x", solution, [TESTS[test]], test_timeout_s=60, **(vars(LIMITS) | {"timeout_s": 60}))
        assert (verdict["score"], verdict["stopped"]) == (0.0, 0.0)

    def test_tests_that_the_forgeries_would_pass(self) -> None:
        assert unit_tests("x", HONEST, list(TESTS.values()), **vars(LIMITS))["reason"] is None

    def test_there_are_fifty(self) -> None:
        assert len(ATTACKS) >= 50

    def test_a_test_that_the_attacks_would_pass(self) -> None:
        assert unit_tests("x", "escaped = True", ["assert escaped"], **vars(LIMITS))["score"] == 1.0


def decide(program: bytes, arch: int, number: int, argument: int = 0) -> int:
    """What the kernel makes of a filter: a classic BPF interpreter for the instructions that ours has."""
    code = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    data = struct.pack("IIQQ", number, arch, 0, argument)
    value = at = 0
    while True:
        kind, true, false, operand = code[at]
        if kind == 0x06:
            return operand
        if kind == 0x20:
            (value,) = struct.unpack_from("I", data, operand)
        else:
            at += true if {0x15: value == operand, 0x35: value >= operand, 0x45: value & operand}[kind] else false
        at += 1


@pytest.mark.parametrize(
    ("machine", "arch", "read", "clone"), [("x86_64", 0xC000003E, 0, 56), ("aarch64", 0xC00000B7, 63, 220)]
)
def test_the_filter_denies_what_it_names(machine: str, arch: int, read: int, clone: int) -> None:
    program = seccomp.denying_filter(machine)
    allowed, denied, unknown, killed = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    column = ("x86_64", "aarch64").index(machine)
    assert {decide(program, arch, numbers[column]) for numbers in seccomp.DENIED.values()} == {denied}
    assert decide(program, arch, read) == allowed
    assert decide(program, arch ^ 1, read) == killed
    assert (decide(program, arch, 0x40000000 + read), decide(program, arch, 435)) == (denied, unknown)
    assert decide(program, arch, clone, argument=17) == allowed  # SIGCHLD: fork
    assert decide(program, arch, clone, argument=0x3D0F00) == allowed  # a thread
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(program, arch, clone, argument=namespace | 17) == denied


def test_without_a_sandbox_code_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"bwrap.*not installed: run scripts/sandbox.*run_untrusted_code_without_sandbox"
    ):
        LocalSandbox(LIMITS)
    assert LocalSandbox(LIMITS, contained=False).run("print(1)").stdout == "1\n"


def test_a_run_without_a_sandbox_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build._make.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"reward\.functions: .*bubblewrap"):
        check_functions(RewardConfig(), ["mbpp"])
    typo = {"function": "tandem.reward.rules.code:unit_tests", "arguments": {"memory_mb": 9}}
    with pytest.raises(UserError, match=r"the sandbox has no \['memory_mb'\]; its limits are timeout_s, memory_mib"):
        check_functions(RewardConfig(functions=[typo]), ["mbpp"])
    risky = {
        "function": "tandem.reward.rules.code:unit_tests",
        "arguments": {"run_untrusted_code_without_sandbox": True},
    }
    check_functions(RewardConfig(functions=[risky]), ["mbpp"])


def test_without_a_container_limits_still_hold() -> None:
    sandbox = LocalSandbox(Limits(timeout_s=1, memory_mib=LIMITS.memory_mib), contained=False)
    assert "MemoryError" in sandbox.run("bytearray(1 << 30)").stderr
    assert sandbox.run("import os, time\nos.fork()\ntime.sleep(9)").stopped == "took longer than 1 s"
    wait_until(lambda: processes_of_sandboxes() == [])  # a child's child is killed, but not waited for


@sandboxed
def test_a_solution_is_scored_by_its_tests() -> None:
    good, half = "def f(x): return x + 1", "def f(x): return 2"
    truth = {"preamble": "import math", "tests": ["assert f(1) == 2", "assert f(2) == math.floor(3.5)"]}
    assert unit_tests("mbpp", good, truth)["score"] == 1.0
    verdict = unit_tests("mbpp", half, truth, partial=True)
    assert (verdict["score"], verdict["acc"], verdict["tests_passed"]) == (0.5, 0.0, 0.5)
    assert verdict["reason"] == "test 2 failed: AssertionError: "


@sandboxed
def test_a_preamble_and_a_solution_may_both_begin_with_the_future() -> None:
    future = "from __future__ import annotations\n"
    solution = f"```python\n{future}def f(x: List[int]) -> int: return x[0]\n```"
    preamble = f"{future}from typing import List"
    assert unit_tests("x", solution, {"tests": ["assert f([3]) == 3"], "preamble": preamble})["reason"] is None
    calls = {"fn_name": "f", "inputs": [[[3]]], "outputs": [3], "preamble": "from typing import List"}
    assert unit_tests("x", solution.replace(future, ""), calls)["reason"] is None


@sandboxed
def test_numbers_and_arrays_of_numpy_are_returned_as_those_of_python() -> None:
    solution = "import numpy as np\ndef f(x): return [np.sum(x), np.any(x), np.cumsum(x), np.float32(0.5)]"
    truth = {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[3, True, [1, 3], 0.5]]}
    how: dict[str, Any] = {"packages": ["numpy"], "memory_mib": 2048}
    assert unit_tests("x", solution, truth, **how)["reason"] is None
    assert unit_tests("x", solution, truth | {"outputs": [[3, True, [1, 4], 0.5]]}, **how)["score"] == 0


@sandboxed
def test_what_is_expected_of_a_call_may_be_any_json() -> None:
    deep: list[Any] = []
    for _ in range(150):
        deep = [deep]
    truth = {"fn_name": "f", "inputs": [[float("inf")], [deep]], "outputs": [float("inf"), deep]}
    assert unit_tests("x", "def f(x): return x", json.dumps(truth))["reason"] is None


@sandboxed
def test_what_a_program_prints_is_compared_outside() -> None:
    truth = {"inputs": ["1 2\n", "3 4\n", ""], "outputs": ["3\n", " 7 \n\n", "none"]}
    program = """
try: line = input()
except EOFError: print("none")
else: print(sum(map(int, line.split())))
"""
    assert unit_tests("x", program, truth)["score"] == 1.0
    assert unit_tests("x", program, json.dumps(truth))["score"] == 1.0
    wrong = unit_tests("x", program.replace("sum(", "max("), truth, partial=True, timeout_s=20)
    assert (wrong["score"], wrong["reason"]) == (1 / 3, "test 1 failed: it printed '2\\n'")
    assert "ZeroDivisionError" in unit_tests("x", "print(3); 1 / 0", truth)["reason"]
    verdict = unit_tests("x", "while True: pass", truth, test_timeout_s=0.2, timeout_s=0.3)
    assert verdict["reason"] == "test 1 failed: took longer than 0.2 s" and verdict["score"] == 0.0
    assert unit_tests("x", "print(__name__)", {"inputs": [""], "outputs": ["__main__"]})["score"] == 1.0


@sandboxed
def test_what_a_function_returns_is_compared_as_data() -> None:
    truth = {"fn_name": "f", "inputs": [[1, [2]], [3, []]], "outputs": [[1, 2], [3]]}
    assert unit_tests("x", "def f(a, b): return (a, *b)", truth)["reason"] is None
    assert unit_tests("x", "class Solution:\n    def f(self, a, b): return [a] + b", truth)["score"] == 1.0
    assert (
        unit_tests("x", "def f(a, b): return [a]", truth)["reason"] == "test 1 failed: AssertionError: it returned [1]"
    )
    assert (
        "no data of JSON's" in unit_tests("x", "from unittest.mock import ANY\ndef f(*a): return ANY", truth)["reason"]
    )
    assert (
        unit_tests("x", "def sum(a, b): return a", {"fn_name": "sum", "inputs": [[5, 6]], "outputs": [5]})["score"] == 1
    )
