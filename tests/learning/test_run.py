"""What a run leaves behind, and what it does not do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.checkpoint.draft import Draft
from tandem.cli import main
from tandem.cluster.inline import InlineCluster
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.placement import Placement, pools_of
from tandem.data.dataset import RLHFDataset
from tandem.errors import RewardShareExceeded
from tandem.jobs.inputs import read_inputs
from tandem.jobs.rl import RlJob
from tandem.reward.manager import RewardManager
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories
from tests.programs import TANDEM, Program

DIGITS = "def digits(completion):\n    return {'score': sum(map(str.isdigit, completion)) / 8, 'acc': 0.5}\n"


@pytest.fixture
def run(grpo_config: Path, sort4: Path, tmp_path: Path) -> Path:
    """The directory of a run that is rewarded for digits and validates on five rows."""
    (tmp_path / "reward.py").write_text(DIGITS)
    (tmp_path / "val.jsonl").write_text("".join((sort4 / "val.jsonl").read_text().splitlines(keepends=True)[:5]))
    tree = yaml.safe_load(grpo_config.read_text())
    tree["data"] |= {"val_files": [str(tmp_path / "val.jsonl")]}
    tree["reward"] = {"functions": [f"{tmp_path}/reward.py:digits"], "workers": 1}
    grpo_config.write_text(yaml.safe_dump(tree))
    return tmp_path / "run"


def train(run: Path, *overrides: str) -> int:
    return main(["train", str(run.with_name("config.yaml")), *overrides])


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_validation_answers_are_saved_with_the_columns_of_trajectories(run: Path) -> None:
    assert train(run, "trainer.eval_every=2", "generation.eval.samples=2", "generation.eval.temperature=1") == 0
    assert files(run / "validation") == [f"step_{step:06d}.parquet" for step in (0, 2, 3)]
    answers = read_trajectories(run / "validation/step_000002.parquet")
    assert answers.schema.equals(read_trajectories(run / "trajectories/step_000002.parquet").schema)
    assert answers["prompt_index"].to_pylist() == [row for row in range(5) for _ in range(2)]
    mean = sum(answers["reward"].to_pylist()) / len(answers)
    [record] = [record for record in read_metrics(run / "metrics.jsonl") if record["step"] == 2]
    assert record["val/sort4/reward/mean@2"] == pytest.approx(mean)
    assert answers["advantages"].null_count == answers["trainer_logprobs"].null_count == len(answers)


def test_eval_writes_its_answers(run: Path, tmp_path: Path) -> None:
    config = str(run.with_name("config.yaml"))
    assert main(["eval", config, "generation.eval.samples=1", "--answers", str(tmp_path / "answers.parquet")]) == 0
    assert len(read_trajectories(tmp_path / "answers.parquet")) == 5


def test_a_validation_whose_rewards_fail_is_a_failure(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text("def digits(completion):\n    raise RuntimeError('no luck')\n")
    config = str(run.with_name("config.yaml"))
    assert main(["eval", config, "generation.eval.samples=1", "--answers", str(tmp_path / "answers.parquet")]) == 1
    assert "of 5 trajectories lost their reward" in capsys.readouterr().err
    assert len(read_trajectories(tmp_path / "answers.parquet")) == 5
    assert train(run, "trainer.eval_every=1") == 1
    assert files(run / "validation") == ["step_000000.parquet"] and not (run / "trajectories").exists()


def test_steps_that_teach_nothing_are_told_once_among_lines_that_are_all_ours(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bars of libraries say how many `it/s` they load."""
    (tmp_path / "reward.py").write_text("def digits(completion):\n    return 1\n")
    assert train(run, "trainer.save_every=1") == 0
    assert [record["actor/trained_share"] for record in read_metrics(run / "metrics.jsonl")[-3:]] == [0, 0, 0]
    told = capfd.readouterr()
    assert (
        told.out.count("nothing was learned, for siblings all have the same reward") == 1
        and "step 1: nothing was learned, for siblings all have the same reward" in told.out
    )
    assert "it/s" not in told.out + told.err


def test_an_exit_of_the_users_own_is_a_failure(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "from tandem.algorithms.builtin.opo import OPO\n"
        "class Mine(OPO):\n"
        "    def estimate(self, rollouts, rewards_T):\n"
        "        sys.exit('my check failed')\n"
    )
    assert train(run, f"algorithm.type={tmp_path}/mine.py:Mine") == 1
    assert "my check failed" in capsys.readouterr().err


