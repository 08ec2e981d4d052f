"""`tandem check`: do engine, trainer and tokenizer of a configuration agree, before a run is spent on it?

    answers of version 0    engine, trainer and reference give each token the same log-prob; the reward model's scores
    one large step          the weights move, and what is published is what the engine then answers by
    three steps at rest     at a learning rate of 0 nothing moves, and the reference never does; the critic's values

Where numbers differ, the likely cause is the one explanation by which they would not (`tandem/jobs/check_causes.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from tandem.algorithms import Algorithm, make_algorithm
from tandem.algorithms.builtin.gdpo import GDPOConfig
from tandem.batching.packing import select_rows, to_batch
from tandem.cluster import make_cluster
from tandem.config.algorithms import MayHaveCriticConfig
from tandem.config.conversation import ConversationConfig
from tandem.config.model import LoraConfig
from tandem.config.optimizer import OptimizerConfig
from tandem.config.tree import TrainConfig, pictures_directory
from tandem.controller.assembly import Roles, actor_spec, make_roles
from tandem.controller.dataflow import StepResult, learn_step
from tandem.controller.learning import placed_step, update
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import Role
from tandem.controller.reward_model import ModelRewards
from tandem.controller.reward_reader import NotRead
from tandem.controller.roles import Actor, Critic
from tandem.data.chat import encode, render
from tandem.data.dataset import RLHFDataset
from tandem.data.rows import BadRow
from tandem.jobs.check_causes import LARGEST_AND_MEAN, difference, explain_logprobs, explain_publish, worst_tokens
from tandem.jobs.check_conversation import conversation_problems
from tandem.jobs.inputs import Inputs
from tandem.models.end_of_sequence import end_mismatch
from tandem.pictures.shown import ModelPictures
from tandem.reward.manager import RewardManager
from tandem.types import Batch, FloatArray, Group, Prompt, Score, Trajectory
from tandem.workers.rollout import EVAL, seeded_requests
from tandem.workers.training import TrainWorker

_PROMPTS = 8
_STEPS_AT_REST = 3
_SHOWING_LR, _SHOWING_LR_OF_ADAPTERS = 1e-4, 1e-3
"""Learning rates of the step whose effect is looked for: Adam moves each weight by about so much, which is little for a
weight and much for log-probs."""
_SHOWS, _FOLLOWS = 8, 4
"""The step shows when it moves log-probs by this many times what engine and trainer were apart. The engine has followed
when afterwards they are apart by less than this part of the movement."""
_RELATIVE = {"float32": 1e-4, "bfloat16": 0.02}
"""How far the same number may be off when rows are cut in another way, by `model.dtype`, as a share of the largest."""
_QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
_ANSWER = [{"role": "assistant", "content": "4"}]
_ROWS_MEET = "rows see one another, or padding"


class Verdict(NamedTuple):
    check: str
    passed: bool
    found: str
    cause: str = ""


def check(config: TrainConfig, inputs: Inputs[RLHFDataset]) -> Iterator[Verdict]:
    """The verdicts, one after the other."""
    yield from check_tokenizer(config, inputs.tokenizer)
    if config.conversation is not None:
        yield _check_conversations(config, config.conversation, inputs)
    with closing(make_cluster(config)) as cluster, closing(RewardManager(config.reward, config.trainer.seed)) as reward:
        yield from check_numbers(config, inputs, Placement(cluster, pools_of(config)), reward)


def check_tokenizer(config: TrainConfig, tokenizer: Any) -> Iterator[Verdict]:
    """Against the model's own configuration, against itself, and against the tokenizer that the engine has."""
    described = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    vocabulary: int = described.get_text_config().vocab_size
    largest, mismatch = max(tokenizer.get_vocab().values()), end_mismatch(config.model.path, tokenizer)
    sound = largest < vocabulary and mismatch is None
    found = f"ids up to {largest} of {vocabulary}" + (f"; {mismatch}" if mismatch else "")
    yield Verdict("tokenizer ids", sound, found, "the tokenizer is of another model, or its ids are shifted")
    text = tokenizer.decode(encode(tokenizer, "3 + 4 = 7, said Ada.", special_tokens=False), skip_special_tokens=True)
    again = tokenizer.decode(encode(tokenizer, text, special_tokens=False), skip_special_tokens=True)
    yield Verdict("tokenizer round trip", again == text, f"{text!r} and {again!r}", "decoding changes the text")
    yield from _check_template(tokenizer)
    other = getattr(config.generation, "engine_args", {}).get("tokenizer")
    if other is not None:
        engines: Any = AutoTokenizer.from_pretrained(other)
        same = engines.get_vocab() == tokenizer.get_vocab()
        yield Verdict("engine's tokenizer", same, str(other), "generation.engine_args.tokenizer has other ids")
        same = engines.chat_template == tokenizer.chat_template
        yield Verdict("engine's chat template", same, str(other), "it is another one than the trainer's")


