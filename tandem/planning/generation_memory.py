"""What the engines that generate take of a GPU, and how many rows they run."""

from dataclasses import replace

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Need
from tandem.config.generation import (
    GenerationConfig,
    NativeGenerationConfig,
    ReplicatedGenerationConfig,
    default_memory_share,
)
from tandem.config.judging import JudgeConfig
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.planning.fsdp_memory import Generation, Memory, generation
from tandem.planning.model_shape import ModelShape
from tandem.planning.planned import item_bytes, longest_row


def native_memory(
    config: TrainConfig, settings: NativeGenerationConfig, shape: ModelShape, engines: int, own_weights: bool
) -> tuple[Memory, Memory]:
    """Awake and asleep, of one of so many native engines, which has weights of its own or the trainer's.

    An engine with answers under way keeps their keys and values, but with `sleep: always`.
    """
    asked = asked_of_one(config, settings, engines)
    engine = Generation(
        shape,
        item_bytes=item_bytes(config),
        rows=min(settings.max_running, asked),
        row_tokens=longest_row(config),
        own_weights=own_weights,
    )
    awake = generation(engine)
    if config.conversation is not None:  # turns that have ended wait there for the next ones
        given, row = settings.prefix_cache_tokens, longest_row(config) + _snapshot_tokens(engine)
        room = settings.max_running * row if given is None else given
        turns = generation(replace(engine, rows=1, row_tokens=min(room, asked * row)))
        awake = replace(awake, cache=awake.cache + turns.cache)
    busy = settings.sleep == "idle" and config.trainer.max_staleness > 0
    return awake, replace(awake, logits=0, cache=awake.cache if busy or settings.sleep == "never" else 0)


def _snapshot_tokens(engine: Generation) -> int:
    """How many tokens of keys and values take the memory of a row's states."""
    token = engine.shape.kv_bytes_per_token(engine.item_bytes)
    return -(-engine.shape.state_bytes(engine.item_bytes) // token) if token else 0


def asked_of_one(config: TrainConfig, generation: NativeGenerationConfig, engines: int) -> int:
    """Answers that one of so many native engines may have at once. Nobody counts the rows of a validation here."""
    trainer = config.trainer
    if config.data.val_paths and trainer.eval_every:
        return generation.max_running
    prompts = config.data.prompts_per_step
    fixed = (trainer.max_staleness == 0 or not generation.partial_rollouts) and not generation.balanced
    if fixed:
        prompts = -(-prompts // engines)
    algorithm = make_algorithm(config.algorithm, config.generation.max_response_tokens)
    greedy = Need.GREEDY_REWARDS in algorithm.needs
    return prompts * (trainer.max_staleness + 1) * (config.algorithm.group_size + greedy)


def replica_memory(
    config: TrainConfig, settings: ReplicatedGenerationConfig, shape: ModelShape, beside: bool, card_bytes: int
) -> tuple[Memory, Memory]:
    """Awake and asleep: vLLM or SGLang, alone or `beside` models. Each replica takes the share.

    UserError where that is too small for what the card has room for.
    """
    weights = settings.replicas * item_bytes(config) * shape.parameters // settings.tensor_parallel
    share = share_of(settings, beside)
    row = settings.replicas * shape.kv_bytes(longest_row(config), item_bytes(config)) // settings.tensor_parallel
    if settings.replicas * card_bytes * share < weights + row <= card_bytes:
        needed, given = ((weights + row) / settings.replicas / 2**30, share * card_bytes / 2**30)
        raise UserError(
            f"generation.memory_share: {share:g} of a GPU is {given:.1f} GiB, and an engine's weights and one row take "
            f"{needed:.1f}; raise it, or generation.tensor_parallel"
        )
    awake = Memory(weights=weights, cache=max(row, int(settings.replicas * card_bytes * share) - weights))
    kept = {"never": awake, "cache": Memory(weights=weights), "weights": Memory()}
    return awake, kept[settings.sleep]


JUDGE_TEXT_TOKENS = 512
"""Of what a judge reads besides question and answer: the template's text and the rubric, which nobody counts here."""
JUDGE_SHARE = 0.9
"""Of each GPU's memory, for a judge on vLLM or SGLang where nobody says how much: `RolloutSpec.memory_share`."""


def judge_memory(config: TrainConfig, shape: ModelShape, engines: int, card_bytes: int) -> tuple[Memory, Memory]:
    """While it judges, and between: one of so many engines of `model.judge_path`, whose weights and cache stay.

    All answers of a step are judged together. UserError where an engine's share of a card is too small for it.
    """
    settings = (config.reward.judge or JudgeConfig()).generation
    row_tokens = longest_row(config) + JUDGE_TEXT_TOKENS + settings.max_response_tokens
    answers = -(-config.data.prompts_per_step * config.algorithm.group_size // engines)
    if isinstance(settings, NativeGenerationConfig):
        validates = bool(config.data.val_paths and config.trainer.eval_every)  # whose answers nobody counts here
        rows = settings.max_running if validates else min(settings.max_running, answers)
        judging = generation(Generation(shape, item_bytes(config), rows, row_tokens))
        return judging, replace(judging, logits=0)
    weights = settings.replicas * item_bytes(config) * shape.parameters // settings.tensor_parallel
    row = settings.replicas * shape.kv_bytes(row_tokens, item_bytes(config)) // settings.tensor_parallel
    given = given_share(settings)
    taken = int(settings.replicas * card_bytes * (JUDGE_SHARE if given is None else given))
    if taken < weights + row:
        raise UserError(
            f"reward.judge.generation.memory_share: {taken / settings.replicas / 2**30:.1f} GiB of a GPU is less than "
            f"the {(weights + row) / settings.replicas / 2**30:.1f} that a judge's weights and one row take; raise it, "
            "or reward.judge.generation.tensor_parallel"
        )
    judging = Memory(weights=weights, cache=taken - weights)
    return judging, judging


def share_of(settings: ReplicatedGenerationConfig, beside: bool) -> float:
    """Of each GPU's memory, for vLLM or SGLang with models beside it or not."""
    given = given_share(settings)
    return default_memory_share(beside, settings.sleep != "never") if given is None else given


def given_share(settings: ReplicatedGenerationConfig) -> float | None:
    """Of each GPU's memory, where the configuration says it."""
    given = settings.engine_args.get("gpu_memory_utilization", settings.engine_args.get("mem_fraction_static"))
    given = settings.memory_share if given is None else given
    return None if given is None else float(given)


def given_rows(settings: GenerationConfig) -> int | None:
    """Answers that an engine runs at once, where the configuration says it, as it does for the native engine."""
    if isinstance(settings, NativeGenerationConfig):
        return settings.max_running
    given = settings.engine_args.get("max_num_seqs", settings.engine_args.get("max_running_requests"))
    return None if given is None else int(given)
