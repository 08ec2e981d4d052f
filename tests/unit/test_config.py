"""The loader: YAML and overrides to the typed tree, every mistake of both at once, and back to YAML."""

import math
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tandem.algorithms.builtin.grpo import GRPOConfig
from tandem.algorithms.builtin.ppo import PPOConfig
from tandem.config import yaml12
from tandem.config.generation import VllmGenerationConfig
from tandem.config.keys import every_key
from tandem.config.load import dump_config, load_config, read_config
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import EvalConfig, SftConfig, TrainConfig
from tandem.config.verl_keys import COUNTERPARTS
from tandem.errors import UserError

SOUND = """
model: {path: m}
data: {train_files: [a.parquet], prompts_per_step: 8}
algorithm: {type: grpo, group_size: 4}
training: {optimizer: {lr: 1e-6, betas: [0.9, 0.95]}}
trainer: {run_dir: r, steps: 3}
"""
ENGINE_ARGS = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enforce_eager")
GROUP_OF_ONE = "input should be greater than or equal to 2, not 1"
NO_HOME = "could not determine home directory., not '~nobody-here/r'"
WHOLE = "whose parts have no keys; give all of it, as "
A_LIST = f"data.train_files is a list, {WHOLE}data.train_files=…"
NO_YAML = "what follows = is not valid YAML: "


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.yaml"
    path.write_text(SOUND)
    return path


def problems(path: Path, *overrides: str, kind: type = TrainConfig) -> list[str]:
    """What the loader lists, sorted."""
    with pytest.raises(UserError) as caught:
        load_config(kind, path, overrides)
    first, *listed = str(caught.value).splitlines()
    count = f"{len(listed)} error{'s' if len(listed) > 1 else ''}"
    assert first == f"{path}: {count} in the configuration"
    return sorted(line.removeprefix("  - ") for line in listed)


def test_overrides_are_yaml_and_reach_every_depth(sound: Path) -> None:
    config = load_config(
        TrainConfig,
        sound,
        [
            "training.optimizer.lr=3e-4",
            "training.optimizer.betas=[0.8, 1e-1]",
            "data.val_files=[x.jsonl, y.parquet]",
            "data.shuffle=false",
            "algorithm={type: ppo, value_clip: null}",
            "algorithm.gae_lambda=0.9",
            "generation.eval.temperature=1",
            "trainer.best_metric=val/gsm8k/acc/mean@1",
            "reward.functions=[rewards.py:score, {function: more.py:score, weight: 1e-1}]",
        ],
    )
    assert config.training.optimizer.lr == 3e-4 and config.training.optimizer.betas == (0.8, 0.1)
    assert config.data.val_files == [Path.cwd() / "x.jsonl", Path.cwd() / "y.parquet"] and config.data.shuffle is False
    assert isinstance(config.algorithm, PPOConfig)
    assert config.algorithm.value_clip is None and config.algorithm.gae_lambda == 0.9
    assert config.generation.eval.temperature == 1.0
    assert config.trainer.best_metric == "val/gsm8k/acc/mean@1"
    first, second = config.reward.functions
    assert first == f"{Path.cwd()}/rewards.py:score" and not isinstance(second, str) and second.weight == 0.1


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path, sound: Path) -> None:
    """YAML 1.1 takes 1e-6 for text and 017 for octal; engine_args have no type that would mend it."""
    written = "{a: 1e-3, b: 1e3, c: 0o17, d: 017, e: 1.5, f: -.inf, g: 0x1F, h: [2E2], i: -3}"
    path = tmp_path / "engine.yaml"
    path.write_text(f"{SOUND}\ngeneration: {{type: vllm, engine_args: {written}}}")
    numbers = {"a": 1e-3, "b": 1e3, "c": 15, "d": 17, "e": 1.5, "f": -math.inf, "g": 31, "h": [200.0], "i": -3}
    for config in (
        load_config(TrainConfig, path),
        load_config(TrainConfig, sound, ["generation.type=vllm", f"generation.engine_args={written}"]),
    ):
        assert isinstance(config.generation, VllmGenerationConfig)
        assert config.generation.engine_args == numbers
        assert all(type(value) is type(numbers[key]) for key, value in config.generation.engine_args.items())
        assert config.training.optimizer.lr == 1e-6