def _check_template(tokenizer: Any) -> Iterator[Verdict]:
    if tokenizer.chat_template is None:
        return
    try:
        prompt = render(tokenizer, _QUESTION, generation_prompt=True)
        conversation = render(tokenizer, _QUESTION + _ANSWER)
    except BadRow as error:
        yield Verdict("chat template", False, "a question and its answer", str(error))
        return
    cause = "what the model is asked is not how a conversation with its answer begins"
    yield Verdict("chat template", conversation.startswith(prompt), "prompt + answer = conversation", cause)


def _check_conversations(config: TrainConfig, conversation: ConversationConfig, inputs: Inputs[RLHFDataset]) -> Verdict:
    assert inputs.train is not None
    prompts = [inputs.train[row] for row in range(min(_PROMPTS, len(inputs.train)))]
    data, limit = config.data, config.data.max_prompt_tokens
    shown = ModelPictures(config.model.path, data.images, pictures_directory(config), data.videos)
    seen = shown if shown.format is not None else None
    wrong = list(conversation_problems(conversation, config.model, inputs.tokenizer, prompts, limit, seen))
    return Verdict("conversations", not wrong, f"opened by {len(prompts)} rows, {len(wrong)} faults", "; ".join(wrong))


def check_numbers(
    config: TrainConfig, inputs: Inputs[RLHFDataset], placement: Placement, reward: RewardManager
) -> Iterator[Verdict]:
    """The numbers of the engine and of every model, before a step, after one that shows, and after three at rest."""
    assert inputs.train is not None
    algorithm = make_algorithm(config.algorithm, config.generation.max_response_tokens)
    config = in_one_showing_step(config)
    roles = make_roles(config, inputs.tokenizer, algorithm, 1, placement, reward)
    prompts = [inputs.train[row] for row in range(min(_PROMPTS, len(inputs.train)))]

    siblings = _answer(config, roles, prompts, 0)
    if isinstance(roles.experience.reward, ModelRewards):
        yield from _check_reward_model(config, roles.experience.reward, siblings)
    groups = [_rewarded(config, group) for group in siblings]
    batch = to_batch(groups)
    roles.experience.devices.to_preparation()
    if not batch.loss_mask.any():
        cause = next((f": {answer.error}" for group in siblings for answer in group if answer.error), "")
        yield Verdict("answers", False, "no answer has a token of the policy's own", f"no prompt leaves room{cause}")
        return
    before = roles.actor.logprobs(batch).get()
    reference = roles.reference.logprobs(batch).get() if roles.reference else None
    sound, found = _agrees(config, batch, before)
    cause = "" if sound else explain_logprobs(config, placement, batch, before)
    worst = "" if sound else worst_tokens(inputs.tokenizer, batch, before)
    yield Verdict("log-probs, engine against trainer", sound, found, cause + worst)

    showing = learn_step(roles, algorithm, config, groups, 1, roles.experience.devices)
    again = to_batch([_rewarded(config, group) for group in _answer(config, roles, prompts, 1)])
    roles.experience.devices.to_preparation()
    after = roles.actor.logprobs(batch).get()
    moved = float(np.abs(after - before)[batch.loss_mask].mean())
    yield _check_movement(min(difference(batch, before)[1], LARGEST_AND_MEAN[config.model.dtype][1]), moved)
    yield _check_publish(config, placement, again, roles.actor.logprobs(again).get(), moved)

    for step in range(2, 2 + _STEPS_AT_REST):
        learn_step(roles, algorithm, config, _as_if_made_by(step - 1, groups), step, roles.experience.devices)
    roles.experience.devices.to_preparation()
    moved = float(np.abs(roles.actor.logprobs(batch).get() - after).max())
    cause = "weights change without a gradient"
    yield Verdict("three steps at lr 0", moved == 0, f"log-probs moved by {moved:.1e}", cause)
    if roles.reference and reference is not None:
        yield _check_reference(config, batch, before, reference, roles.reference.logprobs(batch).get())
    if roles.critic:
        yield _check_critic(config, roles.critic, batch)
    yield _check_cut(config, placement, algorithm, showing)


