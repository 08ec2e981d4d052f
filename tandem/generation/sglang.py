"""SGLang as the engine of a replica, through its `Engine`: the replica's process asks, SGLang's own processes compute.

The only file that imports SGLang; its schedulers import it too, to take weights from memory that is shared.
"""

# pyright: reportMissingImports=false
# SGLang has an environment of its own, where the types are not checked

import asyncio
import pickle
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import io_struct

from tandem.config.generation import SglangGenerationConfig
from tandem.config.model import ModelConfig
from tandem.errors import EngineError
from tandem.types import Completion, Delta, FloatArray, IntArray, PromptLogprobs, Request, Status, TopLogprobs
from tandem.weights.base import Commit, Directory, Part
from tandem.weights.shared_memory import attach

_LOADER = f"{__name__}.load_bucket"
_STEP_S = 0.005  # a step waits so long for an output, and the caller's messages wait with it
_STATUSES = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class SglangEngine:
    """SGLang as a SteppedEngine."""

    def __init__(self, model: ModelConfig, config: SglangGenerationConfig) -> None:
        on_gpu = torch.cuda.is_available()
        options: dict[str, Any] = {
            "model_path": str(model.path),
            "dtype": model.dtype,
            "trust_remote_code": model.trust_remote_code,
            "tp_size": config.tensor_parallel,
            "enable_memory_saver": on_gpu and config.sleep != "never",
            "enable_deterministic_inference": on_gpu,  # without it seeds are ignored
            "custom_weight_loader": [_LOADER],
            "incremental_streaming_output": True,  # each output of a stream holds what is new in it
            **({} if config.memory_share is None else {"mem_fraction_static": config.memory_share}),
            **config.engine_args,
        }
        self._engine = Engine(**options)
        self._manager = self._engine.tokenizer_manager
        self._asleep: set[str] = set()
        self._paused = self._updating = False
        self._running: dict[int, asyncio.Task[None]] = {}
        self._outputs: list[tuple[int, Completion | Delta]] = []
        """What `step` has not returned yet."""
        self._moved = asyncio.Event()
        self._version = -1
        self.max_tokens = int(self._manager.max_req_input_len)  # what lies beyond it SGLang keeps for itself
        self.vocabulary = int(self._manager.model_config.vocab_size)
        states = self._wait(self._manager.get_internal_state())  # one a data-parallel scheduler
        self.max_running = sum(int(state["effective_max_running_requests_per_dp"]) for state in states)

    def add(self, number: int, request: Request, sample: int, streamed: bool) -> None:
        follow = self._follow_stream if streamed else self._follow
        task = self._engine.loop.create_task(follow(number, request, sample), name=_name(number, sample))
        self._wait(asyncio.sleep(0))
        if task.done():
            task.result()  # raises why SGLang refuses it
        self._running[number] = task

    def step(self) -> list[tuple[int, Completion | Delta]]:
        with suppress(TimeoutError):
            self._wait(asyncio.wait_for(self._moved.wait(), _STEP_S))
        return self._take()

    def abort(self, numbers: Sequence[int]) -> list[tuple[int, Completion | Delta]]:
        known = [self._running[number] for number in numbers if number in self._running]
        for task in known:
            self._manager.abort_request(task.get_name())
        if known:
            self._wait(asyncio.wait(known))
        return self._take()

    def load(self, part: Part) -> None:
        self._resume({"weights"})
        if not self._paused:
            self._wait(self._manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract")))
            self._paused = True
        if isinstance(part, Commit):
            self._commit(part.version)
        elif isinstance(part, Directory):
            _check(self._engine.update_weights_from_disk(str(part.path)))
        else:
            if not self._updating:
                _check(self._engine.begin_weight_update())
                self._updating = True
            bucket = torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8)
            _check(self._engine.update_weights_from_tensor([("bucket", bucket)], _LOADER, flush_cache=False))

    def sleep(self, weights: bool) -> None:
        if self._engine.server_args.enable_memory_saver:
            self._asleep = {"kv_cache", "weights"} if weights else {"kv_cache"}
            self._engine.release_memory_occupation(list(self._asleep))

    def wake(self) -> None:
        self._resume({"kv_cache", "weights"})

    def _resume(self, tags: set[str]) -> None:
        if self._asleep & tags:
            self._engine.resume_memory_occupation(list(self._asleep & tags))
            self._asleep -= tags

    def _commit(self, version: int) -> None:
        if self._updating:
            _check(self._engine.end_weight_update())
            self._updating = False
        renamed = io_struct.UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        self._wait(self._manager.update_weight_version(renamed))
        flushed = self._engine.flush_cache()
        _check((flushed.success, flushed.message))
        self._wait(self._manager.continue_generation(io_struct.ContinueGenerationReqInput(torch_empty_cache=False)))
        self._paused = False
        self._version = version

    async def _follow(self, number: int, request: Request, sample: int) -> None:
        answer = await self._engine.async_generate(**_arguments(number, request, sample))
        self._put(number, _completion(sample, answer))

    async def _follow_stream(self, number: int, request: Request, sample: int) -> None:
        first = True
        async for part in await self._engine.async_generate(**_arguments(number, request, sample), stream=True):
            self._put(number, _delta(sample, part, self._version, first))
            first = False

    def _put(self, number: int, output: Completion | Delta) -> None:
        self._outputs.append((number, output))
        self._moved.set()

    def _take(self) -> list[tuple[int, Completion | Delta]]:
        taken, self._outputs = self._outputs, []
        self._moved.clear()
        for number, output in taken:
            if output.status is not None:
                del self._running[number]
        for task in self._running.values():
            if task.done():
                task.result()  # raises what SGLang raised
        return taken

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        return self._engine.loop.run_until_complete(awaitable)


