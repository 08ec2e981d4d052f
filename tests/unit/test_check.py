"""`tandem check` passes on a sound setup, and names the cause of each of five faults."""

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tandem.cli import main
from tandem.cluster.inline import InlineCluster
from tandem.config.load import load_config
from tandem.config.tree import ModelConfig, TrainConfig
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import Role
from tandem.data.dataset import RLHFDataset
from tandem.generation.native import NativeEngine
from tandem.jobs.check import Verdict, at_rest, check_numbers, check_tokenizer
from tandem.jobs.inputs import read_inputs
from tandem.models.loading import load_policy, load_tokenizer
from tandem.reward.manager import RewardManager
from tandem.workers.host import WorkerContext
from tandem.workers.rollout import RolloutWorker
from tandem.workers.training import TrainSpec, TrainWorker

TEMPERATURE = "generation.temperature=0.7"


class OwnModel(RolloutWorker):
    """An engine that does not share the trainer's parameters."""

    dtype: Any = None

    def _native(self, model: ModelConfig, config: Any, tokenizer: Any, actor: Any) -> NativeEngine:
        self.served = load_policy(model)
        if self.dtype:
            self.served.to(self.dtype)
        return NativeEngine(self.served, max_running=config.max_running, tokenizer=tokenizer)


class WrongWeight(OwnModel):
    def publish(self, version: int) -> None:
        super().publish(version)
        with torch.no_grad():
            self.served.get_parameter("model.layers.0.mlp.down_proj.weight")[3, 5] += 1.0


class OtherDtype(OwnModel):
    dtype = torch.bfloat16


class NoTemperature(TrainWorker):
    def __init__(self, context: WorkerContext, spec: TrainSpec) -> None:
        super().__init__(context, replace(spec, temperature=1.0))


class Faulty(Placement):
    """Puts a faulty worker into the place of a role."""

    def __init__(self, config: TrainConfig, faults: dict[Role, type]) -> None:
        super().__init__(InlineCluster(), pools_of(config))
        self._faults = faults

    def group(self, role: Role, group: type, kind: type, *args: Any, **kwargs: Any) -> Any:
        return super().group(role, group, self._faults.get(role, kind), *args, **kwargs)


def numbers(path: Path, faults: dict[Role, type], *overrides: str) -> list[Verdict]:
    config = at_rest(load_config(TrainConfig, path, overrides))
    inputs = read_inputs(config, RLHFDataset)
    with closing(Faulty(config, faults)) as placement, closing(RewardManager(config.reward, 0)) as reward:
        return list(check_numbers(config, inputs, placement, reward))


def failed(verdicts: Sequence[Verdict]) -> dict[str, str]:
    return {verdict.check: verdict.cause for verdict in verdicts if not verdict.passed}


ENGINE = "log-probs, engine against trainer"


def test_a_sound_setup_passes(grpo_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(grpo_config)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("pass  ") == 6 and "FAIL" not in printed
    assert failed(numbers(grpo_config, {Role.Rollout: OwnModel}, TEMPERATURE)) == {}


def test_a_wrong_weight_in_the_engine(grpo_config: Path) -> None:
    causes = failed(numbers(grpo_config, {Role.Rollout: WrongWeight}))
    assert "holds other weights" in causes[ENGINE] and "the worst tokens" in causes[ENGINE]
    assert "publish leaves other weights" in causes["weights after a publish"]


def test_a_temperature_that_the_trainer_does_not_apply(grpo_config: Path) -> None:
    causes = failed(numbers(grpo_config, {Role.Actor: NoTemperature}, TEMPERATURE))
    assert "the trainer's log-probs are not those at generation.temperature 0.7" in causes[ENGINE]


def test_an_engine_of_another_dtype(grpo_config: Path) -> None:
    causes = failed(numbers(grpo_config, {Role.Rollout: OtherDtype}))
    assert "dtype mismatch: the engine computes in bfloat16" in causes[ENGINE]


@pytest.fixture
def tokenizer_of_another(sort4: Path, tmp_path: Path) -> Path:
    """The task's tokenizer; a test changes it."""
    directory = tmp_path / "other"
    shutil.copytree(sort4 / "model", directory)
    return directory


def shift(directory: Path) -> None:
    """Every token gets the next one's id."""
    path = directory / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["model"]["vocab"] = {token: (number + 1) % 99 for token, number in tree["model"]["vocab"].items()}
    for token in tree["added_tokens"]:
        token["id"] = (token["id"] + 1) % 99
    path.write_text(json.dumps(tree))


def test_a_tokenizer_whose_ids_are_shifted(grpo_config: Path, tokenizer_of_another: Path) -> None:
    shift(tokenizer_of_another)
    config = load_config(TrainConfig, grpo_config, [f"model.path={tokenizer_of_another}"])
    causes = failed(list(check_tokenizer(config, load_tokenizer(config.model))))
    assert "ids are shifted" in causes["tokenizer ids"]


def test_a_chat_template_that_differs(grpo_config: Path, sort4: Path, tokenizer_of_another: Path) -> None:
    engines = PreTrainedTokenizerFast.from_pretrained(tokenizer_of_another)
    engines.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engines.save_pretrained(tokenizer_of_another)
    engine = ["generation.type=vllm", f"generation.engine_args.tokenizer={tokenizer_of_another}"]
    config = load_config(TrainConfig, grpo_config, engine)
    causes = failed(list(check_tokenizer(config, load_tokenizer(config.model))))
    assert list(causes) == ["engine's chat template"]


def test_a_chat_template_that_changes_what_was_asked(grpo_config: Path) -> None:
    config = load_config(TrainConfig, grpo_config, [])
    tokenizer = load_tokenizer(config.model)
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "chat template" in failed(list(check_tokenizer(config, tokenizer)))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert failed(list(check_tokenizer(config, tokenizer))) == {}
