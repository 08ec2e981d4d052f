"""Sort4 is learned as well from answers that are up to k steps older, and would not if nothing corrected for it.

`examples/sort4/staleness.py` has the same on three seeds and draws the curves of docs/async.md.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

import tandem
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT, load_file


@pytest.fixture(scope="module")
def example() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples/sort4"))
        return load_file(ROOT / "examples/sort4/staleness.py")


def train(config: tandem.TrainConfig) -> list[dict[str, float]]:
    assert tandem.train(config)
    return [record for record in read_metrics(config.trainer.run_dir / "metrics.jsonl") if record["step"] > 0]


def configured(example: ModuleType, quickstart: Path, run: Path, staleness: int) -> tandem.TrainConfig:
    """The training of the quickstart, from its warmed model."""
    warmup = quickstart.with_name(f"{quickstart.name}-warmup")
    model = warmup / "sft/checkpoints/step_000350/model"
    return example.configuration(run, model, warmup / "task", seed=0, staleness=staleness)


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_it_learns_from_older_answers(example: ModuleType, quickstart: Path, tmp_path: Path, staleness: int) -> None:
    """For k = 0 tests/learning/test_quickstart.py has it."""
    records = train(configured(example, quickstart, tmp_path / "run", staleness))
    assert max(record["rollout/staleness/max"] for record in records) == staleness
    assert fmean(record["rollout/staleness/mean"] for record in records) > 0.75 * staleness
    assert records[-1]["val/sort4/acc/mean@4"] >= 0.88


@pytest.mark.nightly
def test_it_does_not_where_nothing_corrects_for_their_age(
    example: ModuleType, quickstart: Path, tmp_path: Path
) -> None:
    """The control. A configuration that says so is refused, so this one is made past the check."""
    config = configured(example, quickstart, tmp_path / "run", staleness=4)
    correction = config.algorithm.rollout_correction.model_dump() | {"skip_old_logprobs": False}
    with pytest.raises(ValueError, match="leaves nothing with trainer"):
        tandem.TrainConfig.model_validate(
            config.model_dump() | {"algorithm": config.algorithm.model_dump() | {"rollout_correction": correction}}
        )
    records = train(example.uncorrected(config))
    validated = [record["val/sort4/acc/mean@4"] for record in records if "val/sort4/acc/mean@4" in record]
    assert len(validated) == 6 and fmean(validated) < 0.6  # 0.29 to 0.45 in six runs; the others are above 0.9
