"""Python as a tool: state within a trajectory, limits, what the policy is told, and that nothing stays or gets out."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from sandbox_attacks import ATTACKS

from tandem.config.conversation import ToolsEnvironmentConfig
from tandem.errors import UserError
from tandem.rollout.environment import Answer, Environment, EnvironmentFailed, ToolCall
from tandem.rollout.make import make_environments
from tandem.sandbox import interpreter
from tandem.types import Prompt
from tests.endpoint import wait_until
from tests.sandboxes import sandboxed

MEMORY_MIB = 256 + os.getpid() % 97
"""The odd number tells our containers from those of tests that run at the same time."""
SMALL = {"memory_mib": MEMORY_MIB, "processes": 14, "file_mib": 4, "scratch_mib": 16}


def containers() -> list[str]:
    """Command lines of processes in one of our containers, or that watch over one."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [line] if "RLIMIT_NOFILE" in line and f" {MEMORY_MIB << 20} " in line else []
    return found


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    wait_until(lambda: containers() == [])  # one that was told to end may take its time on busy cores


Say = Callable[..., Awaitable[list[str]]]


def converse(scene: Callable[[Callable[[], Awaitable[tuple[Environment, Say]]]], Awaitable[Any]], **config: Any) -> Any:
    """What the scene returns, which is given what begins a trajectory: its environment, and what calls `python` in one
    turn, once for each text."""
    limits = config.pop("limits", {})
    tools = {"type": "python", **SMALL, **config}
    environments = make_environments(ToolsEnvironmentConfig.model_validate({"tools": [tools], "limits": limits}))

    async def begin() -> tuple[Environment, Say]:
        prompt = Prompt(0, np.array([1], np.int32), "?", "q", None, {"prompt": "?"})
        environment = environments.make(prompt)
        await environment.start(prompt)

        async def say(*cells: Any) -> list[str]:
            calls = [cell if isinstance(cell, dict) else {"code": cell} for cell in cells]
            answer = Answer("", tool_calls=tuple(ToolCall(str(i), "python", call) for i, call in enumerate(calls)))
            return [str(message["content"]) for message in (await environment.step(answer)).messages]

        return environment, say

    async def whole() -> Any:
        await environments.open()
        try:
            async with asyncio.timeout(120):
                return await scene(begin)
        finally:
            await environments.close()

    return asyncio.run(whole())


def cells(*sources: Any, **config: Any) -> list[str]:
    """What is said to cells of one trajectory, each in a turn of its own."""

    async def scene(begin: Any) -> list[str]:
        environment, say = await begin()
        said = [(await say(source))[0] for source in sources]
        await environment.close()
        return said

    return converse(scene, **config)


@sandboxed
class TestCells:
    def test_state_is_kept_and_the_last_expression_shown(self) -> None:
        said = cells("x = 6", "def f(y):\n    return x * y", "print('so:')\nf(7)", "import math as m", "m.floor(x / 4)")
        assert said == ["(no output)", "(no output)", "so:\n42", "(no output)", "1"]

    def test_trajectories_share_nothing_and_calls_of_a_turn_run_in_order(self) -> None:
        async def scene(begin: Any) -> list[list[str]]:
            (one, say), (other, say_too) = await begin(), await begin()
            said = [
                await say("x = 1\nopen('/tmp/f', 'w').write('one')", "x += 1", "x"),
                await say_too("x", "open('f')"),
            ]
            await one.close()
            await other.close()
            return said

        own, others = converse(scene)
        assert own == ["3", "(no output)", "2"]
        assert others[0].endswith("NameError: name 'x' is not defined") and "FileNotFoundError" in others[1]

    def test_a_traceback_is_the_result_and_state_stays(self) -> None:
        said = cells("x = 1\nprint('before')\n1 / 0", "x", "y = (", "raise SystemExit(3)", "x", "a\0b", "\ud800")
        assert said[0] == (
            'before\nTraceback (most recent call last):\n  File "<cell 1>", line 3, in <module>\n    1 / 0\n'
            "    ~~^~~\nZeroDivisionError: division by zero"
        )
        assert (said[1], said[4]) == ("1", "1")
        assert said[2].endswith("SyntaxError: '(' was never closed") and said[3].endswith("SystemExit: 3")
        assert "null bytes" in said[5] and "surrogates" in said[6]

    def test_what_children_print_is_in_its_place(self) -> None:
        child = "import subprocess, sys\nprint('a')\nsubprocess.run([sys.executable, '-c', 'print(1)'])\nprint('b')"
        assert cells(child) == ["a\n1\nb"]

    def test_a_long_cell_arrives_whole(self) -> None:
        assert cells(f"x = {'7' * 500_000!r}\nlen(x)", "x.count('7')") == ["500000", "500000"]

    def test_a_forked_child_does_not_end_the_cell(self) -> None:
        assert cells("import os, time\nif os.fork() > 0:\n    time.sleep(0.2)\n    print('parent')", "2 + 2") == [
            "parent", "4"
        ]  # fmt: skip

    def test_output_is_cut_in_the_middle(self) -> None:
        (said,) = cells("print('é' * 1_000_000)\n1 / 0", limits={"result_characters": 400})
        assert len(said) <= 400 and said.startswith("ééé") and said.endswith("ZeroDivisionError: division by zero")
        head, _, tail = said.partition("\n… (")
        left_out = int(tail.split(" ")[0].replace(",", ""))
        assert head.count("é") + tail.count("é") + left_out == pytest.approx(1_000_000, abs=200)

    def test_the_interpreter_is_stopped_between_cells_and_what_it_started_is_ended(self) -> None:
        async def scene(begin: Any) -> tuple[list[str], list[str]]:
            environment, say = await begin()
            counting = (
                "import threading, time\nn = 0\ndef count():\n    global n\n    while True: n += 1; time.sleep(0.01)"
            )
            await say(counting + "\nthreading.Thread(target=count, daemon=True).start()\n")
            left = "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'while True: pass'])"
            await say(left)
            before = await say("n")
            await asyncio.sleep(1.0)
            after = await say("n", "p.poll()")
            await environment.close()
            return before, after

        before, after = converse(scene)
        assert int(after[0]) - int(before[0]) < 50 and after[1] == "-9"

    def test_arguments_that_are_none_are_told(self) -> None:
        assert {cells(given)[0] for given in ({}, {"code": 1}, {"code": "1", "x": 2})} == {
            "error: python takes one argument, `code`, which is text"
        }


