"""examples/quickstart.ipynb in a kernel, as its reader runs it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell printed, and what it ended with."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


@pytest.mark.nightly
def test_the_notebook_trains_in_its_kernel_and_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PYTHONPATH", str(ROOT)), ("OMP_NUM_THREADS", "1"), ("IPYTHONDIR", str(tmp_path / "ipython"))):
        monkeypatch.setenv(name, value)
    shutil.copytree(ROOT / "examples/sort4", tmp_path / "sort4")
    notebook = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    _, ten_lines, results, callbacks = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert len([line for line in ten_lines.source.splitlines() if line]) <= 10
    assert re.search(r"step 20/20 ━+ 0:00:00 left\n.*reward/mean=.*finished, 0 s", printed(ten_lines), re.DOTALL)
    assert re.search(r"<Run .*/runs/notebook: finished at step 20, best reward/mean", printed(results))
    rewards = [record["reward/mean"] for record in read_metrics(tmp_path / "runs/notebook/metrics.jsonl")]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5]), rewards
    assert f"finished after 20 steps: reward {rewards[0]:.2f} -> {rewards[-1]:.2f}" in printed(results)
    assert "is enough: stopping after this step" in printed(callbacks) and "saved step_" in printed(callbacks)
    assert re.search(r"<Run .*/runs/notebook-two: stopped at step", printed(callbacks))
