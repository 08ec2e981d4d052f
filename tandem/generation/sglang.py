"""SGLang as the engine of a replica, through its `Engine`: the replica's process asks, SGLang's own processes compute.

The only file that imports SGLang; its schedulers import it too, to take weights from memory that is shared.
"""

# pyright: reportMissingImports=false
# SGLang has an environment of its own, where the types are not checked

import asyncio
import pickle
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import io_struct

from tandem.config.generation import SglangGenerationConfig
from tandem.config.tree import ModelConfig
from tandem.errors import EngineError
from tandem.types import Completion, Request, Status
from tandem.weights.base import Commit, Directory, Part
from tandem.weights.shared_memory import attach

_LOADER = f"{__name__}.load_bucket"
_STEP_S = 0.005  # a step waits so long for a sample to end, and the caller's messages wait with it


class SglangEngine:
    """A SteppedEngine."""

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
            **config.engine_args,
        }
        self._engine = Engine(**options)
        self._manager = self._engine.tokenizer_manager
        self._asleep: set[str] = set()
        self._paused = self._updating = False
        self._running: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self.max_tokens = int(self._manager.max_req_input_len)  # what lies beyond it SGLang keeps for itself
        self.vocabulary = int(self._manager.model_config.vocab_size)

    def add(self, number: int, request: Request, sample: int) -> None:
        asked = request.sampling
        params = {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k or -1,
            "max_new_tokens": asked.max_tokens,
            "stop_token_ids": list(asked.stop_token_ids),
            "stop": list(asked.stop_strings),
            "no_stop_trim": True,
            "sampling_seed": request.seeds[sample] & 0x7FFF_FFFF_FFFF_FFFF,
        }
        name, ids = f"{number}:{sample}", request.token_ids.tolist()
        answer = self._engine.async_generate(input_ids=ids, sampling_params=params, return_logprob=True, rid=name)
        task = self._engine.loop.create_task(answer, name=name)
        self._wait(asyncio.sleep(0))
        if task.done():
            task.result()  # raises why SGLang refuses it
        self._running[number] = task

    def step(self) -> list[tuple[int, Completion]]:
        self._wait(asyncio.wait(self._running.values(), timeout=_STEP_S, return_when=asyncio.FIRST_COMPLETED))
        return self._take([number for number, task in self._running.items() if task.done()])

    def abort(self, numbers: Sequence[int]) -> list[tuple[int, Completion]]:
        known = [number for number in numbers if number in self._running]
        for number in known:
            self._manager.abort_request(self._running[number].get_name())
        for number in known:
            self._wait(asyncio.wait([self._running[number]]))
        return self._take(known)

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
        self._wait(self._manager.update_weight_version(io_struct.UpdateWeightVersionReqInput(new_version=str(version))))
        flushed = self._engine.flush_cache()
        _check((flushed.success, flushed.message))
        self._wait(self._manager.continue_generation(io_struct.ContinueGenerationReqInput(torch_empty_cache=False)))
        self._paused = False

    def _take(self, numbers: Sequence[int]) -> list[tuple[int, Completion]]:
        return [(number, _completion(self._running.pop(number))) for number in numbers]

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        return self._engine.loop.run_until_complete(awaitable)


def load_bucket(model: Any, named: list[tuple[str, torch.Tensor]]) -> None:
    """In SGLang's scheduler, which knows it by its name: the weights of a bucket, in Hugging Face names."""
    ((_, pickled),) = named
    model.load_weights(list(attach(pickle.loads(pickled.cpu().numpy().tobytes()))))


def _completion(task: asyncio.Task[dict[str, Any]]) -> Completion:
    made, facts = task.result(), task.result()["meta_info"]
    logprobs = [entry[0] for entry in facts.get("output_token_logprobs", ())]
    spans = [(int(span["version"]), span["end"] - span["start"]) for span in facts.get("weight_versions", ())]
    statuses = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
    return Completion(
        int(task.get_name().split(":")[1]),
        np.array(made["output_ids"], dtype=np.int32),
        np.array(logprobs, dtype=np.float32),
        np.repeat(*np.array(spans, dtype=np.int32).reshape(-1, 2).T),
        statuses[facts["finish_reason"]["type"]],
    )


def _check(result: tuple[Any, ...]) -> None:
    if not result[0]:
        raise EngineError(f"SGLang took no weights: {result[1]}")