def test_text_that_yaml_1_1_takes_for_something_else(sound: Path) -> None:
    written = "[yes, No, on, OFF, 12:30, 1_000, 2026-01-31, '1e-3', 0b11, 1e, nan]"
    config = load_config(TrainConfig, sound, ["generation.type=vllm", f"generation.engine_args={{a: {written}}}"])
    assert isinstance(config.generation, VllmGenerationConfig)
    texts = ["yes", "No", "on", "OFF", "12:30", "1_000", "2026-01-31", "1e-3", "0b11", "1e", "nan"]
    assert config.generation.engine_args == {"a": texts}
    assert load_config(TrainConfig, sound, ["data.shuffle=no"]).data.shuffle is False, "a key of kind bool knows it"


def test_what_is_written_reads_the_same_by_yaml_1_1_and_1_2() -> None:
    tree = {"text": ["1e-3", "0o17", "yes", "12:30", "", "null", "…"], "numbers": [1e-6, 1e300, 17, 0.5], "n": None}
    text = yaml12.write(tree)
    assert yaml12.read(text) == tree and yaml.safe_load(text) == tree


def test_a_key_that_is_there_twice(sound: Path) -> None:
    sound.write_text(SOUND + "model: {path: other}\n")
    with pytest.raises(UserError, match=r"(?s)not valid YAML: the key 'model' is there twice.*line 7"):
        load_config(TrainConfig, sound)


def test_the_last_override_wins(sound: Path) -> None:
    assert load_config(TrainConfig, sound, ["trainer.steps=4", "trainer.steps=5"]).trainer.steps == 5


def test_no_algorithm_is_grpo(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("model: {path: m}\ndata: {}\ntrainer: {run_dir: r, epochs: 1}\n")
    assert load_config(TrainConfig, path).algorithm == GRPOConfig()
    assert load_config(TrainConfig, path, ["algorithm={group_size: 4}"]).algorithm == GRPOConfig(group_size=4)
    assert problems(path, "model.critic_path=c") == [
        "algorithm: grpo has no critic; remove model.critic_path or use algorithm.type: ppo"
    ]


def test_mistakes_below_a_misspelt_type_are_told_with_it(sound: Path) -> None:
    overrides = ["algorithm.type=grop", "algorithm.group_siz=4", "algorithm.kl.place=los"]
    overrides += ["cluster.type=locl", "cluster.rank=2", "generation.type=vlm", "generation.temprature=1"]
    with pytest.raises(UserError) as error:
        load_config(TrainConfig, sound, overrides)
    message = str(error.value)
    assert f"{len(overrides)} errors" in message
    for mend in ("did you mean 'grpo'?", "algorithm.group_size?", "'none', 'reward' or 'loss'"):
        assert mend in message
    for mend in ("did you mean 'local'?", "cluster.ranks?", "did you mean 'vllm'?", "generation.temperature?"):
        assert mend in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.groupsize=4", "algorithm.groupsize: unknown key; did you mean algorithm.group_size?"),
        ("trainer.lr=1", "trainer.lr: unknown key; did you mean training.optimizer.lr?"),
        ("algorithm.kl.coeficient=1", "algorithm.kl.coeficient: unknown key; did you mean algorithm.kl.coefficient?"),
        ("modle.path=x", "modle: unknown key; did you mean model?"),
        ("model.temperature=1", "model.temperature: unknown key; did you mean generation.temperature?"),
        (
            "generation.temperature=0.001",
            "generation.temperature: input should be greater than or equal to 0.01, not 0.001",
        ),
        (
            "generation.eval.temperature=0.001",
            "generation.eval.temperature: give 0, which is greedy, or at least 0.01, not 0.001",
        ),
        ("trainer.xyzzy=1", "trainer.xyzzy: unknown key"),
        (
            "algorithm.gamma=1",
            "algorithm.gamma: unknown key; it is one of algorithm.type: on_policy_distillation or ppo or "
            "reinforce_plus_plus",
        ),
        ("training.tensor_parallel=2", "training.tensor_parallel: unknown key; it is one of training.type: megatron"),
        ("cluster.rank=2", "cluster.rank: unknown key; did you mean cluster.ranks?"),
        ("tracking.wandbb=true", "tracking.wandbb: unknown key; did you mean tracking.wandb?"),
        (
            "data.val_sets={aime: {files: [a.jsonl], sampels: 8}}",
            "data.val_sets.aime.sampels: unknown key; did you mean data.val_sets.aime.samples?",
        ),
    ],
)
def test_unknown_keys_get_a_suggestion(sound: Path, override: str, said: str) -> None:
    assert problems(sound, override) == [said]


