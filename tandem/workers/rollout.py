"""The rollout role: asks the generation engine, keeps the policy's side of every conversation."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.config.tree import GenerationConfig, ModelConfig
from tandem.errors import EngineError
from tandem.generation.native import NativeEngine
from tandem.models.loading import load_policy, stop_token_ids
from tandem.rollout.single_turn import single_turn
from tandem.training.fsdp import FsdpEngine
from tandem.types import IntArray, Prompt, SamplingParams, Trajectory
from tandem.weights.bridge import Bridge
from tandem.workers.dispatch import Dispatch, Mesh, register
from tandem.workers.host import Place, Worker
from tandem.workers.training import TrainWorker


class Ask(NamedTuple):
    """A prompt, and the seed of each answer that is wanted."""

    prompt: Prompt
    seeds: tuple[int, ...]


class RolloutWorker(Worker):
    """One generation engine a rank, each with the whole model; prompts are spread over the ranks.

    Alone in a pool of one with an actor, the engine uses the actor's parameters; else it has its own, which are updated
    at each `publish`.
    """

    def __init__(
        self, place: Place, model: ModelConfig, config: GenerationConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        super().__init__(place)
        actor: TrainWorker | None = place.neighbours.get("actor")
        self._weights: Callable[[], Iterable[tuple[str, Tensor]] | None] = lambda: None
        """Where published weights come from; None: they are there already."""
        if actor is not None and place.size == 1 and isinstance(actor.engine, FsdpEngine):
            policy = actor.engine.model
        else:
            policy = load_policy(model)
            self._weights = actor.engine.named_weights if actor else self._weights
        self._engine = NativeEngine(policy, max_running=config.max_running, tokenizer=tokenizer)
        self._tokenizer = tokenizer
        self._config = config
        self._stop_token_ids = stop_token_ids(policy, tokenizer)
        self._version = -1
        self._events = asyncio.new_event_loop()  # a Runner would touch the signal handlers at every call

    @property
    def meshes(self) -> dict[str, Mesh]:
        return {"generation": Mesh({"data": self.place.size})}

    @register(Dispatch.DATA_PARALLEL, mesh="generation")
    def generate(self, asks: Sequence[Ask], greedy: bool = False) -> list[list[Trajectory]]:
        """To train on: a trajectory for each seed of each prompt."""
        config = self._config
        return self._run(asks, self._sampling(0.0 if greedy else config.temperature, config.top_p, config.top_k))

    @register(Dispatch.DATA_PARALLEL, mesh="generation")
    def generate_for_eval(self, asks: Sequence[Ask]) -> list[list[Trajectory]]:
        """The validation answers, drawn as `generation.eval` says."""
        how = self._config.eval
        return self._run(asks, self._sampling(how.temperature, how.top_p, top_k=0))

    @register(Dispatch.ALL, mesh="generation")
    def join_bridge(self, address: str) -> None:
        """From now on weights come from the actor's pool over this bridge."""
        self._weights = Bridge.join(address, self.place.rank).receive

    @register(Dispatch.REPLICATED, mesh="generation")
    def publish(self, version: int) -> None:
        """Serve the actor's present weights as `version`; without an actor, those that were loaded."""
        if version <= self._version:
            raise EngineError(f"weights of version {version} published after version {self._version}")
        self._version = version
        self._engine.load_weights(version, self._weights())

    def close(self) -> None:
        self._engine.close()
        self._events.close()

    def _run(self, asks: Sequence[Ask], sampling: SamplingParams) -> list[list[Trajectory]]:
        prompts, seeds = [ask.prompt for ask in asks], [ask.seeds for ask in asks]
        return self._events.run_until_complete(
            single_turn(prompts, seeds, sampling, self._engine.generate, self._decode)
        )

    def _sampling(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=self._config.max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            stop_strings=tuple(self._config.stop_strings),
        )

    def _decode(self, rows: list[IntArray]) -> list[str]:
        return self._tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True)


def draw_asks(prompts: Sequence[Prompt], samples: int, *place: int) -> list[Ask]:
    """Seeds from (run seed, purpose, step) and the place in the step alone: a resumed run draws the same ones."""
    return [
        Ask(prompt, tuple(np.random.SeedSequence([*place, number]).generate_state(samples, "u8").tolist()))
        for number, prompt in enumerate(prompts)
    ]
