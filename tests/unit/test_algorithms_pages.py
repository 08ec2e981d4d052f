"""Every algorithm and loss has a page, with a formula, a file, a recipe that loads, and a curve of three seeds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from tandem.config import algorithms
from tandem.config.tree import TrainConfig
from tests.conftest import ROOT

FOLDER = ROOT / "docs/algorithms"
PAGES = sorted(set(FOLDER.glob("*.md")) - {FOLDER / f"{name}.md" for name in ("README", "differences", "preference")})


def types_of(*kinds: type[algorithms.Section]) -> set[str]:
    return {name for kind in kinds for name in get_args(kind.model_fields["type"].annotation)}


def test_each_has_a_page() -> None:
    """`clip` is PPO's own loss; both forms of REINFORCE++ are on one page."""
    advantages = types_of(*get_args(get_args(algorithms.BuiltInConfig)[0]))
    losses = types_of(*get_args(algorithms.RatioLoss), *get_args(algorithms.LikelihoodLoss))
    assert {"grpo", "remax"} <= advantages and {"gspo", "reinforce"} <= losses
    missing = (advantages | losses) - {path.stem for path in PAGES}
    assert missing == {"clip", "reinforce_plus_plus_baseline"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.search(r"arXiv:\d{4}\.\d{5}|19\d\d", text) and "\nFormula" in text and "\nWhen: " in text
    code = re.search(r"Code: (.*)", text)[1]
    files = re.findall(r"\w+\.py", code.partition(", losses")[0])
    assert files and all((ROOT / "tandem/algorithms" / name).is_file() for name in files)
    recipe = yaml.safe_load(re.search(r"Recipe:\n\n    (.*)\n", text)[1])
    sections = {"model": {"path": "m"}, "data": {}, "trainer": {"run_dir": "r", "steps": 1}}
    chosen = TrainConfig.model_validate({**sections, **recipe}).algorithm
    assert page.stem in (chosen.type, chosen.loss.type)
    curves = re.findall(r"\]\((curves/\w+\.svg)\)", text)
    assert curves and all((FOLDER / name).read_text().count("<polyline") == 3 for name in curves)
