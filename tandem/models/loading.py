"""Model directories -> tokenizers, policies, critics."""

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

from tandem.config.model import ModelConfig
from tandem.errors import UserError
from tandem.model_files import MEND
from tandem.models.chat_template import apply_section, take_text
from tandem.models.classes import attention_of, class_of
from tandem.models.cost import RowCost, row_cost
from tandem.models.end_of_sequence import is_token_id
from tandem.models.family_check import check_family
from tandem.models.lean import make_lean
from tandem.models.lora import is_adapter, reset_adapters
from tandem.models.mixing import wrap_mixers
from tandem.models.storage import read_safetensors
from tandem.pictures.vlm_config import sees_pictures
from tandem.stored import DamagedFile, read_json

_DROPOUTS = ("dropout", "pdrop", "dropout_prob", "dropout_rate", "layerdrop")
"""Ends of their names in configurations."""
_PICTURE_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_CANNOT = "cannot be loaded: "
_TOKENIZER_MEND = "); copy tokenizer.json and tokenizer_config.json of the base model into it"
_COMPLETE = "give a complete model directory"
_AS_THEY_LIE = (
    f"{_COMPLETE}. Several ranks read files as they lie: weights that transformers computes while loading (those of "
    "mixtures of experts) have to be saved once by save_pretrained(DIRECTORY, save_original_format=False)"
)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory, with the chat template of the section; UserError when there is none."""
    _check_directory(config.path)
    with _loading(config.path, "has no usable tokenizer (", _TOKENIZER_MEND):
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.path, **_options(config))
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("special tokens are all it knows")  # what transformers makes of a directory without one
        longest: Any = tokenizer.model_max_length
        if not isinstance(longest, int | float):
            raise ValueError(f"model_max_length of tokenizer_config.json is {longest!r:.80}, not a number")
    if sees_pictures(config.path):
        _take_processors_template(tokenizer, config.path)
    if config.chat_template is not None:
        apply_section(tokenizer, config.chat_template)
    return tokenizer


class _TemplateFile(BaseModel):
    """chat_template.json."""

    model_config = ConfigDict(strict=True, defer_build=True)

    chat_template: str


def _take_processors_template(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Of models that see pictures: it may lie where transformers looks for it with their processors alone, and show
    messages in parts alone."""
    file = path / "chat_template.json"
    if tokenizer.chat_template is None and file.is_file():
        tokenizer.chat_template = read_json(file, _TemplateFile, MEND).chat_template
    take_text(tokenizer)


def save_processors(tokenizer: PreTrainedTokenizerBase, source: Path, directory: Path) -> None:
    """Write what turns rows into a model's inputs beside its weights: the tokenizer, and how pictures are prepared, as
    it is in the model's directory `source`."""
    tokenizer.save_pretrained(directory)
    for name in _PICTURE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def load_policy(config: ModelConfig) -> PreTrainedModel:
    """A causal language model with every dropout at 0, in `model.dtype`, on the GPU if there is one."""
    return load_model(config, value_head=False)


