"""The rollout role: requests -> generation engines -> trajectories."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tandem.activity import count
from tandem.config.conversation import ConversationConfig
from tandem.config.data import ImagesConfig
from tandem.config.generation import EvalSamplingConfig, GenerationConfig, NativeGenerationConfig
from tandem.config.model import ModelConfig
from tandem.errors import EngineError, UserError
from tandem.generation.base import GenerationEngine
from tandem.generation.resumable import ResumableGeneration
from tandem.pictures.shown import ModelPictures
from tandem.pictures.store import PictureStore
from tandem.rollout.single_turn import single_turn
from tandem.types import IntArray, Prompt, SamplingParams, Trajectory
from tandem.weights.base import Weights
from tandem.workers.event_loop import PausingEventLoop
from tandem.workers.host import Worker, WorkerContext
from tandem.workers.registration import Arguments, Calls, Dispatch, Mesh, OwnDispatch, Returns, register
from tandem.workers.training import TrainWorker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tandem.generation.native import NativeEngine
    from tandem.weights.bridge import Address
    from tandem.workers.conversations import HoldsConversations


def _ask_engines(mesh: Mesh, arguments: Arguments) -> Calls:
    return dict.fromkeys(mesh.answering_ranks, arguments)


ANSWERING = OwnDispatch(distribute=_ask_engines, collect=lambda mesh, calls, answers: list(answers.values()))
"""The rank of each engine, with the same arguments; the answer is the list of the engines' answers."""


TRAIN, EVAL = 0, 1
"""Purposes, for which different seeds are drawn."""


_COLLECTING_SHARE = 0.2
"""Of the patience with a slice: until then it goes on where some groups are complete, and others are not."""


class RolloutRequest(NamedTuple):
    """A prompt, and the seed of each answer that is wanted."""

    prompt: Prompt
    seeds: tuple[int, ...]
    sampling: EvalSamplingConfig | None = None
    """Of a validation answer, where `generation.eval` does not say it."""


class Ask(NamedTuple):
    """A prompt to answer while other things go on (`RolloutWorker.advance`)."""

    request: RolloutRequest
    with_greedy: bool
    """A greedy answer is wanted too."""


class Advance(NamedTuple):
    """What an engine has to show after a while."""

    done: list[tuple[int, list[Trajectory], Trajectory | None]]
    """The asks that are complete: number, siblings in the order of the seeds, greedy answer where it was wanted."""
    room: int
    """Samples that the engine could start at once; negative where some wait already."""
    tokens: int
    """Tokens that the policy made for the asks that are complete."""


@dataclass(frozen=True)
class RolloutSpec:
    """What the generation engines are made from."""

    model: ModelConfig
    generation: GenerationConfig
    tokenizer: PreTrainedTokenizerBase
    conversation: ConversationConfig | None = None
    """None: an answer is one turn."""
    memory_share: float = 0.9
    """Of each GPU, for an engine in a process of its own, where `generation.memory_share` does not say it."""
    pictures: Path | None = None
    """Where pictures are stored, for a model that sees them."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """How those that conversations show are resized."""
    frozen: bool = False
    """The weights of `model.path` stay, whoever trains in this process: a judge's."""


