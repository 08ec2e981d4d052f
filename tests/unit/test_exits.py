"""os._exit in the user's code: told with its function, file and status, and the process lives, or says why it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem import files
from tandem.errors import UserError
from tandem.exits import ProcessExit, no_exit
from tandem.files import load_named
from tandem.rollout.agents import Access, FunctionAgent
from tandem.rollout.environment import EnvironmentFailed
from tests.conftest import ROOT

AGENT = """
import asyncio, os

def plain(row, base_url, api_key):
    os._exit(3)

async def waits(row, base_url, api_key):
    await asyncio.gather(late())

async def late():
    await asyncio.sleep(0)
    os._exit(4)

def lazy(row, base_url, api_key):
    async def ends():
        os._exit(5)
    return ends()
"""
ROW: Mapping[str, Any] = {}


@pytest.mark.parametrize(("name", "told"), [("plain", "plain"), ("waits", "late"), ("lazy", "lazy.<locals>.ends")])
def test_an_agent_that_ends_its_process_fails_alone(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    agent = FunctionAgent(f"{tmp_path}/agent.py:{name}", "conversation.environment.function")
    with pytest.raises(EnvironmentFailed, match=rf"{told} \({tmp_path}/agent.py, line \d+\) called os._exit\([345]\)"):
        asyncio.run(agent.run(ROW, "?", Access("http://nowhere", "key")))


def test_a_file_that_ends_the_process_that_imports_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(6)\ndef f(completion): return 1.0\n")
    with pytest.raises(UserError, match=r"importing .*ends.py failed(.|\n)*line 2\) called os._exit\(6\)"):
        load_named(f"{tmp_path}/ends.py:f", "reward function")


def test_elsewhere_the_process_ends_and_says_who_ended_it() -> None:
    """In threads of the user's code, and without a word in processes that it forks."""
    program = (
        "import os, threading\n"
        "from tandem.exits import no_exit\n"
        "def ends():\n"
        "    os._exit(7)\n"
        "with no_exit():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os._exit(8)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8\n"
        "    thread = threading.Thread(target=ends)\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 7 and ended.stderr == "ends (<string>, line 4) called os._exit(7): this process ends\n"


def test_after_it_all_is_as_before() -> None:
    with pytest.raises(ProcessExit), no_exit():
        os._exit(1)
    with no_exit(), no_exit():
        pass
    with pytest.raises(ProcessExit), no_exit():
        os._exit(1)


def test_a_file_that_hangs_while_it_is_imported_is_told_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hangs.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(files, "_TOLD_S", 0.05)
    with pytest.raises(UserError, match="see what the file waits for") as raised:
        load_named(f"{tmp_path}/hangs.py:f", "reward function", 0.3)
    assert 'hangs.py", line 2' in str(raised.value)
    assert f"importing {tmp_path}/hangs.py has taken 0 s so far" in capsys.readouterr().err
