"""Whole runs on one pool with an engine in a process of its own, which sleeps while models train or score.

The engine is the stepped one: its answers are known, and so is what each token must say of its version.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from stepped import answer_length, expected_tokens, write_diary
from transformers import AutoModelForTokenClassification, AutoTokenizer

from tandem.config.generation import VllmGenerationConfig
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.pools import Role
from tandem.generation import start
from tandem.generation.replica import ReplicaSpec
from tandem.generation.replicas import ReplicatedEngine
from tandem.jobs.preflight import packages
from tandem.jobs.trainer import Trainer
from tandem.tracking.jsonl import read_metrics
from tandem.types import Request, SamplingParams
from tandem.weights.shared_memory import SharedMemorySync
from tandem.workers.host import WorkerContext
from tandem.workers.rollout import TRAIN, RolloutSpec, RolloutWorker, seeded_request
from tandem.workers.training import TrainWorker

DIARY = "TANDEM_TEST_DIARY"
STEPS, PROMPTS, SAMPLES, TOKENS = 8, 3, 2, 400
_BETWEEN_FAULTS_S = 0.8
"""Longer than the longest answer takes, of which a lost engine leaves nothing."""
SPLIT = {"pools": {"training": [1], "generation": [1]}, "roles": {"rollout": "generation"}}


class DiaryWorker(TrainWorker):
    """Writes down when its model leaves the devices and returns to them."""

    def offload(self) -> None:
        super().offload()
        write_diary(self._diary, f"{self.context.name} leaves")

    def onload(self) -> None:
        write_diary(self._diary, f"{self.context.name} returns")
        super().onload()

    def learn(self, *arguments: Any) -> Any:
        write_diary(self._diary, f"{self.context.name} learns")
        return super().learn(*arguments)

    def values(self, *arguments: Any) -> Any:
        write_diary(self._diary, f"{self.context.name} scores")
        return super().values(*arguments)

    @property
    def _diary(self) -> Path:
        return diary_of(self.spec.model.path)


class SteppedRolloutWorker(RolloutWorker):
    """Its engines are stepped ones, in whatever process it is."""

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start, "start_engine", partial(stepped_engine, diary_of(spec.model.path)))
            super().__init__(context, spec)


def diary_of(model: Path) -> Path:
    """Models of one test lie beside one another, and so does its diary."""
    return model.parent / "diary"


def stepped_engine(
    diary: Path, model: Any, config: VllmGenerationConfig, tokenizer: Any, source: Any, *_: Any
) -> ReplicatedEngine:
    """In the place of `start_engine`."""
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    spec = ReplicaSpec("stepped", "DiaryEngine", (diary,), {}, here)
    return ReplicatedEngine(spec, config, SharedMemorySync(1 << 20, source=source), tokenizer)


@pytest.fixture
def models(sort4: Path, tmp_path: Path) -> Path:
    """A directory with `policy` and a reward model, `judge`."""
    torch.manual_seed(0)
    judge: Any = AutoModelForTokenClassification.from_pretrained(sort4 / "model", num_labels=1)
    torch.nn.init.normal_(judge.score.weight)
    judge.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(sort4 / "model").save_pretrained(tmp_path / "judge")
    (tmp_path / "policy").symlink_to(sort4 / "model")
    (tmp_path / "reward.py").write_text(
        "def half_are_alike(completion, ground_truth):\n"
        "    return 0.0 if int(ground_truth) % 2 else float(len(completion))\n"
    )
    return tmp_path


def run(models: Path, grpo_config: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[dict[str, Any]]:
    """The rows that were trained on."""
    monkeypatch.setattr(packages, "check_vllm", lambda found: None)
    overrides = [
        f"model.path={models}/policy",
        "data.val_files=[]",
        f"data.prompts_per_step={PROMPTS}",
        "data.shuffle=false",
        f"algorithm.group_size={SAMPLES}",
        "generation={type: vllm, health_timeout_s: 5}",
        f"generation.max_response_tokens={TOKENS}",
        f"trainer.steps={STEPS}",
        "trainer.eval_every=0",
        "reward.workers=1",
        *settings,
    ]
    config = load_config(TrainConfig, grpo_config, overrides)
    kinds = {role: DiaryWorker for role in (Role.Actor, Role.RewardModel)} | {Role.Rollout: SteppedRolloutWorker}
    assert Trainer(config, workers=kinds).fit()
    files = sorted((config.trainer.run_dir / "trajectories").glob("*.parquet"))
    assert len(files) == STEPS
    return [row for file in files for row in pq.read_table(file).to_pylist()]


class Faults:
    """While it is entered, an engine fails as soon as one is there to take the fault, and after a moment another."""

    def __init__(self, fault: Path, most: int) -> None:
        self.made = 0
        self._fault, self._most = fault, most
        self._over = Event()
        self._thread = Thread(target=self._strike)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _strike(self) -> None:
        while self.made < self._most and not self._over.is_set():
            if not self._fault.exists():
                self._fault.write_text("raise")
                self.made += 1
            self._over.wait(_BETWEEN_FAULTS_S)


def check_answers(rows: list[dict[str, Any]], staleness: int) -> int:
    """Every answer is whole, and each token is of the version that it names; how many are of several versions."""
    mixed = 0
    for row in rows:
        versions = np.array(row["policy_versions"])
        assert (np.diff(versions) >= 0).all()
        assert row["step"] - 1 - staleness <= versions[0] and versions[-1] <= row["step"] - 1
        np.testing.assert_array_equal(row["rollout_logprobs"], -1.0 - versions)
        step, place = divmod(row["prompt_index"], PROMPTS)
        prompt = np.array(row["prompt_ids"], np.int32)
        seed = seeded_request(None, SAMPLES, 0, TRAIN, step + 1, place).seeds[row["sample"]]  # type: ignore[arg-type]
        asked = Request(prompt, SamplingParams(max_tokens=answer_length(seed, TOKENS)), (seed,))
        assert row["response_ids"] == expected_tokens(asked, 0)
        mixed += len({*versions.tolist()}) > 1
    return mixed


def check_diary(diary: Path) -> list[str]:
    """Nobody takes devices that somebody else is on, and weights come in order; the entries."""
    entries = diary.read_text().splitlines()
    on_devices, served = {entry.split()[0] for entry in entries}, -1
    for entry in entries:
        name, did, *version = entry.split()
        if did in ("returns", "wakes"):
            assert on_devices <= {name}, f"{entry}, where {on_devices} are"
            on_devices.add(name)
        elif did in ("leaves", "sleeps"):
            on_devices.discard(name)
        elif did in ("learns", "scores"):
            assert on_devices == {name}, f"{entry}, where {on_devices} are"
        else:
            assert did == "serves" and int(*version) == served + 1
            served += 1
    assert served == STEPS
    return entries


@pytest.mark.parametrize(("staleness", "sleep"), [pytest.param(1, "cache", marks=pytest.mark.nightly), (2, "weights")])
def test_what_runs_is_kept_while_models_train_and_goes_on_after_the_publish(
    models: Path, grpo_config: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, sleep: str
) -> None:
    rows = run(
        models, grpo_config, monkeypatch, f"trainer.max_staleness={staleness}", f"generation.sleep={sleep}",
        "reward.functions=[" + str(models / "reward.py") + ":half_are_alike]",
    )  # fmt: skip
    assert [row["prompt_index"] for row in rows[::SAMPLES]] == list(range(STEPS * PROMPTS))
    assert check_answers(rows, staleness) > 0
    entries = check_diary(models / "diary")
    start = entries.index("engine serves 1")
    assert entries[start : start + 6] == [
        "engine serves 1", "actor leaves", "engine wakes", "engine sleeps", "actor returns", "actor learns",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "placement", [pytest.param({}, id="one pool"), pytest.param(SPLIT, id="two pools", marks=pytest.mark.nightly)]
)
def test_engines_that_are_lost_cost_no_answer_while_those_of_later_steps_are_made(
    models: Path, grpo_config: Path, monkeypatch: pytest.MonkeyPatch, placement: dict[str, Any]
) -> None:
    """What a lost engine had begun goes on elsewhere, by the weights that are served then."""
    faults = Faults(models / "fault", most=2)  # on two pools the last engine's end would be the end of the weights
    with faults:
        rows = run(
            models, grpo_config, monkeypatch, "trainer.max_staleness=2", "generation.replicas=3",
            "generation.max_restarts=100", f"placement={placement}",
            "reward.functions=[" + str(models / "reward.py") + ":half_are_alike]",
        )  # fmt: skip
    assert [row["prompt_index"] for row in rows[::SAMPLES]] == list(range(STEPS * PROMPTS))
    assert check_answers(rows, 2) > 0
    assert faults.made == 2, "the second is made when an engine has taken the first"


@pytest.mark.parametrize(
    ("staleness", "resample"), [*(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, 0), (0, 2))), (2, 2)]
)
def test_a_reward_model_takes_its_turn_while_answers_of_later_steps_are_kept(
    models: Path, grpo_config: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, resample: int
) -> None:
    """With dynamic sampling every second group is uninformative, and further rounds of generation follow a scoring."""
    rows = run(
        models, grpo_config, monkeypatch, f"trainer.max_staleness={staleness}", "reward.model_weight=0.0",
        f"model.reward_model_path={models}/judge", f"algorithm.resample_rounds={resample}",
        "reward.functions=[" + str(models / "reward.py") + ":half_are_alike]",
    )  # fmt: skip
    check_answers(rows, staleness)
    numbers = [row["prompt_index"] for row in rows[::SAMPLES]]
    assert numbers == sorted({*numbers})
    entries = check_diary(models / "diary")
    assert ("reward_model scores", "reward_model leaves", "engine wakes") in zip(
        entries, entries[1:], entries[2:], strict=False
    ) or not resample
    replaced = sum(
        one.get("rollout/resample/replaced", 0) for one in read_metrics(grpo_config.parent / "run/metrics.jsonl")
    )
    assert (replaced > 0) == (resample > 0)


def test_an_engine_beside_a_reward_model_answers_while_the_actor_learns_elsewhere(
    models: Path, grpo_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = {**SPLIT, "roles": {"rollout": "generation", "reward_model": "generation"}}
    rows = run(
        models, grpo_config, monkeypatch, "trainer.max_staleness=1", f"placement={placement}",
        f"model.reward_model_path={models}/judge", "reward.functions=[]",
    )  # fmt: skip
    check_answers(rows, 1)
    entries = [entry for entry in (models / "diary").read_text().splitlines() if "serves" not in entry]
    start = entries.index("engine sleeps")
    assert entries[start : start + 6] == [
        "engine sleeps", "reward_model returns", "reward_model scores", "reward_model leaves", "engine wakes",
        "actor learns",
    ]  # fmt: skip


def test_an_engine_whose_weights_are_gone_while_it_sleeps_is_not_asked_before_it_has_new_ones(
    models: Path, grpo_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward model on devices of others scores, and further prompts follow before the actor learns."""
    placement = {"pools": {"main": [1], "judges": [1]}, "roles": {"reward_model": "judges", "reference": "judges"}}
    rows = run(
        models, grpo_config, monkeypatch, f"placement={placement}", "generation.sleep=weights",
        f"model.reward_model_path={models}/judge", "algorithm.resample_rounds=2", "algorithm.kl.place=loss",
        "reward.functions=[" + str(models / "reward.py") + ":half_are_alike]", "reward.model_weight=0.0",
    )  # fmt: skip
    check_answers(rows, 0)
    assert sum(
        one.get("rollout/resample/replaced", 0) for one in read_metrics(grpo_config.parent / "run/metrics.jsonl")
    )
