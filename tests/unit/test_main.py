"""`python -m tandem`, as docs/debugging.md has it, and the command's first moments."""

import signal
import subprocess
import sys

import pytest


def test_a_debugger_can_start_the_command_line() -> None:
    command = [sys.executable, "-m", "pdb", "-c", "continue", "-m", "tandem", "--version"]
    ended = subprocess.run(command, input="q\n", capture_output=True, text=True, check=False)
    assert "tandem 0." in ended.stdout, ended.stderr


@pytest.mark.parametrize("module", ["tandem.errors", "tandem.commands.shared", "tandem.simulation.command"])
def test_ctrl_c_while_it_is_imported_is_a_line_and_no_traceback(module: str) -> None:
    program = f"""
import os, runpy, signal, sys
from importlib.abc import MetaPathFinder

class Interrupts(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
sys.meta_path.insert(0, Interrupts())
sys.argv = ["tandem", "--version"]
runpy.run_module("tandem", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 128 + signal.SIGINT, ended.stderr
    assert ended.stderr == "interrupted before anything was started\n" and not ended.stdout
