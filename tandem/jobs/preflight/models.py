"""Model directories: is every file there and whole, and is it a model that the run can use?"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tandem.config.cluster import RoleName
from tandem.config.judging import JudgeConfig
from tandem.config.model import LoraConfig, ModelConfig
from tandem.config.roles import model_roles
from tandem.config.tree import EvalConfig, RewardModelConfig, RolloutConfig, TrainConfig
from tandem.hub import fetch_weights
from tandem.model_files import DESCRIPTIONS, MEND, indexed_files, known_config, read_model_config
from tandem.models.families import refusal
from tandem.pictures.vlm_config import in_tower
from tandem.stored import DamagedFile, read_json

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")
"""A directory with a tokenizer has one of these files."""
_OUTPUT_LAYERS = ("lm_head", "embed_out")
_EMBEDDINGS = ("embed_tokens", "embed_in", "word_embeddings", "wte", "wpe")
_VALUE_HEADS = ("score", "classifier")
"""What a head that scores is called, by family."""


def find_directory_mistakes(config: Any) -> Iterator[str]:
    """What is wrong with each directory of the section `model`."""
    template = config.model.chat_template
    if template is not None and template.file is not None and not template.file.is_file():
        yield f"model.chat_template.file: {template.file} is no file; give a Jinja template"
    # An evaluation has neither critic nor teacher, whatever its configuration has trained with.
    trained_with = () if isinstance(config, EvalConfig) else ("critic_path", "teacher_path")
    for key in ("path", *trained_with, "reward_model_path", "judge_path"):
        path = getattr(config.model, key, None)
        if path is not None:
            try:
                fetch_weights(path)
            except ValueError as error:
                yield f"model.{key}: {error}"
                continue
            problems = _find_in_directory(path, has_tokenizer=key != "critic_path")
            yield from (f"model.{key}: {path} {problem}" for problem in problems)


def find_family_mistakes(config: Any) -> Iterator[str]:
    """Families whose log-probs or values would be wrong, on the engines of which `models/families.py` speaks."""
    problems = [f"model.{key}: {path}: {reason}" for key, path, head in _computed_here(config)
                if (reason := refusal(known_config(path), value_head=head))]  # fmt: skip
    yield from dict.fromkeys(problems)


def _computed_here(config: Any) -> Iterator[tuple[str, Path, bool]]:
    """The models that the native engine or `training.type: fsdp` computes: key, directory, and has it a value head."""
    model, on_fsdp = config.model, config.training.type == "fsdp"
    on_native = isinstance(config, RolloutConfig) and config.generation.type == "native"
    if on_native or (on_fsdp and not isinstance(config, EvalConfig)):
        yield "path", model.path, isinstance(config, RewardModelConfig)
    judged = isinstance(config, RolloutConfig) and (config.reward.judge or JudgeConfig()).generation.type == "native"
    if judged and model.judge_path is not None:
        yield "judge_path", model.judge_path, False
    for role, path in model_roles(config) if on_fsdp else ():
        yield _key_of(role, model), path, role in ("critic", "reward_model")


def _key_of(role: RoleName, model: ModelConfig) -> str:
    """The key of the section `model` that a role's directory is from."""
    key = f"{role}_path"
    return key if getattr(model, key, None) is not None else "path"


def find_lora_mistakes(config: Any) -> Iterator[str]:
    """Each target must be the end of some layer's name."""
    for key, path in adapter_keys(config).items():
        lora: LoraConfig = getattr(config.model, key.partition(".")[2])
        if lora.target_modules != "all-linear":
            yield from _find_target_mistakes(f"{key}.target_modules", lora.target_modules, path)


def adapter_keys(config: Any) -> dict[str, Path]:
    """The sections that ask for adapters, each with the directory of the model that gets them."""
    model: ModelConfig = config.model
    keys = {} if model.lora is None else {"model.lora": model.path}
    if isinstance(config, TrainConfig) and model.critic_lora is not None:
        keys["model.critic_lora"] = model.critic_path or model.path
    return keys


