"""A small number of what `disturb_mcp.py` does."""

from __future__ import annotations

import asyncio

import pytest
from disturb_mcp import MISFORTUNES, disturb


@pytest.mark.parametrize("way", ["stdio", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("http", "old"))])
def test_every_call_ends_whatever_the_server_does(way: str) -> None:
    ended = asyncio.run(disturb(way, len(MISFORTUNES), seed=0))
    assert ended["die EnvironmentFailed"] >= 1