LOST = "Everything that was defined, and every file, is gone; the next call starts afresh."


@sandboxed
class TestLimits:
    @pytest.mark.parametrize(
        ("cell", "why"),
        [
            ("while True: pass", "took longer than 1 s"),
            ("import time; time.sleep(99)", "took longer than 1 s"),
            ("while True: print('x' * (1 << 20))", "took longer than 1 s"),
            ("import os; os.kill(os.getpid(), 11)", "was killed by signal 11"),
            ("import os; os._exit(3)", "ended with exit status 3"),
            ("import os; os.closerange(0, 256)", "ended with exit status"),
        ],
    )
    def test_what_passes_them_ends_and_is_told(self, cell: str, why: str) -> None:
        said = cells("x = 1", cell, "x", "2", limits={"timeout_s": 1.0})
        assert said[1].startswith("error: the ") and why in said[1] and LOST in said[1]
        assert said[2].endswith("NameError: name 'x' is not defined") and said[3] == "2"

    def test_cpu_time_of_all_processes(self) -> None:
        busy = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
        (said,) = cells(busy, cpu_s=0.5, limits={"timeout_s": 60.0})
        assert said == f"error: the code used more than 0.5 s of CPU time. {LOST}"

    def test_memory_of_one_process_is_an_error_and_of_all_an_end(self) -> None:
        fork = "if os.fork() == 0:\n        x = bytearray(100 << 20)\n        break"
        many = f"import os, time\nfor _ in range(8):\n    {fork}\ntime.sleep(60)"
        said = cells("x = 1\ny = bytearray(1 << 30)", "x", many)
        assert said[0].endswith("MemoryError") and said[1] == "1"
        assert said[2] == f"error: the code used more than {MEMORY_MIB} MiB of memory. {LOST}"

    @pytest.mark.parametrize("places", [8, 64])
    def test_fifty_trajectories_at_once(self, places: int) -> None:
        most = 0

        async def one(begin: Any, number: int) -> list[str]:
            nonlocal most
            environment, say = await begin()
            said = await say(f"x = {number}")
            most = max(most, len({line for line in containers() if line.startswith("bwrap --unshare-")}))
            said += await say("import time; time.sleep(0.05); x")
            await environment.close()
            return said

        async def scene(begin: Any) -> list[list[str]]:
            return await asyncio.gather(*(one(begin, number) for number in range(50)))

        said = converse(scene, containers_at_once=places, limits={"timeout_s": 30.0})
        assert said == [["(no output)", str(number)] for number in range(50)]
        assert 1 < most <= places

    def test_calls_of_a_turn_that_wait_for_a_place_share_it_in_their_order(self) -> None:
        async def scene(begin: Any) -> list[str]:
            (one, say), (other, say_too) = await begin(), await begin()
            await say("1")
            waiting = asyncio.create_task(say_too("x = 5", *["x += 1"] * 10, "x"))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await one.close()
            said = await waiting
            await other.close()
            return said

        assert converse(scene, containers_at_once=1)[-1] == "15"

    def test_a_conversation_that_is_called_off_ends_its_cell(self) -> None:
        async def scene(begin: Any) -> None:
            environment, say = await begin()
            task = asyncio.create_task(say("while True: pass"))
            while not containers():
                await asyncio.sleep(0.01)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await environment.close()
            assert containers() == []
            _, say = await begin()
            assert await say("1") == ["1"]  # the only place is free again; closing the environments ends this one

        converse(scene, containers_at_once=1)


