"""Mends of Megatron-Core 0.16.1, most of them where TransformerEngine and Apex are missing; nothing else is touched."""

# pyright: reportMissingImports=false

from functools import cache, wraps
from importlib.util import find_spec
from queue import Queue
from typing import Any

import megatron.core
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe import moe_utils

OLD = megatron.core.__version__ == "0.16.1"
BARE = not any(map(find_spec, ("transformer_engine", "apex")))


@cache
def mend() -> None:
    """Call it before a model is built."""
    if OLD:
        write_without_processes()
    if OLD and BARE:
        name_the_missing_gemm()
        keep_the_steps_of_adam()
        part_the_steps_of_adam()


def name_the_missing_gemm() -> None:
    """The router asks whether TransformerEngine's GEMM is None, by a name that exists only where there is one."""
    vars(moe_utils).setdefault("te_general_gemm", None)


def keep_the_steps_of_adam() -> None:
    """Loading a reshardable state looks for `step`, which only torch's AdamW has, among what was saved of a weight."""
    optimizer: Any = DistributedOptimizer
    original = optimizer._set_main_param_and_optimizer_states

    @wraps(original)
    def set_states(self: Any, weight: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[weight]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        original(self, weight, {"step": state["step"], **tensors} if "step" in state else tensors)

    optimizer._set_main_param_and_optimizer_states = set_states


def part_the_steps_of_adam() -> None:
    """Loading gives all weights one `step` tensor, which torch's AdamW then advances once for each of them."""
    optimizer: Any = DistributedOptimizer
    original = optimizer.load_state_dict

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    optimizer.load_state_dict = load_state_dict


def write_without_processes() -> None:
    """Saving forks a process for each file, which may hang for the threads of this one, and spawns another."""
    writer: Any = filesystem_async.FileSystemWriterAsync

    def write(transforms: Any, remote: bool, rank: int, files: Any, results: Any) -> None:
        written, running = Queue[Any](), Queue[Any]()
        for number, file in enumerate(files):
            running.put(number)
            writer.write_preloaded_data(transforms, number, file, written, running, use_fsync=True, use_msc=remote)
        outcomes = dict(written.get() for _ in files)
        results.put(next((one for one in outcomes.values() if isinstance(one, Exception)), outcomes))

    vars(filesystem_async)["_results_queue"] = Queue()
    writer.write_preloaded_data_multiproc = staticmethod(write)


def keep_the_padding_of_buckets(model: Any) -> None:
    """A checkpoint puts buckets end to end without their padding, then cuts weights out of them as if it were there.

    `model`: a DistributedDataParallel, before its optimizer is made. With tied embeddings in a pipeline it has several
    buckets.
    """
    if OLD:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
