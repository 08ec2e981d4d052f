"""`tandem check`: do engine, trainer and tokenizer of a configuration agree, before a run is spent on it?

A few prompts of the run are answered, and three steps are made at learning rate 0. Where log-probs differ, the likely
cause is the one explanation by which they would not: each is a frozen model that has the fault on purpose.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from tandem.algorithms import make_algorithm
from tandem.batching.packing import to_batch
from tandem.cluster import make_cluster
from tandem.config.tree import ModelConfig, TrainConfig
from tandem.controller.assembly import Roles, actor_spec, make_roles
from tandem.controller.dataflow import EVAL, Clock, Step, learn_step
from tandem.controller.learning import needs_old_logprobs, update
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import Role
from tandem.controller.roles import Actor, Policy
from tandem.data.chat import encode, render
from tandem.data.dataset import RLHFDataset
from tandem.jobs.inputs import Inputs
from tandem.reward.manager import RewardManager
from tandem.types import Batch, FloatArray, Group, Prompt, Score
from tandem.workers.rollout import seeded_requests
from tandem.workers.training import TrainSpec, TrainWorker

_PROMPTS = 8
_WORST = 5
_BOUNDS = {"float32": (1e-3, 1e-4), "bfloat16": (1.0, 0.03)}
"""Largest and mean difference of two log-probs of one token, by `model.dtype`."""
_ROUNDING = 3
"""Two computations in bfloat16 differ from float32 by amounts of this ratio at most."""
_QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
_ANSWER = [{"role": "assistant", "content": "4"}]


class Verdict(NamedTuple):
    check: str
    passed: bool
    found: str
    cause: str = ""


def check(config: TrainConfig, inputs: Inputs[RLHFDataset]) -> Iterator[Verdict]:
    """The verdicts, one after the other."""
    config = at_rest(config)
    yield from check_tokenizer(config, inputs.tokenizer)
    with closing(make_cluster(config)) as cluster, closing(RewardManager(config.reward, config.trainer.seed)) as reward:
        yield from check_numbers(config, inputs, Placement(cluster, pools_of(config)), reward)


def check_tokenizer(config: TrainConfig, tokenizer: Any) -> Iterator[Verdict]:
    """Against the model's own configuration, against itself, and against the tokenizer that the engine has."""
    described = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    vocabulary: int = described.get_text_config().vocab_size
    own: Any = described.get_text_config().eos_token_id
    ends = set(own if isinstance(own, list) else [own]) - {None}
    largest, end = max(tokenizer.get_vocab().values()), tokenizer.eos_token_id
    sound = largest < vocabulary and (not ends or end in ends)
    found = f"ids up to {largest} of {vocabulary}, end of sequence {end}, the model's {sorted(ends)}"
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
    prompt = render(tokenizer, _QUESTION, generation_prompt=True)
    conversation = render(tokenizer, _QUESTION + _ANSWER)
    cause = "what the model is asked is not how a conversation with its answer begins"
    yield Verdict("chat template", conversation.startswith(prompt), "prompt + answer = conversation", cause)


def check_numbers(
    config: TrainConfig, inputs: Inputs[RLHFDataset], placement: Placement, reward: RewardManager
) -> Iterator[Verdict]:
    """The numbers of the trainer and the engine, at a learning rate of 0."""
    assert inputs.train is not None
    algorithm = make_algorithm(config.algorithm, config.generation.max_response_tokens)
    roles = make_roles(config, inputs.tokenizer, algorithm, 3, placement, reward)
    prompts = [inputs.train[row] for row in range(min(_PROMPTS, len(inputs.train)))]
    groups = _answer(config, roles, prompts, 0)
    batch = to_batch(groups)
    roles.experience.devices.to_training()
    trainer = roles.actor.logprobs(batch).get()
    sound, found = _compare(config, batch, trainer)
    cause = (
        "" if sound else _explain(config, placement, batch, trainer) + _worst_tokens(inputs.tokenizer, batch, trainer)
    )
    yield Verdict("log-probs, engine against trainer", sound, found, cause)

    steps = [learn_step(roles, algorithm, config, groups, step, Clock()) for step in (1, 2, 3)]
    roles.experience.devices.to_training()
    moved = float(np.abs(roles.actor.logprobs(batch).get() - trainer).max())
    yield Verdict(
        "three steps at lr 0", moved == 0, f"log-probs moved by {moved:.1e}", "weights change without a gradient"
    )

    roles.publish(4)
    again = to_batch(_answer(config, roles, prompts, 4))
    roles.experience.devices.to_training()
    same, found = _compare(config, again, roles.actor.logprobs(again).get())
    yield Verdict(
        "weights after a publish", same, found, "the publish leaves other weights in the engine than it was given"
    )
    yield _check_cut(config, placement, steps[0])


