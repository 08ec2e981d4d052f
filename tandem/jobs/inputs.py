"""What a run reads, checked before anything is allocated: tokenizer, data, reward functions, model directory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from tandem.algorithms import make_algorithm
from tandem.config.conversation import ConversationConfig, EndpointEnvironmentConfig, ToolsEnvironmentConfig
from tandem.config.ecosystem import HostedConfig, OpenEnvConfig
from tandem.config.generation import GenerationConfig
from tandem.config.model import ModelConfig
from tandem.config.rules import broken_rules
from tandem.config.rules.pictures import sight_mistake
from tandem.config.tree import EvalConfig, RolloutConfig, SftConfig, TrainConfig, pictures_directory
from tandem.config.validation import ValSetConfig
from tandem.controller.reward_reader import RewardReader, make_reward_reader
from tandem.data.dataset import RLHFDataset
from tandem.data.mixture import make_sampler, set_sizes
from tandem.data.own_rows import OwnDataset
from tandem.errors import UserError
from tandem.jobs.openings import Openings, make_openings
from tandem.jobs.preflight import find_mistakes
from tandem.jobs.preflight.models import holds_tokenizer
from tandem.jobs.preflight.rewards import unnamed_sources
from tandem.jobs.validation import ValidationSets
from tandem.models.chat_template import day_shown
from tandem.models.loading import load_tokenizer, rows_of_vocabulary, stop_token_ids, tokens_with_rows
from tandem.pictures.shown import ModelPictures
from tandem.pictures.vlm_config import sees_pictures
from tandem.reward.functions import check_functions
from tandem.rollout.formats.for_tokenizer import make_format
from tandem.types import Prompt

Dataset = TypeVar("Dataset")
R = TypeVar("R")


@dataclass(slots=True)
class Inputs(Generic[Dataset]):
    tokenizer: PreTrainedTokenizerBase
    train: Dataset | None
    """None in evaluation."""
    val: Dataset | None
    reward_reader: RewardReader | None = None
    """Of a reward model that reads conversations by a tokenizer or chat template of its own."""


def read_inputs(config: TrainConfig | EvalConfig | SftConfig, dataset: Callable[..., Dataset]) -> Inputs[Dataset]:
    """Load and check everything; for evaluation, validation data only. Raises UserError with every mistake."""
    _refuse([*broken_rules(config), *find_mistakes(config)])
    problems: list[str] = []
    tokenizer = _catch(problems, load_tokenizer, config.model)
    val = "data.val_files" if config.data.val_files or not config.data.val_paths else "data.val_sets"
    train, read = config.data.train_key, dict[str, Dataset | None]()
    if tokenizer is not None:
        read = _read_data(problems, config, tokenizer, dataset, val)
    reader: RewardReader | None = None
    if isinstance(config, TrainConfig):
        _catch(problems, _check_teacher, config.model, tokenizer)
        _catch(problems, _check_critic, config.model, tokenizer)
    if not isinstance(config, SftConfig):
        reader = _catch(problems, _check_reward_model, config, tokenizer, read)
        kinds = {key: dataset.kinds for key, dataset in read.items() if isinstance(dataset, RLHFDataset)}
        data = {key: [prompt for prompt, _ in of_key] for key, of_key in kinds.items()}
        counts = {key: [count for _, count in of_key] for key, of_key in kinds.items()}
        for key, prompts in data.items():
            _catch(problems, _check_agent_names, config.conversation, prompts, key=key)
            _catch(problems, _check_videos, config.generation, config.conversation, prompts, key=key)
        _catch(problems, check_functions, config.reward, unnamed_sources(config, data), data, counts)
    if isinstance(config, TrainConfig):
        _catch(problems, make_algorithm, config.algorithm, config.generation.max_response_tokens)
    if isinstance(config, RolloutConfig) and isinstance(validation := read.get(val), RLHFDataset):
        _catch(problems, ValidationSets, validation, config)
    _catch(problems, _check_order, config, read.get(train))
    _refuse(problems)
    assert tokenizer is not None
    return Inputs(tokenizer, read[train], read[val], reader)


def _read_data(
    problems: list[str],
    config: TrainConfig | EvalConfig | SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Callable[..., Dataset],
    val: str,
) -> dict[str, Dataset | None]:
    """The data sets by key; None where there are no files, and where they cannot be used. `val`: the key of those to
    validate on."""
    train = config.data.train_key
    files = {train: config.data.train_paths, val: config.data.val_paths}
    if isinstance(config, EvalConfig):
        files[train] = []
    pictures = ModelPictures(config.model.path, config.data.images, pictures_directory(config), config.data.videos)
    opens: dict[str, Openings | None] = {}
    if not isinstance(config, SftConfig) and config.conversation is not None:
        known = _catch(problems, _check_conversation, config.conversation, config.model, tokenizer, pictures)
        opens = {"opens": known}
    own = isinstance(config, TrainConfig) and config.data.dataset is not None
    read: dict[str, Dataset | None] = {}
    for key, paths in files.items():
        kind: Callable[..., Any] = OwnDataset if own and key == train else dataset
        make, usable = partial(kind, **opens), paths or kind is OwnDataset
        made: Any = _catch(problems, make, paths, tokenizer, config.data, pictures, key=key) if usable else None
        read[key] = made
    _catch(problems, _check_ids, config.model, tokenizer, list(read.values()))
    return read


def state_of_rows(inputs: Inputs[Any]) -> dict[str, str]:
    """What training rows depend on besides the configuration, for a checkpoint."""
    assert inputs.train is not None
    return {"data": inputs.train.digest, "day": day_shown(inputs.tokenizer)}


def tell_changed_rows(state: Mapping[str, Any], inputs: Inputs[Any]) -> None:
    """Where rows are not what they were when a checkpoint was written, of which `state` is a part."""
    now, then = state_of_rows(inputs), "so this is not the run that it would have been"
    if state.get("data", now["data"]) != now["data"]:
        print(
            "changed since the checkpoint: the content of the training files; the order goes on, with the rows as they "
            f"are now, {then}",
            flush=True,
        )
    if state.get("day", now["day"]) != now["day"]:
        print(
            f"changed since the checkpoint: the day, {state['day']} then and {now['day']} now, which the chat template "
            f"shows in every prompt, {then}",
            flush=True,
        )


def rows_of(config: TrainConfig | EvalConfig | SftConfig, inputs: Inputs[Any]) -> Iterator[str]:
    """What was read, for a person: a line a file, behind the name of its set, and whose rows these are."""
    data = config.data
    val_sets: Mapping[str, ValSetConfig] = {} if isinstance(config, SftConfig) else config.data.val_sets
    for dataset, files, sets in (
        (inputs.train, data.train_files, data.mixture),
        (inputs.val, data.val_files, val_sets),
    ):
        if dataset is not None:
            names = [*[""] * len(files), *(f"{name}: " for name, one in sets.items() for _ in one.files)]
            for name, line in zip_longest(names[: len(dataset.descriptions)], dataset.descriptions, fillvalue=""):
                yield f"{name}{line}"
            yield from (f"  rows are read as {form}" for form in dataset.forms)
    if (reader := inputs.reward_reader) is not None:
        yield f"{reader.path.name}: the reward model reads {reader.description}"


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise UserError(problems[0] if len(problems) == 1 else "\n  - ".join([f"{len(problems)} errors", *problems]))


def _catch(problems: list[str], call: Callable[..., R], *args: Any, key: str = "") -> R | None:
    """The result, or None and one more problem, which is that of `key` if it does not name one itself."""
    try:
        return call(*args)
    except UserError as error:
        problems.append(f"{key}: {error}" if key else str(error))
        return None


def _check_order(config: TrainConfig | EvalConfig | SftConfig, train: Any) -> None:
    """Raises UserError where there is none in which rows can be trained on."""
    if train is None:
        return
    if isinstance(config, TrainConfig):
        make_sampler(config.data, train, config.trainer.seed)
    else:
        set_sizes(config.data, train)


def _check_conversation(
    config: ConversationConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, pictures: ModelPictures
) -> Openings | None:
    """What is known of the conversations' openings. Raises UserError where there is no format of that name, or the chat
    template can hold no such conversation."""
    made = make_format(tokenizer, stop_token_ids(model, tokenizer), config.calls, config.thinking)
    environment = config.environment
    if isinstance(environment, ToolsEnvironmentConfig) and environment.tools:
        made.require_tools()
    if isinstance(environment, ToolsEnvironmentConfig) and environment.user is not None:
        made.require_users()
    if isinstance(environment, HostedConfig | OpenEnvConfig):
        made.require_users()
    return make_openings(config, model, tokenizer, pictures)


def _check_agent_names(config: ConversationConfig | None, prompts: Sequence[Prompt]) -> None:
    """Raises UserError where verl's column `agent_name` asks for something else than the configuration does."""
    expected = "single_turn_agent" if config is None else "tool_agent"
    for prompt in prompts:
        name = prompt.row.get("agent_name")
        if name and name != expected:
            mend = "add the section `conversation`" if config is None else "leave such rows out, or without the column"
            raise UserError(
                f"data row {prompt.index} has agent_name {name!r}, and this run answers as {expected}; {mend}"
            )