def forging(reply: str) -> str:
    """A supervisor that says this to the first cell."""
    return f"""
import os
os.write(0, b'"ready"' + bytes([10]))
os.read(0, 1 << 16)
left = {reply.encode()!r} + bytes([10])
while left: left = left[os.write(0, left):]
os.read(0, 1)
"""


THROWN_AWAY = ("a gigabyte in pieces", "a gigabyte of errors")
"""Output that a cell on a fast machine gets done in its time, and that nobody keeps."""


@sandboxed
class TestAttacks:
    @pytest.mark.skipif(platform.machine() != "x86_64", reason="some attacks name system calls by x86-64's numbers")
    @pytest.mark.parametrize("attack", ATTACKS)
    def test_nobody_gets_out(self, attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TANDEM_TEST_SECRET", "SECRET")
        secret = tmp_path / "secret"
        secret.write_text("kept")
        cell = ATTACKS[attack].replace("{secret!r}", repr(str(secret))).replace("{port}", "9")
        said = cells(f"{cell}\nprint(globals().get('escaped'))", "0", limits={"timeout_s": 1.0})
        assert attack in THROWN_AWAY or not said[0].endswith("True")
        assert secret.read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["secret"]
        assert cells("6 * 7") == ["42"]  # in the next trajectory

    @pytest.mark.parametrize(
        "reply",
        [
            *("no JSON", "[" * 100_000, "{}", "null", "1" * 5000, "x" * 1_000_000),
            json.dumps({"head": "x" * 200_000, "tail": "", "left_out": 0, "raised": False, "exit_code": None}),
            '{"head": 1, "tail": "", "left_out": 0, "raised": false, "exit_code": null}',
            '{"head": "", "tail": "", "left_out": "0", "raised": false, "exit_code": null}',
            '{"head": "", "tail": "", "left_out": 0, "raised": false, "exit_code": "0"}',
        ],
        ids=lambda reply: reply[:30],
    )
    def test_a_forged_report_is_an_interpreter_that_ended(self, reply: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """No cell has reached the descriptor on which the supervisor reports; this is what one could do with it."""
        monkeypatch.setattr(interpreter, "_PROGRAM", forging(reply))
        (said,) = cells("1")
        assert said.startswith("error: ") and LOST in said and len(said) < 300

    def test_half_of_a_surrogate_pair_is_no_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        report = {"head": "a\ud800", "tail": "", "left_out": 0, "raised": False, "exit_code": None}
        monkeypatch.setattr(interpreter, "_PROGRAM", forging(json.dumps(report)))
        assert cells("1") == ["a?"]

    def test_a_container_that_does_not_start_is_the_environment_s_failure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(interpreter, "_PROGRAM", "raise OSError('no room')")
        with pytest.raises(EnvironmentFailed, match=r"a sandbox did not start: [\s\S]*no room"):
            cells("1")


@sandboxed
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, None], ids=["killed", "Ctrl-C", "left without close"]
)
def test_containers_end_with_the_process(number: signal.Signals | None) -> None:
    program = f"""
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may have had it ignored
from tandem.sandbox.base import Limits
from tandem.sandbox.interpreter import Interpreters
from tandem.sandbox.local import LocalSandbox
interpreters = Interpreters(LocalSandbox(Limits(memory_mib={MEMORY_MIB})), 99, 99, 400)
made = [interpreters.make() for _ in range(2)]
for one in made: one.run("1")
if {number is not None}: threading.Thread(target=made[0].run, args=("while True: pass",), daemon=True).start()
print("there", flush=True)
if {number is not None}: threading.Event().wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        if number is not None:
            assert containers() != []
            process.send_signal(number)
        process.wait(60)
    wait_until(lambda: containers() == [])


def test_what_cannot_keep_state_or_is_not_there_is_refused() -> None:
    with pytest.raises(ValidationError, match="keeps nothing from one call to the next"):
        ToolsEnvironmentConfig.model_validate({"tools": [{"type": "python", "sandbox_fusion_url": "http://x"}]})
    config = {"type": "python", "packages": ["no-such-package"], "run_untrusted_code_without_sandbox": True}
    with pytest.raises(UserError, match="'no-such-package' is not installed"):
        make_environments(ToolsEnvironmentConfig.model_validate({"tools": [config]}))


def test_without_bubblewrap_it_is_refused_unless_the_risk_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"bubblewrap .* is not installed"):
        cells("1")
    said = cells("x = 2", "x", "import os; os._exit(0)", run_untrusted_code_without_sandbox=True, processes=4096)
    assert said[1] == "2" and LOST in said[2]
