"""The rollout role: asks the generation engine, keeps the policy's side of every conversation."""

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.generation import NativeGenerationConfig
from tandem.config.tree import GenerationConfig, ModelConfig
from tandem.errors import EngineError
from tandem.generation.base import GenerationEngine
from tandem.generation.native import NativeEngine
from tandem.generation.served import serve
from tandem.models.loading import load_policy, stop_token_ids
from tandem.rollout.single_turn import single_turn
from tandem.training.fsdp import FsdpEngine
from tandem.types import IntArray, Prompt, SamplingParams, Trajectory
from tandem.weights.base import Weights
from tandem.weights.bridge import Bridge
from tandem.workers.dispatch import Dispatch, Mesh, register
from tandem.workers.host import Place, Worker
from tandem.workers.training import TrainWorker


class Ask(NamedTuple):
    """A prompt, and the seed of each answer that is wanted."""

    prompt: Prompt
    seeds: tuple[int, ...]


class RolloutWorker(Worker):
    """Generation engines on the ranks of a pool; prompts are spread over the ranks that host any.

    The native engine is one a rank, each with the whole model: that of the actor where both are alone in a pool of
    one. Others have processes of their own; with `tensor_parallel` the first of so many ranks hosts their engine.
    """

    def __init__(
        self, place: Place, model: ModelConfig, config: GenerationConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        super().__init__(place)
        actor: TrainWorker | None = place.neighbours.get("actor")
        self._weights: Callable[[], Weights | None] = actor.engine.named_weights if actor else lambda: None
        """Where published weights come from; None: they are there already."""
        self._sharing = 1 if config.type == "native" else math.gcd(config.tensor_parallel, place.size)
        """Ranks that have one engine."""
        self._engine: GenerationEngine | None = None
        if config.type == "native":
            self._engine = self._native(model, config, tokenizer, actor)
        elif place.rank % self._sharing == 0:
            source = self._weights if place.size == 1 and actor else None
            self._engine = serve(model, config, tokenizer, source, self._devices(config.tensor_parallel))
        else:
            self._devices(config.tensor_parallel)
        self._tokenizer = tokenizer
        self._config = config
        self._stop_token_ids = stop_token_ids(model, tokenizer)
        self._version = -1
        self._events = asyncio.new_event_loop()  # a Runner would touch the signal handlers at every call

    def _native(
        self, model: ModelConfig, config: NativeGenerationConfig, tokenizer: Any, actor: TrainWorker | None
    ) -> NativeEngine:
        if actor is not None and self.place.size == 1 and isinstance(actor.engine, FsdpEngine):
            self._weights = lambda: None
            policy = actor.engine.model
        else:
            policy = load_policy(model)
        record = None if config.cuda_graphs else False
        return NativeEngine(policy, max_running=config.max_running, tokenizer=tokenizer, record=record)

    def _devices(self, wanted: int) -> str | None:
        """CUDA_VISIBLE_DEVICES of this rank's engine: the devices of the ranks that share it; all call it together."""
        if not torch.cuda.is_available() or (self._sharing == 1 and wanted > 1):
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = torch.cuda.current_device()
        devices = [visible.split(",")[own] if visible else str(own)]
        if self._sharing > 1:
            everyone: list[Any] = [None] * self.place.size
            torch.distributed.all_gather_object(everyone, devices[0])
            devices = everyone[self.place.rank : self.place.rank + self._sharing]
        return ",".join(devices)

    @property
    def meshes(self) -> dict[str, Mesh]:
        return {"generation": Mesh({"data": self.place.size // self._sharing, "tensor": self._sharing})}

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
        weights = self._weights()
        if self._engine is not None:
            self._engine.load_weights(version, weights)
        else:
            deque(weights or (), maxlen=0)  # every rank takes part in gathering them

    @register(Dispatch.REPLICATED, mesh="generation")
    def sleep(self) -> None:
        """Give memory back until `wake`, as `generation.sleep` says."""
        if self._engine is not None:
            self._engine.sleep()

    @register(Dispatch.REPLICATED, mesh="generation")
    def wake(self) -> None:
        if self._engine is not None:
            self._engine.wake()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._events.close()

    def _run(self, asks: Sequence[Ask], sampling: SamplingParams) -> list[list[Trajectory]]:
        if self._engine is None:
            return []  # the rank that hosts the engine answers
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
