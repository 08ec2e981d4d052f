"""A server among clients that hold it up: slow ones, greedy ones, and one that asks for little."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.conftest import ROOT, load_file


@pytest.mark.parametrize(
    ("server", "seconds", "slow"),
    [
        ("search", 2, 90),
        ("serve", 4, 90),
        pytest.param("search", 60, 2000, marks=pytest.mark.nightly),
        pytest.param("serve", 60, 2000, marks=pytest.mark.nightly),
    ],
)
def test_a_good_client_is_served_among_hostile_ones(tmp_path: Path, server: str, seconds: float, slow: int) -> None:
    clients = load_file(ROOT / "benchmarks/hostile_clients.py")
    with clients.started(tmp_path, server) as target:
        found = asyncio.run(clients.measure(target, seconds, slow))
    assert found["good"] > 0 and found["failed"] == 0, found
    assert not any(name.endswith((": 200", ": 500")) for name in found["greedy"]), found
    assert (found["exit_status"], found["log_bytes"] < 10_000) == (0, True), found