def test_the_same_letters_in_another_order_are_meant_rather_than_others(sound: Path) -> None:
    (told,) = problems(sound, "algorithm.type=gpro")
    assert told.endswith("did you mean 'grpo'?"), "though 'gspo' has more of them in their places"


TOOLS, A_USER = "conversation.environment.tools", "conversation.environment.user"
COMMAND = "conversation.environment.command"
A_COMMAND = "conversation={environment: {type: endpoint, command:"
VERL_FILE = "write a file of verl's tools as {type: verl, path: a.yml}"
NO_STRING = "input should be a valid string"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.steps=0", "trainer.steps: input should be greater than 0, not 0"),
        ("data.on_bad_row=x", "data.on_bad_row: input should be 'error' or 'skip', not 'x'"),
        ("algorithm.group_size=1", f"algorithm.group_size: {GROUP_OF_ONE}"),
        ("algorithm.minibatches=9", "algorithm: minibatches: 9 cannot share data.prompts_per_step: 8; lower it"),
        ("trainer.epochs=1", "trainer: give exactly one of steps and epochs"),
        ("trainer={run_dir: r}", "trainer: give exactly one of steps and epochs"),
        ("trainer={steps: 1}", "trainer.run_dir: field required"),
        ("trainer.steps", "override 'trainer.steps': write it as section.key=YAML value"),
        ("=1", "override '=1': write it as section.key=YAML value"),
        ("trainer.run_dir.x=1", f"override 'trainer.run_dir.x=1': trainer.run_dir is r, {WHOLE}trainer.run_dir=…"),
        ("data.train_files.0=", f"override 'data.train_files.0=': {A_LIST}"),
        ("model.path={", f"override 'model.path={{': {NO_YAML}expected the node content, but found '<stream end>'"),
        ("model={a: 1, a: 2}", f"override 'model={{a: 1, a: 2}}': {NO_YAML}the key 'a' is there twice"),
        ("trainer={run_dir: ~nobody-here/r, resume: true, steps: 1}", f"trainer.run_dir: {NO_HOME}"),
        ("trainer.save_every=true", "trainer.save_every: input should be a number, not True"),
        ("training.optimizer.lr=true", "training.optimizer.lr: input should be a number, not True"),
        ("conversation={environment: {tools: [{type: verl}]}}", f"{TOOLS}.0.path: field required"),
        (f"{A_COMMAND} it's}}}}", f"{COMMAND}: \"it's\" is no command: no closing quotation, not \"it's\""),
        (f"{A_COMMAND} ' '}}}}", f"{COMMAND}: ' ' is no command: it names no program, not ' '"),
        ("conversation={environment: {tools: [7]}}", f"{TOOLS}.0: is a section of keys and values, not 7"),
        ("conversation={environment: {tools: [a.yml]}}", f"{TOOLS}.0: {VERL_FILE}, not 'a.yml'"),
        ("conversation={environment: {user: {type: scripted, column: 7}}}", f"{A_USER}.column: {NO_STRING}, not 7"),
    ],
)  # fmt: skip
def test_one_mistake_gets_one_message(sound: Path, override: str, said: str) -> None:
    assert problems(sound, override) == [said]