def in_one_showing_step(config: TrainConfig) -> TrainConfig:
    """The same, but a training step is one optimizer step, the first one shows and the others are at a learning rate
    of 0, no row is left out, and each publish is checked."""
    algorithm: Any = config.algorithm
    changes: dict[str, Any] = {"epochs": 1, "minibatches": 1, "mask_truncated": False}
    if isinstance(algorithm, MayHaveCriticConfig):
        changes["critic_optimizer"] = _showing_once(algorithm.critic_optimizer, _showing_lr(config.model.critic_lora))
    optimizer = _showing_once(config.training.optimizer, _showing_lr(config.model.lora))
    training: Any = config.training.model_copy(update={"optimizer": optimizer, "skip_zero_advantage": False})
    generation: Any = config.generation
    if generation.type != "native":
        generation = generation.model_copy(update={"sync": generation.sync.model_copy(update={"checksum": True})})
    algorithm = algorithm.model_copy(update=changes)
    return config.model_copy(update={"training": training, "generation": generation, "algorithm": algorithm})


def _showing_lr(lora: LoraConfig | None) -> float:
    return _SHOWING_LR_OF_ADAPTERS if lora else _SHOWING_LR


def _showing_once(optimizer: OptimizerConfig, lr: float) -> OptimizerConfig:
    """In a run of one optimizer step a linear schedule is at its height in that step, and at 0 ever after."""
    return optimizer.model_copy(update={"lr": lr, "schedule": "linear", "warmup_steps": 0, "min_lr_ratio": 0.0})


def _answer(config: TrainConfig, roles: Roles, prompts: list[Prompt], step: int) -> list[list[Trajectory]]:
    requests = seeded_requests(prompts, max(2, config.algorithm.group_size), config.trainer.seed, EVAL, step)
    return roles.experience.rollout.generate(requests).get()


def _rewarded(config: TrainConfig, siblings: list[Trajectory]) -> Group:
    """Rewards, and the parts that an algorithm reads, alternate around the greedy one: there is something to learn."""
    names = config.algorithm.rewards if isinstance(config.algorithm, GDPOConfig) else ()
    values = [float(place % 2) for place in range(len(siblings))]
    return Group(siblings, [Score(value, dict.fromkeys(names, value)) for value in values], greedy=Score(0.5))


def _as_if_made_by(version: int, groups: Sequence[Group]) -> list[Group]:
    """The groups as a step of a synchronous run has them: made by the weights that it trains."""
    return [replace(group, trajectories=[_made_by(version, t) for t in group.trajectories]) for group in groups]


def _made_by(version: int, trajectory: Trajectory) -> Trajectory:
    branches = tuple(replace(b, versions=np.full_like(b.versions, version)) for b in trajectory.branches)
    return replace(trajectory, versions=np.full_like(trajectory.versions, version), branches=branches)


def _agrees(config: TrainConfig, batch: Batch, trainer: FloatArray) -> tuple[bool, str]:
    largest, mean = difference(batch, trainer)
    bounds = LARGEST_AND_MEAN[config.model.dtype]
    return largest <= bounds[0] and mean <= bounds[1], f"differ by {mean:.1e} on average, {largest:.1e} at most"


def _check_movement(apart: float, moved: float) -> Verdict:
    """The step must move log-probs: else a publish that does nothing would look like one that works."""
    found = f"log-probs moved by {moved:.1e} on average"
    cause = f"what the optimizer does hardly reaches the weights; {_SHOWS * apart:.0e} would show"
    return Verdict("one large step", moved > 0 and moved >= _SHOWS * apart, found, cause)


def _check_publish(
    config: TrainConfig, placement: Placement, batch: Batch, trainer: FloatArray, moved: float
) -> Verdict:
    """`batch` was answered after a step that moved log-probs by `moved`; `trainer` has its log-probs after it."""
    sound, found = _agrees(config, batch, trainer)
    sound &= moved == 0 or difference(batch, trainer)[1] < moved / _FOLLOWS
    cause = "" if sound else explain_publish(config, placement, batch, trainer)
    return Verdict("weights after a publish", sound, found, cause)


