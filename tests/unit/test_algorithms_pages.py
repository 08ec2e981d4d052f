"""Every algorithm and loss has a page: its formula, when to choose it, its file, a recipe that loads, and a curve.

A page may say `No paper: …` or `No curve: …` where there is none.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.discovery import modules_in
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "examples/sort4"))
from curves import commands

FOLDER = ROOT / "docs/algorithms"
NAMES = [module.__name__.rpartition(".")[2] for module in modules_in("tandem.algorithms.builtin")]


def page_of(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def chosen_by(config: TrainConfig) -> tuple[str, str]:
    return config.algorithm.type, config.algorithm.loss.type


def test_there_is_a_page_for_each_file_and_none_besides() -> None:
    assert {"grpo", "remax", "clip", "kl_cov"} <= set(NAMES)
    assert {path.stem for path in FOLDER.glob("*.md")} == {*NAMES, "README", "differences", "preference"}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_a_reader_needs_to_choose(name: str) -> None:
    text = page_of(name)
    assert re.search(r"arXiv:\d{4}\.\d{5}|19\d\d|^No paper: .", text, re.MULTILINE)
    assert "\nFormula" in text and "\nWhen: " in text and "\nOff-policy: " in text
    assert f"Code: [{name}.py](../../tandem/algorithms/builtin/{name}.py)" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_loads_and_chooses_it(name: str) -> None:
    recipe = yaml.safe_load(re.search(r"Recipe:\n\n    (.*)\n", page_of(name))[1])
    sections = {"model": {"path": "m"}, "data": {}, "trainer": {"run_dir": "r", "steps": 1}}
    assert name in chosen_by(load_config(TrainConfig, {**sections, **recipe}))


@pytest.mark.parametrize("name", NAMES)
def test_the_curve_is_of_three_seeds_and_of_this_algorithm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if re.search(r"^No curve: .", page_of(name), re.MULTILINE):
        assert name not in commands()
        return
    assert f"](curves/{name}.svg)" in page_of(name)
    assert (FOLDER / f"curves/{name}.svg").read_text().count("<polyline") == 3
    monkeypatch.chdir(ROOT)
    recipe, *overrides = commands()[name]
    assert name in chosen_by(load_config(TrainConfig, Path(recipe), overrides))
