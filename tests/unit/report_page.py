"""A report as the data that it embeds, and as a browser draws it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def embedded(report: Path) -> dict[str, Any]:
    """What the page is drawn from."""
    found = re.search(r"^const run = (.*);$", report.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return json.loads(found[1])


class Elements(HTMLParser):
    """Tags with their attributes and texts, as a browser has built them."""

    def __init__(self, page: str):
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.texts: list[tuple[str, str]] = []
        """(tag and class, text) of each text."""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, attributes = self.seen[-1]
        self.texts.append((f"{tag}.{attributes.get('class', '')}", data))
        self.text += data


def drawn_page(report: Path, profile: Path) -> Elements:
    """What `<main>` holds after the page's script has run. Skips the test where there is no browser."""
    if CHROMIUM is None:
        pytest.skip("no Chromium to draw the page with")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"]
    page = subprocess.run(
        [CHROMIUM, *flags, "--virtual-time-budget=3000", "--dump-dom", f"file://{report}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    return Elements(page[page.index("<main>") : page.index("</main>")])