def _check_reference(
    config: TrainConfig, batch: Batch, actor: FloatArray, start: FloatArray, end: FloatArray
) -> Verdict:
    """It begins as the actor does, and stays."""
    apart = float(np.abs(start - actor)[batch.loss_mask].mean())
    moved = float(np.abs(end - start).max())
    found = f"differs from the actor by {apart:.1e} at the start, moved by {moved:.1e}"
    cause = "it starts from other weights than the actor, or at another temperature"
    if moved:
        cause = "it learns: it shares weights with the actor"
    return Verdict("reference policy", apart <= LARGEST_AND_MEAN[config.model.dtype][1] and not moved, found, cause)


def _check_critic(config: TrainConfig, critic: Critic, batch: Batch) -> Verdict:
    """Values after the large step, before which a new head says 0 of everything."""
    together = critic.values(batch).get()
    rows = _first_of_each_group(batch)
    alone = np.concatenate([critic.values(select_rows(batch, np.array([row]))).get() for row in rows])
    return _compare_cuts(config, "critic, rows alone", alone, select_tokens(batch, together, rows))


def _check_reward_model(
    config: TrainConfig, reward: ModelRewards, answers_by_prompt: Sequence[list[Trajectory]]
) -> Iterator[Verdict]:
    scores = reward.score_by_model(answers_by_prompt).get()
    unread = [score for score in scores if isinstance(score, NotRead)]
    if reward.reader is not None:
        found = f"{reward.reader.description}; {len(unread)} of {len(scores)} answers are not read"
        yield Verdict("reward model, tokens of its own", not unread, found, str(unread[0]) if unread else "")
    firsts = np.cumsum([0, *(len(group) for group in answers_by_prompt)])[:-1].tolist()
    alone = [*chain.from_iterable(reward.score_by_model([[group[0]]]).get() for group in answers_by_prompt)]
    both = [(one, scores[place]) for one, place in zip(alone, firsts, strict=True)]
    numbers = np.array([pair for pair in both if not isinstance(pair[1], NotRead)], np.float32)
    if len(numbers):
        yield _compare_cuts(config, "reward model, rows alone", numbers[:, 0], numbers[:, 1])


def _compare_cuts(config: TrainConfig, check: str, alone: FloatArray, together: FloatArray) -> Verdict:
    """The same numbers by passes over one row and by a pass over all."""
    largest, apart = float(np.abs(together).max()), float(np.abs(alone - together).max())
    found = f"numbers up to {largest:.2e}, {apart:.1e} apart"
    if together.min() == together.max():
        return Verdict(check, False, f"every number is {largest:.2e}", "its head says the same of everything")
    return Verdict(check, apart <= _RELATIVE[config.model.dtype] * largest, found, _ROWS_MEET)


def _first_of_each_group(batch: Batch) -> list[int]:
    return np.unique(batch.groups, return_index=True)[1].tolist()


def select_tokens(batch: Batch, column: FloatArray, rows: Sequence[int]) -> FloatArray:
    """The part of a column that belongs to `rows`."""
    return np.concatenate([column[batch.response_offsets[row] : batch.response_offsets[row + 1]] for row in rows])


def _check_cut(config: TrainConfig, placement: Placement, algorithm: Algorithm, done: StepResult) -> Verdict:
    """The large step, by another number of micro-batches."""
    batch, training = done.batch, config.training
    smaller = training.model_copy(
        update={"tokens_per_micro_batch": max(1, (len(batch.prompt_ids) + len(batch.response_ids)) // _PROMPTS)}
    )
    name = "actor_in_smaller_micro_batches"
    spec = replace(actor_spec(config), training=smaller)
    actor = placement.group(Role.Actor, Actor, TrainWorker, spec, name=name)
    with placed_step(batch, algorithm, config, 1) as placed:
        norm = update(actor, None, algorithm, placed, config)[f"{name}/grad_norm"]
    whole = done.metrics["actor/grad_norm"]
    found = f"gradient norm {whole:.6g} and {norm:.6g} by {smaller.tokens_per_micro_batch} tokens a micro-batch"
    apart = abs(norm - whole)
    return Verdict("micro-batch size", apart <= _RELATIVE[config.model.dtype] * abs(whole), found, _ROWS_MEET)