def _check_cut(config: TrainConfig, placement: Placement, done: Step) -> Verdict:
    """The same step by another number of micro-batches."""
    batch, training = done.batch, config.training
    smaller = training.model_copy(
        update={"tokens_per_micro_batch": max(1, (len(batch.prompt_ids) + len(batch.response_ids)) // _PROMPTS)}
    )
    name = "actor_in_smaller_micro_batches"
    spec = replace(actor_spec(config, 3), training=smaller)
    actor = placement.group(Role.Actor, Actor, TrainWorker, spec, name=name)
    algorithm = make_algorithm(config.algorithm, config.generation.max_response_tokens)
    if not needs_old_logprobs(config, algorithm):
        batch.tokens.old_logprobs = None
    norm = update(actor, None, algorithm, batch, config, 1)[f"{name}/grad_norm"]
    whole = done.metrics["actor/grad_norm"]
    found = f"gradient norm {whole:.6g} and {norm:.6g} by {smaller.tokens_per_micro_batch} tokens a micro-batch"
    bound = 1e-4 if config.model.dtype == "float32" else 0.02
    return Verdict(
        "micro-batch size", abs(norm - whole) <= bound * abs(whole), found, "rows see one another, or padding"
    )


def at_rest(config: TrainConfig) -> TrainConfig:
    """The same, but nothing learns, and each publish is checked."""
    still = config.training.optimizer.model_copy(update={"lr": 0.0})
    training: Any = config.training.model_copy(update={"optimizer": still, "skip_zero_advantage": False})
    generation: Any = config.generation
    if generation.type != "native":
        generation = generation.model_copy(update={"sync": generation.sync.model_copy(update={"checksum": True})})
    return config.model_copy(update={"training": training, "generation": generation})


def _answer(config: TrainConfig, roles: Roles, prompts: list[Prompt], step: int) -> list[Group]:
    """Rewards alternate: every group has something to learn."""
    requests = seeded_requests(prompts, max(2, config.algorithm.group_size), config.trainer.seed, EVAL, step)
    siblings = roles.experience.rollout.generate(requests).get()
    return [Group(group, [Score(float(place % 2)) for place in range(len(group))]) for group in siblings]


def _compare(config: TrainConfig, batch: Batch, trainer: FloatArray) -> tuple[bool, str]:
    largest, mean = _difference(batch, trainer)
    bounds = _BOUNDS[config.model.dtype]
    return largest <= bounds[0] and mean <= bounds[1], f"differ by {mean:.1e} on average, {largest:.1e} at most"


def _difference(batch: Batch, trainer: FloatArray) -> tuple[float, float]:
    assert batch.tokens.rollout_logprobs is not None
    difference = np.abs(trainer - batch.tokens.rollout_logprobs)[batch.loss_mask]
    return float(difference.max()), float(difference.mean())


def _explain(config: TrainConfig, placement: Placement, batch: Batch, trainer: FloatArray) -> str:
    """The fault by which the engine's log-probs would be right."""
    model, temperature = config.model, config.generation.temperature
    other = "bfloat16" if model.dtype == "float32" else "float32"
    suspects: dict[str, tuple[ModelConfig, float]] = {
        f"the trainer's log-probs are not those at generation.temperature {temperature}": (model, temperature),
        f"the engine's log-probs are at temperature 1, not at {temperature}": (model, 1.0),
    }
    found = _difference(batch, trainer)[1]

    def logprobs_of(suspect: ModelConfig, temperature: float) -> FloatArray:
        spec = TrainSpec(suspect, config.training, temperature=temperature)
        return placement.group(Role.RefPolicy, Policy, TrainWorker, spec, name="suspect").logprobs(batch).get()

    for cause, (suspect, suspect_temperature) in suspects.items():
        if _difference(batch, logprobs_of(suspect, suspect_temperature))[1] < 0.5 * found:
            return cause
    other_dtype = logprobs_of(model.model_copy(update={"dtype": other}), temperature)
    rounded = np.abs(other_dtype - trainer)[batch.loss_mask].mean()
    if rounded / _ROUNDING < found < rounded * _ROUNDING:
        return f"dtype mismatch: the engine computes in {other}, or rounds as much"
    return "the engine holds other weights than the trainer, or computes another model"


def _worst_tokens(tokenizer: Any, batch: Batch, trainer: FloatArray) -> str:
    rollout = batch.tokens.rollout_logprobs
    assert rollout is not None
    places = np.argsort(-np.abs(trainer - rollout))[:_WORST]
    lines = [
        f"row {batch.row_of_token[i]} token {i - batch.response_offsets[batch.row_of_token[i]]} "
        f"{tokenizer.decode([batch.response_ids[i]])!r}: engine {rollout[i]:.5f}, trainer {trainer[i]:.5f}"
        for i in places
    ]
    return "\n".join(["; the worst tokens:", *lines])
