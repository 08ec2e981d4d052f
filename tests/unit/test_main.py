"""`python -m tandem`, as docs/debugging.md has it."""

import subprocess
import sys


def test_a_debugger_can_start_the_command_line() -> None:
    command = [sys.executable, "-m", "pdb", "-c", "continue", "-m", "tandem", "--version"]
    ended = subprocess.run(command, input="q\n", capture_output=True, text=True, check=False)
    assert "tandem 0." in ended.stdout, ended.stderr