def stop_token_ids(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end an answer: those of the generation config and the tokenizer's end of sequence."""
    file = config.path / "generation_config.json"
    if not file.exists():
        file = config.path / "config.json"
        described: Any = _auto_config(config)
    else:
        with _loading(config.path, _CANNOT):
            described = transformers.GenerationConfig.from_pretrained(config.path, local_files_only=True)
    named: Any = getattr(described, "eos_token_id", None)
    listed: list[Any] = named if isinstance(named, list) else [named]
    if any(one is not None and not is_token_id(one) for one in listed):
        raise DamagedFile(file, f"eos_token_id: {named!r:.80} is neither a token id nor a list of them", MEND)
    own: Any = tokenizer.eos_token_id
    return tuple(sorted({*listed, own} - {None}))


def rows_of_vocabulary(config: ModelConfig) -> int:
    """For how many token ids the model of a directory has rows: often more than its tokenizer has tokens."""
    return int(_auto_config(config).get_text_config().vocab_size)


def most_positions(config: ModelConfig) -> float:
    """How many tokens a row of a directory's model may have; infinite where its config.json does not say."""
    text = _auto_config(config).get_text_config()
    positions: Any = getattr(text, "max_position_embeddings", None)
    return positions if isinstance(positions, int) else math.inf


def tokens_with_rows(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Every id that a model can draw is below it: its tokenizer's, as far as it has rows for them."""
    return min(max(tokenizer.get_vocab().values()) + 1, rows_of_vocabulary(config))


def never_drawn(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that the model has rows for and the tokenizer no token, but for those that end an answer: an engine that drew
    one would answer with what is the text of nothing."""
    known = {*tokenizer.get_vocab().values(), *stop_token_ids(config, tokenizer)}
    return tuple(token for token in range(rows_of_vocabulary(config)) if token not in known)


def model_cost(config: ModelConfig, value_head: bool) -> RowCost:
    """What a row costs the model of a directory."""
    return row_cost(_auto_config(config), value_head)


def _auto_config(config: ModelConfig, **shape: Any) -> Any:
    """The directory's configuration. Raises UserError."""
    with _loading(config.path, _CANNOT):
        return transformers.AutoConfig.from_pretrained(config.path, **_options(config), **shape)


@contextmanager
def _loading(path: Path, problem: str, mend: str = "") -> Iterator[None]:
    """Around what transformers reads of a model directory. Raises UserError, of a `problem` and its reason: files that
    are cut, or hold values of other types, make it and its packages raise anything. Memory that is full is no mistake
    of the directory."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"model: {path} {problem}{reason}{mend}") from error


def load_empty(config: ModelConfig, value_head: bool) -> PreTrainedModel:
    """The model of `load_model` on the meta device, to be laid out and then filled."""
    shape = {"num_labels": 1} if value_head else {}
    model_config = _model_config(config, shape, value_head)
    with torch.device("meta"), _loading(config.path, _CANNOT):
        model = class_of(model_config, value_head).from_config(
            model_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention_of(model_config),
            trust_remote_code=config.trust_remote_code,
        )
    if not value_head and (config.path / "generation_config.json").is_file():  # it is saved with the model again
        with _loading(config.path, _CANNOT):
            model.generation_config = transformers.GenerationConfig.from_pretrained(config.path, local_files_only=True)
    # As transformers tells families apart: by the names of classes, which sharding changes.
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    make_lean(model)
    wrap_mixers(model)
    return model


@torch.no_grad()
def fill(model: PreTrainedModel, config: ModelConfig) -> None:
    """Read this rank's part of every parameter from the model directory, compute the buffers, read those saved.

    `model`: one of `load_empty`, laid out over the ranks.
    """
    parameters = dict(model.named_parameters())
    lacking = _read(model, config.path, {name.replace(".base_layer.", "."): p for name, p in parameters.items()})
    reset_adapters(model)
    _zero_value_head(model, config.path, (name for name in lacking if not is_adapter(name)), _AS_THEY_LIE)
    for parameter in parameters.values():
        parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    model.initialize_weights()
    _refuse_lacking(config.path, _read(model, config.path, saved_buffers(model)), _AS_THEY_LIE)
    # It is saved with the prefixes that its directory has.
    kept: Any = [one for one in _published_names(model) if not isinstance(one, PrefixChange) or one.was_used()]
    model._weight_conversions = kept


def saved_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a model directory holds besides parameters: nobody trains it, and without it the model is another one.

    Such as the biases by which DeepSeek-V3's routers choose experts, and the factors of Gemma 4's layers.
    """
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _published_names(model: Any) -> Sequence[Any]:
    """How weights in directories are named and what is computed of them, where transformers keeps it for saving."""
    return model._weight_conversions


def _read(model: PreTrainedModel, path: Path, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Fill this rank's part of the tensors; the names that the directory lacks."""
    transforms: list[Any] = [*_published_names(model), *(get_checkpoint_conversion_mapping("legacy") or ())]
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    prefix, held = model.base_model_prefix, dict(tensors)

    def named(saved: str) -> str:
        """As transformers names it while loading; what it computes a weight from there keeps its name."""
        renamed, computed = rename_source_key(saved, renamings, converters, prefix, held)
        if renamed in held and computed is None:
            return renamed
        return rename_source_key(saved, [], [], prefix, held)[0]

    with _loading(path, _CANNOT):
        return read_safetensors(tensors, path, named)


def load_model(config: ModelConfig, value_head: bool) -> PreTrainedModel:
    """The policy, or the same body with a value head of one number a token: a zero one where the directory has none."""
    shape = {"num_labels": 1} if value_head else {}
    model_config = _model_config(config, shape, value_head)
    with _loading(config.path, _CANNOT), quiet_transformers():
        model, report = class_of(model_config, value_head).from_pretrained(
            config.path,
            config=model_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention_of(model_config),
            output_loading_info=True,
            **_options(config),
        )
    _zero_value_head(model, config.path, report["missing_keys"])
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    make_lean(model)
    wrap_mixers(model)
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Its progress bars and its reports of new value heads would be drawn across ours, once for each process."""
    shown, verbosity = transformers.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if shown:
            transformers.logging.enable_progress_bar()


def _model_config(config: ModelConfig, shape: dict[str, Any], value_head: bool) -> Any:
    """The directory's configuration with every dropout at 0; UserError for a family with wrong log-probs."""
    _check_directory(config.path)
    model_config = _auto_config(config, **shape)
    drop_nothing(model_config)
    try:
        with _loading(config.path, _CANNOT):
            check_family(model_config, value_head=value_head, trust_remote_code=config.trust_remote_code)
    except UserError as error:
        raise UserError(str(error) if str(config.path) in str(error) else f"model: {config.path}: {error}") from error
    return model_config


def drop_nothing(config: transformers.PreTrainedConfig) -> None:
    """Set every dropout to 0, those of configurations in it (`text_config`) too."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            drop_nothing(value)
        elif name.endswith(_DROPOUTS) and isinstance(value, float):
            setattr(config, name, 0.0)


def _zero_value_head(model: PreTrainedModel, path: Path, lacking: Iterable[str], mend: str = _COMPLETE) -> None:
    """A critic starts at 0; UserError when the directory lacks any other weight."""
    names = set(lacking)
    of_head = {name for name in names if name.startswith(("score.", "classifier."))}
    _refuse_lacking(path, names - of_head, mend)
    for name in of_head:
        torch.nn.init.zeros_(model.get_parameter(name))


def _refuse_lacking(path: Path, names: Iterable[str], mend: str) -> None:
    for name in sorted(names):
        raise UserError(f"model: {path} lacks the weight {name}; {mend}")


def _options(config: ModelConfig) -> dict[str, Any]:
    return {"local_files_only": True, "trust_remote_code": config.trust_remote_code}


def _check_directory(path: Path) -> None:
    if not path.exists():
        raise UserError(f"model: there is no {path}; give a Hugging Face model directory, a run's, or an id of the Hub")
    if not (path / "config.json").is_file():
        raise UserError(
            f"model: {path} is not a local Hugging Face model directory, for it holds no config.json "
            "(`hf download NAME --local-dir DIR` makes one)"
        )


def named_part(model: PreTrainedModel, name: str) -> torch.Tensor:
    """What a published name stands for in `model`: a parameter, or one expert of those that it holds together."""
    matched = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if matched is None:
        return model.get_parameter(name).data
    whole, number, kind = matched.groups()
    fused = model.get_parameter(f"{whole}.{'down' if kind == 'down' else 'gate_up'}_proj").data[int(number)]
    return fused if kind == "down" else fused.chunk(2)[kind == "up"]
