"""README.zh.md says what README.md says: the same commands, the same tables, no link that is not there."""

from __future__ import annotations

import re

from tests.conftest import ROOT

ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))


def _commands(text: str) -> list[str]:
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines]


def _first_cells(text: str) -> list[str]:
    """What a table's rows are about, where it is spelled as code."""
    return re.findall(r"^\| (`[^|]*?) \|", text, re.MULTILINE)


def test_both_readmes_have_the_same_commands_and_rows() -> None:
    assert _commands(ENGLISH) == _commands(CHINESE)
    assert _first_cells(ENGLISH) == _first_cells(CHINESE)
    assert len(re.findall("^## ", ENGLISH, re.MULTILINE)) == len(re.findall("^## ", CHINESE, re.MULTILINE))


def test_what_the_chinese_readme_links_to_is_linked_in_the_english_one() -> None:
    links = re.findall(r"\]\(([^)#]+)", CHINESE)
    assert set(links) - {"README.md"} <= set(re.findall(r"\]\(([^)#]+)", ENGLISH))
    assert all((ROOT / link).exists() for link in links)
