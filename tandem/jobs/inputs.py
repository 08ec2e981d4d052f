"""What a run reads, checked before anything is allocated: tokenizer, data, reward functions, model directory."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from transformers import PreTrainedTokenizerBase

from tandem.algorithms import make_algorithm
from tandem.config.tree import EvalConfig, ModelConfig, SftConfig, TrainConfig
from tandem.controller.placement import pools_of
from tandem.controller.pools import Role
from tandem.data.dataset import RLHFDataset
from tandem.errors import UserError
from tandem.models.loading import load_tokenizer
from tandem.reward.functions import check_functions
from tandem.training.megatron.degrees import check_degrees

Dataset = TypeVar("Dataset")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Inputs(Generic[Dataset]):
    tokenizer: PreTrainedTokenizerBase
    train: Dataset | None
    """None in evaluation."""
    val: Dataset | None


def read_inputs(config: TrainConfig | EvalConfig | SftConfig, dataset: Callable[..., Dataset]) -> Inputs[Dataset]:
    """Load and check everything; for evaluation, validation data only. Raises UserError with every mistake."""
    problems: list[str] = []
    evaluates, val_files = isinstance(config, EvalConfig), config.data.val_files
    train_files = [] if evaluates else config.data.train_files
    if not (val_files if evaluates else train_files):
        problems.append(f"data.{'val' if evaluates else 'train'}_files: no file given")
    if not isinstance(config, EvalConfig) and config.trainer.eval_every and not val_files:
        problems.append("trainer.eval_every: needs data.val_files")
    tokenizer = _catch(problems, load_tokenizer, config.model)
    train, val = (_read(problems, dataset, files, tokenizer, config.data) for files in (train_files, val_files))
    if not isinstance(config, EvalConfig):
        _catch(problems, _check_degrees, config)
    if not isinstance(config, SftConfig):
        _catch(problems, _check_length, config)
        _catch(problems, _check_reward_model, config.model, tokenizer)
        read = {"data.train_files": train, "data.val_files": val}
        data = {key: dataset.prompts for key, dataset in read.items() if isinstance(dataset, RLHFDataset)}
        sources = {prompt.data_source for prompts in data.values() for prompt in prompts}
        judged_by_model = config.model.reward_model_path is not None
        _catch(problems, check_functions, config.reward, [] if judged_by_model else sorted(sources), data)
    if isinstance(config, TrainConfig):
        _catch(problems, make_algorithm, config.algorithm, config.generation.max_response_tokens)
    if problems:
        raise UserError(problems[0] if len(problems) == 1 else "\n  - ".join([f"{len(problems)} errors", *problems]))
    assert tokenizer is not None
    return Inputs(tokenizer, train, val)


def _catch(problems: list[str], call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """The result, or None and one more problem."""
    try:
        return call(*args, **kwargs)
    except UserError as error:
        problems.append(str(error))
        return None


def _read(
    problems: list[str], dataset: Callable[..., Dataset], files: Sequence[Path], tokenizer: Any, config: Any
) -> Dataset | None:
    if not files:
        return None
    if tokenizer is None:
        problems += [f"{path}: no such data file" for path in files if not path.is_file()]
        return None
    return _catch(problems, dataset, files, tokenizer, config)


def _check_degrees(config: TrainConfig | SftConfig) -> None:
    training, path, pools = config.training, config.model.path, pools_of(config)
    if training.type == "megatron" and config.model.lora:
        raise UserError("model.lora: adapters are of training.type: fsdp; take that, or train the whole model")
    if training.type == "megatron" and (path / "config.json").is_file():
        for ranks in {pools.get_resource_pool(role).size for role in (Role.Actor, Role.Critic, Role.RefPolicy)}:
            check_degrees(path, training, ranks)


def _check_reward_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """It has a head that scores, and knows the policy's token ids; without either it would score all the same."""
    path = config.reward_model_path
    if path is None or tokenizer is None:
        return
    theirs = load_tokenizer(config.model_copy(update={"path": path}))
    described = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if any("CausalLM" in name for name in described.get("architectures") or []):
        raise UserError(
            f"model.reward_model_path: {path} is a language model, without a head that scores; "
            "give the model directory of a run of `tandem reward-model`"
        )
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"model.reward_model_path: the tokenizer of {path} ({len(theirs):,} tokens) is not that of {config.path} "
            f"({len(tokenizer):,} tokens), whose token ids it is to score; train one from the policy's kind of model"
        )


def _check_length(config: TrainConfig | EvalConfig) -> None:
    """Prompt and response must fit the positions that the model knows."""
    path = config.model.path / "config.json"
    if not path.is_file():
        return  # the tokenizer check has said so
    positions = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    prompt, response = config.data.max_prompt_tokens, config.generation.max_response_tokens
    if isinstance(positions, int) and prompt + response > positions:
        raise UserError(
            f"data.max_prompt_tokens {prompt} + generation.max_response_tokens {response} = {prompt + response} "
            f"tokens, but {config.model.path} knows only {positions} positions (max_position_embeddings); lower one"
        )
