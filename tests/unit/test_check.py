"""`tandem check` passes on sound setups, and each fault that is put in on purpose fails one verdict, with its cause."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast

from tandem.cli import main
from tandem.cluster.inline import InlineCluster
from tandem.config.load import load_config
from tandem.config.model import ModelConfig
from tandem.config.tree import TrainConfig
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import Role
from tandem.data.dataset import RLHFDataset
from tandem.generation.native import NativeEngine
from tandem.jobs.check import Verdict, check_numbers, check_tokenizer
from tandem.jobs.inputs import read_inputs
from tandem.models.loading import load_policy, load_tokenizer
from tandem.reward.manager import RewardManager
from tandem.types import Batch, FloatArray
from tandem.workers.host import WorkerContext
from tandem.workers.rollout import RolloutWorker
from tandem.workers.training import TrainSpec, TrainWorker

TEMPERATURE = "generation.temperature=0.7"
FEW = ("algorithm.group_size=2", "generation.max_response_tokens=4")
"""Answers, and their tokens: enough for every verdict."""


@pytest.fixture
def grpo_config(grpo_config: Path, tmp_path: Path) -> Path:
    """With the first rows of each file alone: all of them are read, and turned into tokens."""
    tree = yaml.safe_load(grpo_config.read_text())
    for key in ("train_files", "val_files"):
        (file,) = map(Path, tree["data"][key])
        with file.open() as rows:
            (tmp_path / file.name).write_text("".join(islice(rows, 100)))
        tree["data"][key] = [str(tmp_path / file.name)]
    grpo_config.write_text(yaml.safe_dump(tree))
    return grpo_config


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


class NoPublish(OwnModel):
    """Counts versions, and takes no weights."""

    def publish(self, version: int) -> None:
        self._engine.load_weights(version, None)


class Merging:
    """An engine whose published weights have `share` of what the adapters add."""

    def __init__(self, engine: Any, share: float) -> None:
        self._engine = engine
        self._share = share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        frozen = {
            name.replace(".base_layer.", "."): parameter.detach()
            for name, parameter in self._engine.model.named_parameters()
        }
        for name, weight in self._engine.named_weights():
            yield name, frozen[name] + self._share * (weight - frozen[name])


class NoMerging(TrainWorker):
    share = 0.0

    def __init__(self, context: WorkerContext, spec: TrainSpec) -> None:
        super().__init__(context, spec)
        self.engine = Merging(self.engine, self.share)


class HalfMerging(NoMerging):
    share = 0.5


class NoStep(TrainWorker):
    """Reports a step that it does not make."""

    def learn(self, batch: Batch, loss: Any) -> Any:
        before = {name: weight.clone() for name, weight in self.engine.model.named_parameters()}
        answer = super().learn(batch, loss)
        with torch.no_grad():
            for name, weight in self.engine.model.named_parameters():
                weight.copy_(before[name])
        return answer


class OtherReference(TrainWorker):
    def __init__(self, context: WorkerContext, spec: TrainSpec) -> None:
        super().__init__(context, spec)
        with torch.no_grad():
            self.engine.model.get_parameter("model.layers.0.mlp.down_proj.weight")[3, 5] += 1.0


class LearningReference(TrainWorker):
    """Has the actor's weights, not weights of its own."""

    def __init__(self, context: WorkerContext, spec: TrainSpec) -> None:
        super().__init__(context, spec)
        actor: Any = context.colocated["actor"]
        self.engine = actor.engine


class SeesOtherRows(TrainWorker):
    """Of several rows each gets a bit of the others' numbers."""

    def values(self, batch: Batch) -> FloatArray:
        values = super().values(batch)
        return np.where(batch.loss_mask, values + 0.01 * values.sum(), values)


class Faulty(Placement):
    """Puts a faulty worker into the place of a role."""

    def __init__(self, config: TrainConfig, faults: dict[Role, type]) -> None:
        super().__init__(InlineCluster(), pools_of(config))
        self._faults = faults

    def group(self, role: Role, group: type, kind: type, *args: Any, **kwargs: Any) -> Any:
        return super().group(role, group, self._faults.get(role, kind), *args, **kwargs)


def numbers(path: Path, faults: dict[Role, type], *overrides: str) -> list[Verdict]:
    config = load_config(TrainConfig, path, [*FEW, *overrides])
    inputs = read_inputs(config, RLHFDataset)
    with closing(Faulty(config, faults)) as placement, closing(RewardManager(config.reward, 0)) as reward:
        return list(check_numbers(config, inputs, placement, reward))


def failed(verdicts: Sequence[Verdict]) -> dict[str, str]:
    return {verdict.check: verdict.cause for verdict in verdicts if not verdict.passed}


ENGINE, PUBLISH = "log-probs, engine against trainer", "weights after a publish"
KL = ("algorithm.kl.place=loss", "algorithm.kl.coefficient=0.01")
LORA = "model.lora={rank: 4, alpha: 8}"