def test_the_newest_trajectories_stay(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(run, "trainer.steps=5", "trainer.eval_every=1", "trainer.keep_trajectories=2") == 0
    for directory in ("trajectories", "validation"):
        assert files(run / directory) == ["step_000004.parquet", "step_000005.parquet"]
    assert "trajectories: a step of " in capsys.readouterr().out
    assert train(run, "trainer.steps=6", "trainer.resume=true", "trainer.keep_trajectories=0") == 0
    assert len(files(run / "trajectories")) == 3
    assert train(run, "trainer.steps=7", "trainer.resume=true", "trainer.keep_trajectories_gib=1e-6") == 0
    assert files(run / "trajectories") == ["step_000007.parquet"]


def test_a_run_that_went_back_keeps_what_it_writes(run: Path) -> None:
    assert train(run, "trainer.steps=6", "trainer.save_every=2", "trainer.keep_last=9") == 0
    (run / "checkpoints/latest").write_text("step_000002\n")
    assert train(run, "trainer.steps=4", "trainer.resume=true", "trainer.keep_trajectories=3") == 0
    assert files(run / "trajectories") == [f"step_{step:06d}.parquet" for step in (2, 3, 4, 5, 6)]


def test_a_checkpoint_is_due_some_time_after_the_last(run: Path) -> None:
    assert train(run, "trainer.save_every_s=1e-6", "trainer.keep_last=9") == 0
    assert files(run / "checkpoints") == ["latest", "step_000001", "step_000002", "step_000003"]


def test_the_report_of_a_killed_run(run: Path) -> None:
    command = [TANDEM, "train", str(run.with_name("config.yaml"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = Program([*command, "trainer.steps=1000"], env=environment, stdout=subprocess.DEVNULL)
    while len(read_metrics(run / "metrics.jsonl")) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run / "report.html").exists()
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "reward/mean" in page and "samples" in page
    assert main(["report", str(run / "trajectories")]) == 2


@pytest.mark.parametrize("type_", ["grpo", "dapo"])
def test_failing_rewards_stop_the_run_before_anything_is_learned(type_: str, run: Path, tmp_path: Path) -> None:
    """`dapo` draws further prompts where rewards are lost: also those are not learned from."""
    (tmp_path / "reward.py").write_text(
        "def digits(completion):\n"
        "    if sum(map(ord, completion)) % 2: raise RuntimeError('no luck')\n"
        "    return sum(map(str.isdigit, completion)) / 8\n"
    )
    config = load_config(TrainConfig, run.with_name("config.yaml"), [f"algorithm.type={type_}"])
    inputs = read_inputs(config, RLHFDataset)
    placement = Placement(InlineCluster(), pools_of(config))
    with closing(RewardManager(config.reward)) as reward, closing(RlJob(config, inputs, placement, reward)) as job:
        run.mkdir()
        before = saved_weights(job, tmp_path / "before")
        with pytest.raises(RewardShareExceeded, match="of 32 trajectories lost their reward"):
            job.step(1)
        assert saved_weights(job, tmp_path / "after") == before
    rows: list[dict[str, Any]] = read_trajectories(run / "trajectories/step_000001.parquet").to_pylist()
    lost = [row for row in rows if row["reward"] is None]
    assert len(rows) == 32 and 6 < len(lost) < 32 and all("no luck" in row["error"] for row in lost)


def saved_weights(job: RlJob, directory: Path) -> dict[str, str]:
    """Digests of policy and optimizer."""
    draft = Draft(directory)
    job.save(draft)
    draft.complete()
    found = directory.rglob("*.safetensors")
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in found}


LABEL = "def label(completion, ground_truth):\n    return {0} + float(ground_truth) + 0.1 * len({{*completion}})\n"


def test_kept_scores_are_those_of_the_row_that_they_were_given_for(
    grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps ahead, so that three are kept; back to step 2, then the function is edited, and then the data."""
    run, rows, function = tmp_path / "run", tmp_path / "rows.jsonl", tmp_path / "label.py"
    tree = yaml.safe_load(grpo_config.read_text())
    tree["data"] |= {"train_files": [str(rows)], "val_files": []}
    tree["reward"] = {"functions": [f"{function}:label"], "workers": 1}
    tree["generation"]["partial_rollouts"] = False
    tree["trainer"] |= {"max_staleness": 2, "steps": 6, "save_every": 1, "keep_last": 9}
    grpo_config.write_text(yaml.safe_dump(tree))

    def label_rows(label: int) -> None:
        written = [{"prompt": f"{number}=", "ground_truth": label} for number in range(40)]
        rows.write_text("".join(json.dumps(row) + "\n" for row in written))

    def rewards(*overrides: str) -> list[int]:
        """Of steps 3 to 6, in tens."""
        (run / "checkpoints/latest").write_text("step_000002\n")
        assert train(run, "trainer.resume=true", *overrides) == 0
        return [round(record["reward/mean"], -1) for record in read_metrics(run / "metrics.jsonl")[-4:]]

    label_rows(0)
    function.write_text(LABEL.format(0))
    assert train(run) == 0
    function.write_text(LABEL.format(50))
    assert rewards() == [0, 0, 0, 50], "the code is new, the scores of kept groups are not"
    assert rewards("trainer.save_rollouts=false") == [50, 50, 50, 50]
    label_rows(20)
    (run / "checkpoints/latest").write_text("step_000002\n")
    assert train(run, "trainer.resume=true") == 2
    told = capsys.readouterr().err
    assert "which has changed since (`ground_truth`), as 11 more rows have; put the data back" in told
    assert rewards("trainer.save_rollouts=false") == [70, 70, 70, 70]


def test_a_run_goes_on_from_object_storage_on_another_machine(run: Path, tmp_path: Path) -> None:
    """As the undisturbed one, bit for bit, although nothing but the copy is left of what was done."""
    assert train(run, "trainer.steps=3") == 0
    config, moved, url = str(run.with_name("config.yaml")), tmp_path / "moved", f"file://{tmp_path}/bucket"
    first = ["train", config, f"trainer.run_dir={tmp_path}/first", "trainer.steps=1", f"trainer.checkpoint_url={url}"]
    assert main(first) == 0
    shutil.rmtree(tmp_path / "first")
    assert main(["train", "--resume", url, f"trainer.run_dir={moved}", "trainer.steps=3"]) == 0
    steps = [record["step"] for record in read_metrics(moved / "metrics.jsonl")]
    last = moved / "checkpoints/step_000003"
    assert steps == [2, 3] and (tmp_path / "bucket/checkpoints/latest").read_text() == "step_000003\n"
    for file in last.rglob("*.safetensors"):
        same = run / "checkpoints/step_000003" / file.relative_to(last)
        assert file.read_bytes() == same.read_bytes(), file
