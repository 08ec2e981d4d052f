"""The generated pages and tables of docs/ are what scripts/pages.py writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.pages import PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_is_what_the_code_says(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == PAGES[page](), "run: .venv/bin/python scripts/pages.py"
