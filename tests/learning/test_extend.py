"""What docs/extend.md shows works as shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tandem.cli import main
from tests.conftest import ROOT

PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")


def test_an_algorithm_of_ones_own_trains(grpo_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, algorithm = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("python", "yaml"))
    assert len(code.splitlines()) <= 40
    (tmp_path / "median.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    grpo_config.write_text(yaml.safe_dump(yaml.safe_load(grpo_config.read_text()) | yaml.safe_load(algorithm)))
    assert main(["train", str(grpo_config)]) == 0
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 3 and all("median/clipped" in record for record in records)
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["algorithm"]["options"] == {"limit": 0.5} and config["algorithm"]["loss"]["type"] == "cispo"


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("nowhere.py:Mine", "nowhere.py:Mine: there is no file"),
        ("json:loads", "there is no such subclass of tandem.algorithms.PolicyGradient"),
        ("tandem.algorithms:Missing", "there is no such subclass of tandem.algorithms.PolicyGradient"),
    ],
)
def test_a_wrong_name_is_told_before_the_run(
    grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], reference: str, reason: str
) -> None:
    assert main(["train", str(grpo_config), f"algorithm={{type: '{reference}'}}"]) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "run").exists()
