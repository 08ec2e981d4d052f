"""Programs of one's own, the examples among them: bad arguments and keys end with one message, as `tandem` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

EXAMPLES = ("best_of_n.py", "ray_ppo_trainer.py")
PROGRAM = """
import tandem

def main(config):
    raise {raised}

tandem.run_program(tandem.TrainConfig, main)
"""


def run(program: Path, *arguments: str) -> tuple[int, str]:
    """Exit status, and what the program wrote to standard error."""
    done = subprocess.run([sys.executable, str(program), *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("example", ["best_of_n.py", pytest.param("ray_ppo_trainer.py", marks=pytest.mark.nightly)])
def test_an_example_without_arguments_says_how_it_is_called(example: str) -> None:
    status, told = run(ROOT / "examples" / example)
    assert (status, told) == (
        2,
        f"{example}: no configuration given; usage: {example} CONFIG.yaml [section.key=value …]\n",
    )


def test_help_is_the_programs_own_docstring(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text('"""Count to three."""\n' + PROGRAM.format(raised="SystemExit(3)"))
    done = subprocess.run([sys.executable, str(program), "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "usage: program.py CONFIG.yaml [section.key=value …]\n\nCount to three.\n"


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_mistake_is_told_in_one_message(example: str, grpo_config: Path, tmp_path: Path) -> None:
    wrong = ["trainer.stepz=3", "data.train_files=[nowhere.parquet]"]
    status, told = run(ROOT / "examples" / example, str(grpo_config), *wrong)
    assert status == 2 and told.startswith(f"{example}: {grpo_config}: 2 errors in the configuration\n"), told
    assert "trainer.stepz: unknown key; did you mean trainer.steps?" in told and "nowhere.parquet" in told
    assert "Traceback" not in told and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        ("tandem.UserError('give another')", 2, "program.py: give another\n"),
        ("tandem.WorkerLost('rank 1 died')", 1, "program.py: rank 1 died\n"),
        ("SystemExit(3)", 3, ""),
    ],
)
def test_an_error_of_tandem_is_a_message(
    grpo_config: Path, tmp_path: Path, raised: str, status: int, told: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(raised=raised))
    assert run(program, str(grpo_config)) == (status, told)


def test_any_other_error_keeps_its_traceback(grpo_config: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(raised="KeyError('mine')"))
    status, told = run(program, str(grpo_config))
    assert status == 1 and told.startswith("Traceback") and told.endswith("KeyError: 'mine'\n")