def load_bucket(model: Any, named: list[tuple[str, torch.Tensor]]) -> None:
    """In SGLang's scheduler, which knows it by its name: the weights of a bucket, in Hugging Face names."""
    ((_, pickled),) = named
    model.load_weights(list(attach(pickle.loads(pickled.cpu().numpy().tobytes()))))


def _arguments(number: int, request: Request, sample: int) -> dict[str, Any]:
    sampling = request.sampling
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop_strings),
        "skip_special_tokens": False,  # a stop string may be the text of one
        "no_stop_trim": True,
        "sampling_seed": request.seed(sample),
    }
    return {
        "input_ids": request.token_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0 if request.prompt_logprobs else -1,
        "top_logprobs_num": request.top_logprobs,
        "rid": _name(number, sample),
    }


def _name(number: int, sample: int) -> str:
    return f"{number}:{sample}"


def _completion(sample: int, answer: dict[str, Any]) -> Completion:
    status = _status(answer)
    assert status is not None, "SGLang answers in parts only where it was asked to"
    (token_ids, logprobs), versions = _tokens(answer), _versions(answer)
    return Completion(sample, token_ids, logprobs, versions, status, top=_top(answer), prompt=_prompt(answer))


def _delta(sample: int, part: dict[str, Any], version: int, first: bool) -> Delta:
    """`version`: the one that is served; SGLang gives those of each token at the end alone."""
    token_ids, logprobs = _tokens(part)
    status = _status(part)
    versions = np.full(len(token_ids), version, dtype=np.int32)
    if status is not None:
        known = _versions(part)
        versions = known[len(known) - len(token_ids) :]
    return Delta(sample, token_ids, logprobs, versions, status, top=_top(part), prompt=_prompt(part) if first else None)


def _tokens(answer: dict[str, Any]) -> tuple[IntArray, FloatArray]:
    logprobs = [entry[0] for entry in answer["meta_info"].get("output_token_logprobs", ())]
    return np.array(answer["output_ids"], dtype=np.int32), np.array(logprobs, dtype=np.float32)


def _top(answer: dict[str, Any], side: str = "output") -> TopLogprobs | None:
    """The most probable tokens at each of the response (`output`), or of the prompt where there are any (`input`)."""
    found = [entries for entries in answer["meta_info"].get(f"{side}_top_logprobs", ()) if entries]
    if not found:
        return None
    ids, values = ([[entry[field] for entry in entries] for entries in found] for field in (1, 0))
    return TopLogprobs(np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32))


def _prompt(answer: dict[str, Any]) -> PromptLogprobs | None:
    found = [entry[0] for entry in answer["meta_info"].get("input_token_logprobs", ())]
    return PromptLogprobs(np.array(found[1:], dtype=np.float32), _top(answer, "input")) if found else None


def _versions(answer: dict[str, Any]) -> IntArray:
    """The version of each token that the sample has."""
    spans = answer["meta_info"].get("weight_versions", ())
    counted = [(int(span["version"]), span["end"] - span["start"]) for span in spans]
    return np.repeat(*np.array(counted, dtype=np.int32).reshape(-1, 2).T)


def _status(answer: dict[str, Any]) -> Status | None:
    reason = answer["meta_info"]["finish_reason"]
    return None if reason is None else _STATUSES[reason["type"]]


def _check(result: tuple[Any, ...]) -> None:
    if not result[0]:
        raise EngineError(f"SGLang took no weights: {result[1]}")
