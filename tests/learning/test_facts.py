"""examples/facts: what is asked can be known from the corpus alone, and the search of a run is the index's own."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path

import pytest

from examples.facts import task
from tandem.cli import main
from tandem.search.index import open_index, shown
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories, trajectories_path
from tests.conftest import ROOT

SFT_STEPS = 60


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("facts")
    task.make(folder, seed=0, sft_rows=SFT_STEPS * 64)
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_nothing_that_is_asked_is_known_from_elsewhere(facts: Path) -> None:
    train, val = ({row["ground_truth"] for row in rows(facts / f"{name}.jsonl")} for name in ("train", "val"))
    corpus, irrelevant = ({row["text"] for row in rows(facts / f"{name}.jsonl")} for name in ("corpus", "irrelevant"))
    demonstrated = {row["messages"][1]["content"].rstrip("?") for row in rows(facts / "sft.jsonl")}
    assert train | val == corpus and len(train) + len(val) == len(corpus) and len(irrelevant) == task.OTHER
    words = [*" ".join(corpus | irrelevant).replace(":", "").split(), *demonstrated]
    assert len(set(words)) == len(words) == 2 * len(corpus | irrelevant) + SFT_STEPS * 64
    for row in rows(facts / "val.jsonl"):
        [asked] = row["prompt"]
        assert row["ground_truth"].startswith(asked["content"].replace("?", ": "))


def test_the_right_search_finds_the_fact_and_it_alone(facts: Path, tmp_path: Path) -> None:
    for name in ("corpus", "irrelevant"):
        assert main(["search", "index", str(facts / f"{name}.jsonl"), str(tmp_path / name)]) == 0
    relevant, irrelevant = open_index(tmp_path / "corpus"), open_index(tmp_path / "irrelevant")
    for row in rows(facts / "val.jsonl"):
        word = row["prompt"][0]["content"]
        assert shown(relevant.search(word, 3)).partition("] ")[2] == row["ground_truth"]
        assert shown(irrelevant.search(word, 3)) == "Nothing found."


@pytest.mark.nightly
def test_in_seconds_a_policy_learns_to_search_for_what_is_there(
    facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form is learned in seconds, copying a word is not: so this index knows letters, and finding is what pays."""
    monkeypatch.chdir(ROOT)
    task.write_rows(tmp_path / "letters.jsonl", ({"id": a, "text": f"{a}: begins"} for a in string.ascii_lowercase))
    assert main(["search", "index", str(tmp_path / "letters.jsonl"), str(tmp_path / "index")]) == 0
    (tmp_path / "reward.py").write_text("def found(completion, ground_truth):\n    return 'begins' in completion\n")
    sft = [f"model.path={facts}/model", f"data.train_files=[{facts}/sft.jsonl]", f"trainer.steps={SFT_STEPS}"]
    assert main(["sft", "recipes/facts_sft.yaml", *sft, f"trainer.run_dir={tmp_path}/sft"]) == 0
    grpo = [
        f"model.path={tmp_path}/sft", f"data.train_files=[{facts}/train.jsonl]", "data.val_files=[]",
        "trainer.steps=10", "trainer.eval_every=0", f"trainer.run_dir={tmp_path}/run",
        f"conversation.environment.tools=[{{type: search, index: {tmp_path}/index, most_passages: 1}}]",
        f"reward.functions=[{tmp_path}/reward.py:found]",
    ]  # fmt: skip
    assert main(["train", "recipes/facts_grpo.yaml", *grpo]) == 0
    records = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if record["step"] > 0]
    assert records[0]["reward/mean"] < 0.15 and records[-1]["reward/mean"] > 0.5
    assert max(record["rollout/mismatch_max"] for record in records) < 1e-4
    check_results(tmp_path)


def check_results(folder: Path) -> None:
    """What the policy was told is what the index finds for its query."""
    index, told = open_index(folder / "index"), []
    for row in read_trajectories(trajectories_path(folder / "run", 10)).to_pylist():
        messages = json.loads(row["messages"])
        for said, result in itertools.pairwise(messages):
            if result["role"] == "tool":
                assert result["content"] == shown(
                    index.search(said["tool_calls"][0]["function"]["arguments"]["query"], 1)
                )
                told.append(result["content"])
    assert "Nothing found." in told and "[a] a: begins" in told