def _find_target_mistakes(key: str, targets: Sequence[str], path: Path) -> Iterator[str]:
    try:
        shapes = _read_shapes(path)
    except ValueError:  # find_directory_mistakes reports it
        return
    matrices = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    layers = {layer for layer in matrices if not in_tower(layer)}
    without = {*_OUTPUT_LAYERS, *_VALUE_HEADS, *_EMBEDDINGS}
    ends = sorted({layer.rpartition(".")[2] for layer in layers} - without)
    for target in targets:
        if target in _OUTPUT_LAYERS:
            yield f"{key}: {target!r}: the output layer takes no adapter; leave it out"
        elif target in _VALUE_HEADS:
            yield f"{key}: {target!r}: a value head takes no adapter, for it learns as a whole; leave it out"
        elif target.rpartition(".")[2] in _EMBEDDINGS:
            yield f"{key}: {target!r}: embeddings take no adapter; leave it out"
        elif not any(f".{layer}".endswith(f".{target}") for layer in layers):
            close = get_close_matches(target, ends, 1)
            mend = f"did you mean {close[0]!r}?" if close else f"give some of {', '.join(ends)}, or all-linear"
            yield f"{key}: no layer of {path} is named {target!r}; {mend}"


def find_reward_model_mistakes(config: Any) -> Iterator[str]:
    """A model without a head that scores would give every answer 0."""
    path = config.model.reward_model_path
    if path is None:
        return
    try:
        shapes = _read_shapes(path)
    except ValueError:  # find_directory_mistakes reports it
        return
    heads = [shapes[f"{name}.weight"] for name in _VALUE_HEADS if f"{name}.weight" in shapes]
    if not heads:
        yield (
            f"model.reward_model_path: {path} is a language model, without a head that scores; give the model "
            "directory of a run of `tandem reward-model`"
        )
    elif heads[0][0] != 1:
        yield f"model.reward_model_path: the head of {path} gives {heads[0][0]} numbers, not one score; give another"


def holds_tokenizer(path: Path) -> bool:
    """Whether a model directory comes with one."""
    return any(file for pattern in _VOCABULARIES for file in path.glob(pattern))


def _find_in_directory(path: Path, has_tokenizer: bool) -> Iterator[str]:
    if not (path / "config.json").is_file():
        if (path / "checkpoints").is_dir() or (path / "environment.json").is_file():
            yield "is a run without a checkpoint; wait for its first one, or give another directory"
        elif path.name == "best" and path.parent.name == "checkpoints" and not path.is_symlink() and not path.exists():
            there = ", ".join(sorted(one.name for one in path.parent.glob("step_*"))) or "no checkpoint"
            yield (
                "is not there: a run keeps its best checkpoint where its trainer.best_metric is set; there is "
                f"{there}, and checkpoints/latest"
            )
        elif "checkpoints" in path.parts[-3:-1] and not path.exists():
            yield (
                "is gone: a run that goes on keeps its newest checkpoints (trainer.keep_last) and the best one; put it "
                "back, or give another directory"
            )
        elif not path.exists():
            yield (
                "is not there; give a Hugging Face model directory (`hf download NAME --local-dir DIR` makes one), a "
                "run's, or an id of the Hub"
            )
        else:
            yield (
                "is not a local Hugging Face model directory, for it holds no config.json "
                "(`hf download NAME --local-dir DIR` makes one)"
            )
        return
    yield from _find_in_files(path)
    if has_tokenizer and not holds_tokenizer(path):
        yield "has no tokenizer; copy tokenizer.json and tokenizer_config.json of the base model into it"


def _find_in_files(path: Path) -> Iterator[str]:
    for file in filter(Path.exists, map(path.joinpath, DESCRIPTIONS)):
        try:
            if file.name == "config.json":
                read_model_config(path)
            else:
                read_json(file, dict[str, Any], MEND)
        except DamagedFile as error:
            yield f"has a {file.name} that cannot be used: {error.reason}; {error.mend}"
    try:
        _check_layers(known_config(path), _read_shapes(path))
    except DamagedFile as error:
        yield f"has an index of weights that cannot be used: {error.path.name} {error.reason}; {error.mend}"
    except ValueError as error:
        yield str(error)


def _check_layers(described: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Raises ValueError where there are more layers than weights: a number that is damaged may ask for billions."""
    layers = described.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(shapes):
        raise ValueError(f"has a config.json of {layers} layers, and {len(shapes)} weights in its files; {MEND}")


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a model directory. Raises ValueError that says what is wrong with its files."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    names = {single.name} if single.exists() or not index.exists() else indexed_files(index)
    lacking = sorted(name for name in names if not (path / name).is_file())
    if lacking:
        mend = "copy the whole directory again"
        if [*path.glob("*.bin")]:
            mend = "its .bin files are not read: save it once with save_pretrained, as safetensors"
        raise ValueError(f"lacks its weights ({', '.join(lacking[:3])}{', …' * (len(lacking) > 3)}); {mend}")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted(names):
        try:
            with safe_open(path / name, framework="numpy") as weights:
                shapes |= {key: tuple(weights.get_slice(key).get_shape()) for key in weights.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"has weights that cannot be read ({name}: {error}); copy that file again") from None
    return shapes
