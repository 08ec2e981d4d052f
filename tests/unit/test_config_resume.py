"""Every key has a rule on resume, declared beside it: it may change, or (unless it says so) it may not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.config.base import MAY_CHANGE, Section
from tandem.config.resume import changes
from tandem.config.sections import sections_at
from tandem.config.tree import DpoConfig, TrainConfig


def rules(section: type[Section], prefix: str = "", outer: bool = False) -> Iterator[tuple[str, bool]]:
    """(dotted key, whether it may change) of every key of a section, in all alternatives."""
    for name, field in section.model_fields.items():
        may_change = outer or MAY_CHANGE in field.metadata
        yield prefix + name, may_change
        for inner in sections_at(field):
            yield from rules(inner, f"{prefix}{name}.", may_change)


def hidden_markers(section: type[Section]) -> Iterator[str]:
    """Keys whose marker stands inside a union or a list, where nothing looks for it."""
    for name, field in section.model_fields.items():
        if MAY_CHANGE in str(field.annotation):
            yield name
        for inner in sections_at(field):
            yield from hidden_markers(inner)


KEYS = [*rules(TrainConfig), *rules(DpoConfig)]


def test_a_key_has_one_rule_in_all_alternatives() -> None:
    assert len(set(KEYS)) == len(dict(KEYS)), {key for key, rule in KEYS if (key, not rule) in KEYS}
    assert not [*hidden_markers(TrainConfig), *hidden_markers(DpoConfig)]


def test_resources_time_outs_records_and_length_may_change() -> None:
    may_change = {key for key, rule in KEYS if rule}
    for section in ("cluster", "placement", "tracking"):
        assert {key for key, _ in KEYS if key.startswith(section)} <= may_change
    endings = ("timeout_s", "_every", "_parallel")
    assert {key for key, _ in KEYS if key.endswith(endings)} <= may_change
    assert {key for key, _ in KEYS if key.startswith("trainer.")} - may_change == {
        "trainer.seed",
        "trainer.branch_from",
        "trainer.max_staleness",
    }


def test_what_decides_what_is_learned_may_not() -> None:
    may_change = {key for key, rule in KEYS if rule}
    sections = ("algorithm", "data", "preference")
    assert {key for key in may_change if key.startswith(sections)} == {
        "data.images.directory",  # pictures go by content, and so do tokens
        "data.cache",
        "data.cache.directory",
        "data.cache.files_from_mib",
        "data.cache.workers",
        "algorithm.teacher.url",  # where a model of the same name is served, and how it is asked
        "algorithm.teacher.api_key_env",
        "algorithm.teacher.concurrency",
        "algorithm.teacher.timeout_s",
        "algorithm.teacher.attempts",
    }
    assert {key for key in may_change if key.startswith("model")} == {"model.trust_remote_code"}
    assert not {key for key in may_change if key.startswith("training.optimizer.")}
    fixed = {
        "trainer.seed",
        "trainer.max_staleness",
        "training.type",
        "generation.type",
        "generation.temperature",
        "reward.functions",
    }
    assert not fixed & may_change


def test_sections_of_one_name_mean_the_same_in_every_command() -> None:
    train, others = dict(rules(TrainConfig)), dict(rules(DpoConfig))
    assert {key for key in train.keys() & others.keys() if train[key] != others[key]} == set()


@pytest.mark.parametrize(
    ("staleness", "before", "after", "told"),
    [
        (0, False, None, []),
        (0, None, False, []),
        (1, True, None, []),
        (0, False, True, ["algorithm.rollout_correction.skip_old_logprobs: false -> true"]),
        (0, None, True, ["algorithm.rollout_correction.skip_old_logprobs: null -> true"]),
    ],
)
def test_a_default_that_was_written_out_is_no_difference(
    staleness: int, before: bool | None, after: bool | None, told: list[str]
) -> None:
    """Of versions whose default was false, config.yaml has it."""

    def read(skip: bool | None) -> TrainConfig:
        return TrainConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"train_files": ["a.parquet"]},
                "algorithm": {"type": "grpo", "rollout_correction": {"skip_old_logprobs": skip}},
                "trainer": {"run_dir": "run", "steps": 1, "max_staleness": staleness},
            }
        )

    assert [str(change).lower() for change in changes(read(before), read(after))] == told


def test_two_names_of_one_file_are_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `cd`, or where a home directory is a symbolic link on one of two machines."""
    (tmp_path / "real/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    def read(up: str, file: str = "rewards.py") -> TrainConfig:
        return TrainConfig.model_validate(
            {
                "model": {"path": f"{up}m"},
                "data": {"train_files": [f"{up}a.parquet"]},
                "reward": {"functions": [f"{up}{file}:f", {"function": f"{up}{file}:g"}]},
                "algorithm": {"type": f"{up}own.py:Mine"},
                "trainer": {"run_dir": f"{up}run", "steps": 1},
            }
        )

    monkeypatch.chdir(tmp_path / "real")
    before = read("")
    assert changes(before, read(f"{tmp_path}/link/")) == []
    monkeypatch.chdir(tmp_path / "real/below")
    assert changes(before, read("../")) == []
    assert [change.key for change in changes(before, read("../", "others.py"))] == ["reward.functions"]
    assert [change.key for change in changes(before, read(""))] == [
        "model.path",
        "trainer.run_dir",
        "data.train_files",
        "reward.functions",
        "algorithm.type",
    ]