def test_an_override_fills_an_empty_section(sound: Path, tmp_path: Path) -> None:
    """Whose keys are all commented out, say."""
    path = tmp_path / "empty_sections.yaml"
    path.write_text(sound.read_text() + "tracking:\n")
    config = load_config(TrainConfig, path, ["tracking.tensorboard=true", "model.lora=null", "model.lora.rank=4"])
    assert config.tracking.tensorboard is True and config.model.lora is not None and config.model.lora.rank == 4


def test_every_mistake_is_listed_at_once(sound: Path) -> None:
    """Unknown key, wrong types, a combination within a section, one between sound sections, a broken override."""
    listed = problems(
        sound,
        "model.pth=x",
        "trainer.steps=many",
        "training.optimizer.betas=[0.9, 1]",
        "generation.eval.samples=0",
        "algorithm.minibatches=9",
        "oops",
    )
    assert [message.split(":")[0] for message in listed] == [
        "algorithm",
        "generation.eval.samples",
        "model.pth",
        "override 'oops'",
        "trainer.steps",
        "training.optimizer.betas.1",
    ]


def test_supervised_fine_tuning_has_its_own_tree(sound: Path) -> None:
    listed = problems(sound, "data.rows_per_step=0", kind=SftConfig)
    assert listed == [
        "algorithm: unknown key",
        "data.prompts_per_step: unknown key; did you mean data.rows_per_step?",
        "data.rows_per_step: input should be greater than 0, not 0",
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_batch_size=8", ["data.train_batch_size: a key of verl; write data.prompts_per_step"]),
        (
            "actor_rollout_ref={actor: {optim: {lr: 1e-6}, use_torch_compile: true}, rollout: {n: 8}}",
            [
                "actor_rollout_ref.actor.optim.lr: a key of verl; write training.optimizer.lr",
                "actor_rollout_ref.actor.use_torch_compile: a key of verl that has no counterpart here; "
                "leave it out (docs/configuration.md has all keys)",
                "actor_rollout_ref.rollout.n: a key of verl; write algorithm.group_size",
            ],
        ),
        (
            "async_training={partial_rollout: true, compute_prox_log_prob: true}",
            [
                "async_training.compute_prox_log_prob: a key of verl that has no counterpart here; "
                "leave it out (docs/configuration.md has all keys)",
                "async_training.partial_rollout: a key of verl; write generation.partial_rollouts",
            ],
        ),
        ("trainer.logger=[wandb]", ["trainer.logger: a key of verl; write tracking"]),
        (
            "+trainer.total_epochs=3",
            [
                "override '+trainer.total_epochs=3': keys take no + here",
                "trainer.total_epochs: a key of verl; write trainer.epochs",
            ],
        ),
        ("++data.shuffle=true", ["override '++data.shuffle=true': keys take no + here"]),
    ],
)  # fmt: skip
def test_keys_of_verl_name_ours(sound: Path, override: str, said: list[str]) -> None:
    assert problems(sound, override) == said


def test_the_counterparts_of_verls_keys_are_keys() -> None:
    known = {*every_key(TrainConfig)} | {"generation.engine_args." + name for name in ENGINE_ARGS}
    for theirs, ours in COUNTERPARTS.items():
        named = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", ours.replace("path/to/file.py", "")) or [ours]
        assert {*named} <= known | {"--resume RUN on the command line"}, theirs


