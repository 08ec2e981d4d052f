"""How long each file of tests takes: a table at the end of a run, and the order in which files are handed out.

`tests/seconds.txt` has what the slower files took when somebody last ran pytest with `--keep-seconds`; workers get the
slowest ones first, so that none is left alone with a long one. Files that start the same expensive thing go to one
worker.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_KEPT = Path(__file__).with_name("seconds.txt")
_TOGETHER = {
    "tests/contract/test_cluster.py": "nodes of Ray",
    "tests/unit/test_cluster_ray.py": "nodes of Ray",
    "tests/learning/test_quickstart.py": "the quickstart",
    "tests/learning/test_staleness.py": "the quickstart",
}
"""Files that share a fixture of the session, by what it starts."""
_SHOWN_S = 2.0
"""Files that take less are summed up in one line."""


class Seconds:
    """Seconds of set-up, test and tear-down, by file."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._seconds: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._tests[file] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        shown = [(file, s) for file, s in self._seconds.most_common() if s >= _SHOWN_S]
        rest = self._seconds.total() - sum(s for _, s in shown)
        terminalreporter.section("seconds by file")
        for file, s in shown:
            terminalreporter.line(f"{s:8.1f} s  {self._tests[file]:5} tests  {file}")
        terminalreporter.line(f"{rest:8.1f} s  in {len(self._seconds) - len(shown)} files below {_SHOWN_S:g} s")
        terminalreporter.line(f"{self._seconds.total():8.1f} s  {self._tests.total():5} tests")
        if self._keep:
            _KEPT.write_text("".join(f"{s:.0f} {file}\n" for file, s in shown))


def slowest_first(items: list[pytest.Item]) -> None:
    """Order the items by what their files took, the rest as they are."""
    known = {}
    for line in _KEPT.read_text().splitlines():
        seconds, file = line.split()
        known[file] = float(seconds)
    items.sort(key=lambda item: -known.get(item.nodeid.partition("::")[0], 0.0))


def scheduler_by_file(config: pytest.Config, log: Any) -> Any:
    """What `--dist loadfile` does, with files of `_TOGETHER` as one."""
    from xdist.scheduler import LoadFileScheduling  # which environments with one suite do not have

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _TOGETHER.get(file, file)

    return ByFile(config, log)