def _check_videos(
    generation: GenerationConfig, conversation: ConversationConfig | None, prompts: Sequence[Prompt]
) -> None:
    """Raises UserError where rows have videos, and what answers them is shown none."""
    if not any(picture.step for prompt in prompts for picture in prompt.pictures):
        return
    if generation.type != "native":
        raise UserError(f"rows have videos, which generation.type {generation.type} is not shown yet; use native")
    if conversation is not None and isinstance(conversation.environment, EndpointEnvironmentConfig):
        raise UserError(
            "rows have videos, which agents with a base URL are not shown yet; leave out the column `videos`, or take "
            "another conversation.environment"
        )


def _check_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, datasets: Sequence[Any]) -> None:
    """Raises UserError as `require_rows_of_ids`, of the largest id of all rows."""
    found: list[tuple[int, str]] = [dataset.largest_id for dataset in datasets if dataset is not None]
    if found:
        require_rows_of_ids(model, tokenizer, *max(found, key=itemgetter(0)))


def require_rows_of_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, largest: int, place: str) -> None:
    """Raises UserError where the policy has no rows for `largest`, the largest token id of what it is to read, which
    stands in `place`. A tokenizer may have ids beyond the model's rows as long as nothing that is read has one."""
    if largest >= (rows := rows_of_vocabulary(model)):
        raise UserError(
            f"model.path: {model.path} has rows for {rows:,} token ids (vocab_size), and {place} has id {largest:,} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}); give the tokenizer that the model was trained with, or "
            "enlarge its embeddings by resize_token_embeddings"
        )