class TestSoundPart:
    """What can still be read of a configuration with mistakes."""

    def read(self, path: Path, *overrides: str) -> TrainConfig:
        read = read_config(TrainConfig, path, overrides)
        assert read.problems
        return read.config

    def test_only_a_refused_value_is_not_there(self, sound: Path) -> None:
        config = self.read(sound, "data.prompts_per_step=many", "training.optimizer.lr=-1", "algorithm.minibatches=0")
        assert config.data.train_files == [Path.cwd() / "a.parquet"] and config.data.val_files == []
        assert config.algorithm.group_size == 4 and config.training.optimizer.betas == (0.9, 0.95)
        for section, name in ((config.data, "prompts_per_step"), (config.training.optimizer, "lr")):
            with pytest.raises(AttributeError, match=name):
                getattr(section, name)

    def test_the_value_of_a_misspelt_key_stands_at_the_key_that_was_meant(self, sound: Path) -> None:
        config = self.read(sound, "data.val_flies=[v.parquet]", "generation.eval.sample=4", "trianer={seed: 5}")
        assert config.data.train_files == [Path.cwd() / "a.parquet"]
        assert config.data.val_files == [Path.cwd() / "v.parquet"]
        assert config.generation.eval.samples == 4 and config.generation.max_response_tokens == 1024
        assert config.trainer.seed == 0, "where that is not given"

    def test_the_default_of_a_key_that_may_have_been_meant_is_not_trusted(self, sound: Path) -> None:
        config = self.read(sound, "data.train_batch_size=4", "data.prompts_per_step=8", "trainer.total_epochs=9")
        assert config.data.prompts_per_step == 8
        with pytest.raises(AttributeError, match="epochs"):
            _ = config.trainer.epochs
        config = self.read(sound, "model.temperature=0.5", "generation.top_p=1")
        with pytest.raises(AttributeError, match="temperature"):
            _ = config.generation.temperature

    def test_a_section_of_verl_is_the_misspelt_name_of_none(self, sound: Path) -> None:
        config = self.read(sound, "actor_rollout_ref.rollout.n=8")
        assert config.placement.pools == {} and config.cluster.ranks is None

    def test_a_section_that_cannot_be_told_is_not_there(self, sound: Path) -> None:
        config = self.read(sound, "generation.type=mine", "training={type: megatron, tensor_parallel: 0}")
        with pytest.raises(AttributeError, match="generation"):
            _ = config.generation
        assert self.read(sound, "generation.type=vlm").generation.type == "vllm", "which was probably meant"
        assert config.training.type == "megatron" and config.training.pipeline_parallel == 1
        assert config.model.path == Path.cwd() / "m"

    def test_a_section_whose_values_contradict_each_other(self, sound: Path) -> None:
        config = self.read(sound, "trainer.epochs=1")
        assert (config.trainer.run_dir, config.trainer.steps, config.trainer.epochs) == (Path.cwd() / "r", 3, 1)

    def test_one_refused_value_leaves_the_defaults_of_others_alone(self, sound: Path) -> None:
        self.read(sound, "algorithm.kl.coefficient=-1")
        assert load_config(TrainConfig, sound).algorithm.kl.coefficient == 0.001


def test_evaluation_reads_a_configuration_for_training(sound: Path, tmp_path: Path) -> None:
    overrides = ["data.val_files=[v.parquet]", "seed=3"]
    config = load_config(EvalConfig, sound, overrides)
    assert config.seed == 3 and config.data.val_files == [Path.cwd() / "v.parquet"]
    short = tmp_path / "short.yaml"
    short.write_text("".join(line for line in SOUND.splitlines(True) if not line.startswith(("algorithm", "trainer"))))
    assert load_config(EvalConfig, short, overrides) == config
    assert problems(short, "trainer.seed=1", kind=EvalConfig) == [
        "trainer: only training reads this section; leave it out"
    ]


def test_a_dumped_configuration_is_the_same_configuration(sound: Path, tmp_path: Path) -> None:
    overrides = ["algorithm={type: ppo, gamma: 0.9}", "reward.functions=[a.py:f]", "generation.stop_strings=['…']"]
    config = load_config(TrainConfig, sound, overrides)
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_config(config), encoding="utf-8")
    assert load_config(TrainConfig, dumped) == config
    assert "max_response_tokens: 1024" in dumped.read_text(encoding="utf-8"), "defaults are written out"