def test_a_sound_setup_passes(grpo_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(grpo_config)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("pass  ") == 7 and "FAIL" not in printed
    assert failed(numbers(grpo_config, {Role.Rollout: OwnModel}, TEMPERATURE)) == {}


@pytest.mark.parametrize(
    "overrides",
    [
        (*KL, "model.dtype=bfloat16"),
        (LORA, *KL),
        (LORA, "model.dtype=bfloat16"),
        ("algorithm.type=ppo", "algorithm.minibatches=2"),
        ("algorithm.type=ppo", "model.critic_lora={rank: 4, alpha: 8}"),
        ("algorithm.loss={type: kl_cov}", "algorithm.minibatches=2"),
        ("algorithm.type=remax", "algorithm.normalize_rewards=true"),
        ("algorithm.mask_truncated=true", "generation.max_response_tokens=1"),
        ("algorithm={type: gdpo, rewards: {right: 1, short: 0.5}}",),
    ],
    ids=" ".join,
)
def test_sound_setups_of_other_kinds_pass(grpo_config: Path, overrides: tuple[str, ...]) -> None:
    assert failed(numbers(grpo_config, {Role.Rollout: OwnModel}, *overrides)) == {}


def test_a_wrong_weight_in_the_engine(grpo_config: Path) -> None:
    causes = failed(numbers(grpo_config, {Role.Rollout: WrongWeight}))
    assert "holds other weights" in causes[ENGINE] and "the worst tokens" in causes[ENGINE]
    assert "publish leaves other weights" in causes[PUBLISH]


def test_a_temperature_that_the_trainer_does_not_apply(grpo_config: Path) -> None:
    causes = failed(numbers(grpo_config, {Role.Actor: NoTemperature}, TEMPERATURE))
    assert "the trainer's log-probs are not those at generation.temperature 0.7" in causes[ENGINE]


def test_an_engine_of_another_dtype(grpo_config: Path) -> None:
    causes = failed(numbers(grpo_config, {Role.Rollout: OtherDtype}))
    assert "dtype mismatch: the engine computes in bfloat16" in causes[ENGINE]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_publish_that_does_nothing(grpo_config: Path, dtype: str) -> None:
    causes = failed(numbers(grpo_config, {Role.Rollout: NoPublish}, f"model.dtype={dtype}"))
    assert list(causes) == [PUBLISH] and "the publish does nothing" in causes[PUBLISH]


@pytest.mark.parametrize(
    ("worker", "cause"),
    [(NoMerging, "before the step, by a model without its adapters"), (HalfMerging, "with its adapters merged in")],
)
def test_adapters_that_are_not_merged(grpo_config: Path, worker: type, cause: str) -> None:
    causes = failed(numbers(grpo_config, {Role.Rollout: OwnModel, Role.Actor: worker}, LORA))
    assert list(causes) == [PUBLISH] and cause in causes[PUBLISH]


def test_an_optimizer_that_does_nothing(grpo_config: Path) -> None:
    causes = failed(numbers(grpo_config, {Role.Actor: NoStep}))
    assert list(causes) == ["one large step"] and "hardly reaches the weights" in causes["one large step"]


@pytest.mark.parametrize(
    ("worker", "cause"), [(OtherReference, "starts from other weights"), (LearningReference, "it learns")]
)
def test_a_reference_that_is_not_the_policy_of_the_start(grpo_config: Path, worker: type, cause: str) -> None:
    causes = failed(numbers(grpo_config, {Role.RefPolicy: worker}, *KL))
    assert list(causes) == ["reference policy"] and cause in causes["reference policy"]


def test_a_critic_whose_rows_see_one_another(grpo_config: Path) -> None:
    causes = failed(numbers(grpo_config, {Role.Critic: SeesOtherRows}, "algorithm.type=ppo"))
    assert list(causes) == ["critic, rows alone"] and "rows see one another" in causes["critic, rows alone"]


@pytest.fixture
def judge(sort4: Path, tmp_path: Path) -> Path:
    """A reward model, as `tandem reward-model` leaves one."""
    torch.manual_seed(0)
    model: Any = AutoModelForTokenClassification.from_pretrained(sort4 / "model", num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path / "judge")
    load_tokenizer(ModelConfig(path=sort4 / "model")).save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


def test_a_reward_model_whose_rows_see_one_another(grpo_config: Path, judge: Path) -> None:
    path = f"model.reward_model_path={judge}"
    assert failed(numbers(grpo_config, {}, path)) == {}
    causes = failed(numbers(grpo_config, {Role.RewardModel: SeesOtherRows}, path))
    assert list(causes) == ["reward model, rows alone"]
    assert "rows see one another" in causes["reward model, rows alone"]


def test_a_reward_model_that_says_the_same_of_everything(grpo_config: Path, judge: Path) -> None:
    model: Any = AutoModelForTokenClassification.from_pretrained(judge)
    torch.nn.init.zeros_(model.score.weight)
    model.save_pretrained(judge)
    causes = failed(numbers(grpo_config, {}, f"model.reward_model_path={judge}"))
    assert list(causes) == ["reward model, rows alone"]
    assert "the same of everything" in causes["reward model, rows alone"]


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