def _check_teacher(model: ModelConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises UserError unless the teacher knows the policy's token ids: it would score others all the same."""
    if model.teacher_path is not None and tokenizer is not None:
        _require_same_ids(model, "teacher_path", tokenizer, "is to score")
        _require_rows(model, "teacher_path", tokenizer)


def _check_critic(model: ModelConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises UserError unless the critic can read the policy's token ids; its directory need not have a tokenizer."""
    if model.critic_path is not None and tokenizer is not None:
        if holds_tokenizer(model.critic_path):
            _require_same_ids(model, "critic_path", tokenizer, "reads")
        _require_rows(model, "critic_path", tokenizer)


def _check_reward_model(
    config: TrainConfig | EvalConfig, tokenizer: PreTrainedTokenizerBase | None, read: Mapping[str, Any]
) -> RewardReader | None:
    """What reads for a reward model whose tokenizer or chat template is not the policy's. Raises UserError where the
    reward model cannot read rows as they are in the data."""
    path = config.model.reward_model_path
    if path is None or tokenizer is None:
        return None
    reader = make_reward_reader(config.model, tokenizer)
    if reader is None or reader.messages_by_ids or reader.text_by_ids:
        _require_rows(config.model, "reward_model_path", tokenizer)
    datasets = [dataset for dataset in read.values() if isinstance(dataset, RLHFDataset)]
    if reader is None or reader.messages_by_ids:
        if (problem := sight_mistake(config.model.path, path)) is not None:
            raise UserError(f"model.reward_model_path: {path} {problem}")
    elif (shows := _first_with_pictures(config.model.path, datasets)) is not None:
        raise UserError(
            f"model.reward_model_path: {path} has another tokenizer or chat template than {config.model.path}, and is "
            f"shown no pictures, which data row {shows} has; leave such rows out, or give a reward model that was made "
            "from the policy's own directory"
        )
    if reader is not None:
        prompts = [prompt for dataset in datasets for prompt, _ in dataset.kinds]
        reader.require_readable(prompts, opened=config.conversation is not None)
    return reader


def _first_with_pictures(policy: Path, datasets: Sequence[RLHFDataset]) -> int | None:
    """The place of the first row that has some; of rows that are read when they are drawn, among the first ones."""
    for dataset in datasets if sees_pictures(policy) else ():
        looked_at = (
            (prompt for prompt, _ in dataset.kinds)
            if isinstance(dataset, OwnDataset)
            else map(dataset.__getitem__, range(len(dataset)))
        )
        for prompt in looked_at:
            if prompt.pictures:
                return prompt.index
    return None


def _require_same_ids(model: ModelConfig, key: str, tokenizer: PreTrainedTokenizerBase, does: str) -> None:
    """Raises UserError where the directory's tokenizer has other ids. `does`: what its model does with the policy's."""
    path = getattr(model, key)
    theirs = load_tokenizer(model.model_copy(update={"path": path}))
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"model.{key}: the tokenizer of {path} ({len(theirs):,} tokens) is not that of {model.path} "
            f"({len(tokenizer):,} tokens), whose token ids it {does}; give one of the policy's kind of model"
        )


def _require_rows(model: ModelConfig, key: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError where the directory's model has no rows for some ids that the policy draws."""
    path = getattr(model, key)
    needed, rows = tokens_with_rows(model, tokenizer), rows_of_vocabulary(model.model_copy(update={"path": path}))
    if rows < needed:
        raise UserError(
            f"model.{key}: {path} has rows for {rows:,} token ids (vocab_size), and the policy draws ids up to "
            f"{needed - 1:,}; give a model with as many, or enlarge its embeddings by resize_token_embeddings"
        )