def test_a_dumped_configuration_means_the_same_files_from_every_directory(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for directory in (home, elsewhere):
        directory.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = [
        "model={path: m, critic_path: ../c, reward_model_path: ~/r}",
        "data.val_files=[v.parquet, /abs.parquet]",
        "algorithm.type=own.py:Best",
        "reward.functions=[r.py:f, {function: sub/s.py:g}, package.module:h]",
    ]
    config = load_config(TrainConfig, sound, overrides)
    (elsewhere / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    monkeypatch.chdir(elsewhere)
    again = load_config(TrainConfig, Path("config.yaml"))
    assert again == config
    assert [again.model.path, again.model.critic_path, again.model.reward_model_path] == [
        home / "m",
        home / "../c",
        tmp_path / "r",
    ]
    assert again.data.train_files == [home / "a.parquet"]
    assert again.data.val_files == [home / "v.parquet", Path("/abs.parquet")]
    assert again.trainer.run_dir == home / "r"
    assert again.algorithm.type == f"{home}/own.py:Best"
    first, second, third = again.reward.functions
    assert first == f"{home}/r.py:f" and third == "package.module:h"
    assert not isinstance(second, str) and second.function == f"{home}/sub/s.py:g"


def test_a_run_that_is_resumed_goes_on_with_the_checkpoints_it_began_with(sound: Path, tmp_path: Path) -> None:
    """Also where the run that they are of has gone on, and has deleted them."""
    for run in ("first", "second"):
        for step in ("step_000010", "step_000020"):
            (tmp_path / run / "checkpoints" / step / "model").mkdir(parents=True)
            (tmp_path / run / "checkpoints" / step / "model/config.json").write_text("{}")
        (tmp_path / run / "checkpoints/latest").write_text("step_000010\n")
    given = [f"model={{path: {tmp_path}/first, reward_model_path: {tmp_path}/second}}", f"trainer.run_dir={tmp_path}/r"]
    given += [f"trainer.branch_from={tmp_path}/first/checkpoints/latest", "trainer.resume=true"]
    began = load_config(TrainConfig, sound, given)
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.yaml").write_text(dump_config(began), encoding="utf-8")
    for run in ("first", "second"):
        (tmp_path / run / "checkpoints/latest").write_text("step_000020\n")
        shutil.rmtree(tmp_path / run / "checkpoints/step_000010")
    assert load_config(TrainConfig, sound, given) == began
    another = load_config(TrainConfig, sound, [*given, f"model.path={tmp_path}/second"])
    assert another.model.path == tmp_path / "second/checkpoints/step_000020/model"
    new = load_config(TrainConfig, sound, [*given, "trainer.resume=false"])
    assert new.trainer.branch_from == tmp_path / "first/checkpoints/step_000020"


def test_a_run_stands_for_its_model(sound: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    models = {}
    for name in ("step_000010", "step_000020"):
        models[name] = checkpoints / name / "model"
        models[name].mkdir(parents=True)
        (models[name] / "config.json").write_text("{}")
    (checkpoints / "latest").write_text("step_000020\n")
    (checkpoints / "best").write_text("step_000010\n")
    for given, wanted in (
        (tmp_path / "run", models["step_000020"]),
        (checkpoints / "latest", models["step_000020"]),
        (checkpoints / "best", models["step_000010"]),
        (checkpoints / "step_000010", models["step_000010"]),
        (models["step_000010"], models["step_000010"]),
        (tmp_path, tmp_path),
        (checkpoints, checkpoints),
    ):
        model = load_config(TrainConfig, sound, [f"model={{path: {given}, reward_model_path: {given}}}"]).model
        assert model.path == model.reward_model_path == wanted


def test_an_engine_that_drops_its_weights_shares_no_devices_with_a_reward_model(sound: Path) -> None:
    given = ("model.reward_model_path=r", "generation.type=vllm", "generation.sleep=weights")
    [problem] = problems(sound, *given)
    assert problem.startswith("placement: roles: model.reward_model_path scores on the engine's devices")
    apart = "placement={pools: {a: [1], b: [1]}, roles: {reward_model: b}}"
    load_config(TrainConfig, sound, [*given, apart])
    load_config(TrainConfig, sound, [*given[:2], "generation.sleep=cache"])


def test_whole_gradients_are_held_only_where_they_are_small() -> None:
    assert FsdpTrainingConfig().sums_gradients_once(2**28)
    assert not FsdpTrainingConfig().sums_gradients_once(2**28 + 1)
    assert FsdpTrainingConfig(reduce_once=True).sums_gradients_once(10**10)
    assert not FsdpTrainingConfig(reduce_once=False).sums_gradients_once(10)