class RolloutWorker(Worker[RolloutSpec]):
    """Generation engines on the ranks of a pool; prompts are spread over the ranks that host an engine.

    A native engine runs on every rank, with a whole model of its own. In a pool of one rank it generates with the
    actor's own parameters instead, if the actor is there and trains by FSDP. Other engines run in processes of their
    own: of every `generation.tensor_parallel` adjacent ranks the first hosts one engine on the devices of all of them.

    A subclass that answers in another way overrides `answer`, which everything here calls.
    """

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        import torch

        from tandem.generation.start import start_engine
        from tandem.models.loading import stop_token_ids
        from tandem.workers.conversations import Speaker, make_conversations

        super().__init__(context, spec)
        model, config, tokenizer = spec.model, spec.generation, spec.tokenizer
        if config.type != "native" and config.memory_share is None and torch.cuda.is_available():
            config = config.model_copy(update={"memory_share": spec.memory_share})
        beside = None if spec.frozen else context.colocated.get("actor")
        actor = beside if isinstance(beside, TrainWorker) else None
        self._weights: Callable[[], Weights | None] = actor.engine.named_weights if actor else lambda: None
        """Where published weights come from; None: they are there already."""
        self._ranks_per_engine = (
            1 if config.type == "native" else ranks_per_engine(config.tensor_parallel, context.size)
        )
        self._engine: GenerationEngine | None = None
        self._policy: PreTrainedModel | None = None
        """The native engine's model."""
        self._has_mixed_weights = False
        if config.type == "native":
            self._engine = self._native(model, config, tokenizer, actor)
        elif context.rank % self._ranks_per_engine == 0:
            source = self._weights if context.size == 1 and actor else None
            devices = self._devices(config.tensor_parallel)
            self._engine = start_engine(model, config, tokenizer, source, devices, spec.pictures, spec.images)
        else:
            self._devices(config.tensor_parallel)
        self._stop_token_ids = stop_token_ids(model, tokenizer)
        self._generation = ResumableGeneration(self._engine, tokenizer) if self._engine is not None else None
        self._version = -1
        self._answering: dict[int, asyncio.Task[tuple[list[Trajectory], Trajectory | None]]] = {}
        """What `advance` was asked and has not returned, by number."""
        self._events = PausingEventLoop()  # a Runner would touch the signal handlers at every call
        self._conversations: HoldsConversations | None = None
        if spec.conversation is not None and self._engine is not None and self._generation is not None:
            engine, generate = self._engine, self._generation.generate
            seen = None if spec.pictures is None else ModelPictures(model.path, spec.images, spec.pictures)
            speaker = Speaker(
                tokenizer, self._stop_token_ids, self._decode, generate, lambda: engine.limits.positions, seen
            )
            self._conversations = make_conversations(spec.conversation, speaker)
            self._events.run_until_complete(self._conversations.open())

    def _native(
        self,
        model: ModelConfig,
        config: NativeGenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        actor: TrainWorker | None,
    ) -> NativeEngine:
        from tandem.generation.native import NativeEngine
        from tandem.models.loading import load_policy, never_drawn
        from tandem.models.tower import PictureTower
        from tandem.training.fsdp import FsdpEngine

        if actor is not None and self.context.size == 1 and isinstance(actor.engine, FsdpEngine):
            self._weights = lambda: None
            policy = actor.engine.model
        else:
            policy = load_policy(model)
        self._policy = policy
        record = None if config.cuda_graphs else False
        pictures = self.spec.pictures
        return NativeEngine(
            policy,
            max_running=config.max_running,
            tokenizer=tokenizer,
            record=record,
            prefix_cache_tokens=config.prefix_cache_tokens,
            tower=PictureTower(policy, model.path, PictureStore(pictures).read) if pictures is not None else None,
            never_drawn=never_drawn(model, tokenizer),
        )

    def _devices(self, wanted: int) -> str | None:
        """What CUDA_VISIBLE_DEVICES is for this rank's engine: the devices of the ranks that share the engine, which
        all call this together. None: the engine may see every device."""
        import torch

        if not torch.cuda.is_available() or (self._ranks_per_engine == 1 and wanted > 1):
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = torch.cuda.current_device()
        devices = [visible.split(",")[own] if visible else str(own)]
        if self._ranks_per_engine > 1:
            everyone: list[Any] = [None] * self.context.size
            torch.distributed.all_gather_object(everyone, devices[0])  # pyright: ignore[reportUnknownMemberType]
            devices = everyone[self.context.rank : self.context.rank + self._ranks_per_engine]
        return ",".join(devices)

    @property
    def meshes(self) -> dict[str, Mesh]:
        return {
            "generation": Mesh({"data": self.context.size // self._ranks_per_engine, "tensor": self._ranks_per_engine})
        }

    @register(Dispatch.DATA_PARALLEL, mesh="generation", returns=Returns.PER_ROW)
    def generate(self, requests: Sequence[RolloutRequest], greedy: bool = False) -> list[list[Trajectory]]:
        """A trajectory for each seed of each prompt: for a dataflow that waits for them. A Trainer calls `advance`."""
        sampling = self._greedy() if greedy else self._stochastic()
        return self._run(requests, [sampling] * len(requests))

    @register(Dispatch.DATA_PARALLEL, mesh="generation", returns=Returns.PER_ROW)
    def generate_for_eval(self, requests: Sequence[RolloutRequest]) -> list[list[Trajectory]]:
        """Validation answers, drawn as each request says, else as `generation.eval`."""
        usual = self.spec.generation.eval
        return self._run(requests, [self._validation(request.sampling or usual) for request in requests])

    @register(Dispatch.EACH, mesh="generation")
    def advance(self, asks: Mapping[int, Ask], patience_s: float) -> Advance:
        """Start on `asks`, in their order, and generate until one of all that are under way is complete, or a few that
        end together; until another call waits for this process, where that is known; or until `patience_s` have
        passed. The rest goes on in the next call. Raises what an answer raised."""
        self._refuse_mixed_weights()
        for number, ask in asks.items():
            self._answering[number] = self._events.create_task(self._answer_with_greedy(ask))
        if self._answering:
            self._generate_for(patience_s)
        ended = [number for number, task in self._answering.items() if task.done()]
        done = [(number, *self._answering.pop(number).result()) for number in ended]
        made = (one for _, siblings, greedy in done for one in (*siblings, greedy) if one is not None)
        return Advance(done, self._room(), tokens=sum(int(one.loss_mask.sum()) for one in made))

    @register(ANSWERING, mesh="generation")
    def room(self) -> int:
        """Samples that the engine could start at once; negative where some wait already."""
        return self._room()

    @register(Dispatch.ALL, mesh="generation")
    def join_bridge(self, address: Address) -> None:
        """Take weights from the actor's pool over this bridge from now on: into the native engine's own parameters, or
        whole for an engine that cuts them itself. A rank without an engine gets none."""
        from tandem.models.loading import named_part
        from tandem.weights.bridge import Receiver

        receiver = Receiver(address, self.context.rank, None if self._engine is not None else {})
        policy = self._policy
        self._weights = receiver.receive
        if policy is not None:
            self._weights = lambda: receiver.receive_into(partial(named_part, policy))

    @register(Dispatch.REPLICATED, mesh="generation")
    def publish(self, version: int) -> None:
        """Serve the actor's present weights as `version`; without an actor, those that were loaded."""
        if version <= self._version:
            raise EngineError(f"weights of version {version} published after version {self._version}")
        self._version, self._has_mixed_weights = version, True
        weights = self._weights()
        if self._engine is not None:
            self._engine.load_weights(version, weights)
        else:
            deque(weights or (), maxlen=0)  # every rank takes part in gathering them
        self._has_mixed_weights = False

    @register(Dispatch.REPLICATED, mesh="generation")
    def sleep(self) -> None:
        """Give memory back until `wake`, as `generation.sleep` says. Answers under way keep what they have and go on
        after `wake`."""
        stays = self.spec.generation.sleep == "idle" and self._generation is not None and self._generation.unfinished
        if self._generation is not None and not stays:
            self._generation.pause()

    @register(Dispatch.REPLICATED, mesh="generation")
    def wake(self) -> None:
        """Take the memory again."""
        if self._generation is not None:
            self._generation.resume()

    def close(self) -> None:
        self._events.run_until_complete(_cancelled(self._answering.values()))
        if self._conversations is not None:
            self._events.run_until_complete(self._conversations.close())
        self._events.run_until_complete(_cancelled(asyncio.all_tasks(self._events)))
        if self._engine is not None:
            self._engine.close()
        self._events.close()

    def _run(self, requests: Sequence[RolloutRequest], samplings: Sequence[SamplingParams]) -> list[list[Trajectory]]:
        if self._generation is None:
            return []  # the rank that hosts the engine answers
        self._refuse_mixed_weights()
        if not self._generation.awake:
            raise EngineError("the generation engine is not ready: wake it after sleep")

        ended = 0

        async def counted(answering: Awaitable[list[Trajectory]]) -> list[Trajectory]:
            nonlocal ended
            siblings = await answering
            count(ended := ended + 1)  # shown where the controller is in this process
            return siblings

        async def together() -> list[list[Trajectory]]:
            return await asyncio.gather(*map(counted, map(self.answer, requests, samplings)))

        return self._events.run_until_complete(together())

    def _refuse_mixed_weights(self) -> None:
        if self._has_mixed_weights:
            raise EngineError(f"only a part of the weights of version {self._version} has arrived: publish anew")

    def _generate_for(self, patience_s: float) -> None:
        calls, another_call = self.context.calls_fd, self._events.create_future()
        if calls is not None:
            self._events.add_reader(calls, lambda: another_call.done() or another_call.set_result(None))
        self._events.run_until_complete(self._until_some_are_complete(patience_s, another_call))
        if calls is not None:
            self._events.remove_reader(calls)

    async def _until_some_are_complete(self, patience_s: float, another_call: asyncio.Future[None]) -> None:
        """A group that is complete early in the slice waits for others: what ends at about the same time is answered
        at the same time."""
        pending: set[asyncio.Future[Any]] = {*self._answering.values(), another_call}
        start, left_s = self._events.time(), patience_s
        while len(pending) > 1:
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            left_s = start + patience_s * _COLLECTING_SHARE - self._events.time()
            if not done or another_call in done or left_s <= 0:
                return

    async def answer(self, request: RolloutRequest, sampling: SamplingParams) -> list[Trajectory]:
        """A trajectory for each seed of a prompt, in their order: to train on, greedy ones, and those of a validation.

        Answers to many prompts are made at the same time in one event loop. Each ends, whatever it waits for.
        """
        if self._conversations is not None:
            return await self._conversations.answer(request.prompt, request.seeds, sampling)
        assert self._generation is not None
        return await single_turn(request.prompt, request.seeds, sampling, self._generation.generate, self._decode)

    async def _answer_with_greedy(self, ask: Ask) -> tuple[list[Trajectory], Trajectory | None]:
        wanted = [self.answer(ask.request, self._stochastic())]
        if ask.with_greedy:
            wanted.append(self.answer(ask.request._replace(seeds=ask.request.seeds[:1]), self._greedy()))
        siblings, *greedy = await asyncio.gather(*wanted)
        return siblings, greedy[0][0] if greedy else None

    def _room(self) -> int:
        assert self._engine is not None and self._generation is not None
        return self._engine.limits.max_running - self._generation.unfinished

    def _stochastic(self) -> SamplingParams:
        config = self.spec.generation
        return self._sampling(config.temperature, config.top_p, config.top_k)

    def _greedy(self) -> SamplingParams:
        return self._sampling(0.0, self.spec.generation.top_p, self.spec.generation.top_k)

    def _validation(self, how: EvalSamplingConfig) -> SamplingParams:
        sampling = self._sampling(how.temperature, how.top_p, top_k=0)
        return replace(sampling, max_tokens=how.max_response_tokens or sampling.max_tokens)

    def _sampling(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=self.spec.generation.max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            stop_strings=tuple(self.spec.generation.stop_strings),
        )

    def _decode(self, rows: list[IntArray]) -> list[str]:
        """Each different row once: siblings often answer alike."""
        tokenizer: Any = self.spec.tokenizer  # its method is not typed
        keys = [tuple(row.tolist()) for row in rows]
        different = list(dict.fromkeys(keys))
        texts = dict(zip(different, tokenizer.batch_decode(different, skip_special_tokens=True), strict=True))
        return [texts[key] for key in keys]


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """End these tasks."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def ranks_per_engine(tensor_parallel: int, ranks: int) -> int:
    """Neighbouring ranks that give their devices to one engine; 1 where a single rank sees all devices.

    Raises UserError when the ranks of the pool do not divide into engines.
    """
    if ranks == 1:
        return 1
    if ranks % tensor_parallel:
        raise UserError(
            f"generation.tensor_parallel: {tensor_parallel} devices an engine, but the pool's {ranks} ranks do not "
            f"divide into such engines; take a divisor of {ranks}"
        )
    return tensor_parallel


def seeded_requests(prompts: Sequence[Prompt], samples: int, *seed: int) -> list[RolloutRequest]:
    """A request for each prompt; `seed` is of the run, the purpose and the step, to which the prompt's place comes."""
    return [seeded_request(prompt, samples, *seed, place) for place, prompt in enumerate(prompts)]


def seeded_request(prompt: Prompt, samples: int, *seed: int) -> RolloutRequest:
    """Its seeds follow from `seed` (run, purpose, step, place in the step) alone: a resumed run draws the same ones."""
    return RolloutRequest(prompt, tuple(np.random.SeedSequence(seed).generate_state(samples, "u8").tolist()))
