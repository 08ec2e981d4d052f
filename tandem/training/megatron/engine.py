"""The Megatron-Core engine: a TrainEngine whose model lies in stages, matrices, experts and tokens over many ranks.

    micro-batches --lay_out--> Rows --schedule, stage after stage--> hidden states, on the last stage
      --> log-probs, entropy or values --summed over context-parallel ranks--> loss --schedule, backwards--> gradients

Gradients stay with each rank until the optimizer step, which sums them. Every rank is sent the loss and the outputs.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.utils.checkpoint import checkpoint

from tandem.config.model import ModelConfig
from tandem.config.optimizer import OptimizerConfig
from tandem.config.training import MegatronTrainingConfig
from tandem.errors import UserError
from tandem.models.storage import TensorFile
from tandem.regions import Shard
from tandem.training.base import LossResult, PassResult, sum_parts, sum_results
from tandem.training.megatron.bridge_model import Bridged, Stage
from tandem.training.megatron.checkpoint import load_state, save_model, save_state
from tandem.training.megatron.fixes import keep_the_padding_of_buckets, mend
from tandem.training.megatron.optimizer import ShardedAdamW
from tandem.training.megatron.packed_rows import PackedSeqPlan, RankRows, lay_out
from tandem.training.megatron.routers import expert_load
from tandem.training.megatron.vocabulary import TokenStatistics
from tandem.types import MicroBatch, Outputs, TokenColumns, TokenLoss

LOGITS_PER_CHUNK = 2**25
"""Logits of a chunk on one rank: bounds the memory of the output layer."""


class MegatronEngine:
    """A policy, or with `value_head` a model of one value a token; without `optimizer` it is frozen: `forward` only."""

    def __init__(
        self,
        model: ModelConfig,
        training: MegatronTrainingConfig,
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
        temperature: float = 1.0,
        value_head: bool = False,
    ) -> None:
        join(training)
        self._training = training
        self._bridged = Bridged(model, training, value_head)
        self._temperature = temperature
        self._device = torch.device(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
        self._stages = self._bridged.build(training.virtual_pipeline)
        self._bridged.load(self._stages, self._bridged.path)
        for stage in self._stages:
            stage.requires_grad_(optimizer is not None).to(self._device)
        self._models: list[Any] = list(self._stages)
        self._optimizer: ShardedAdamW | None = None
        self._offloaded = False
        if optimizer:
            self._models = [_spread(stage) for stage in self._stages]
            self._optimizer = ShardedAdamW(self._models, optimizer, total_steps, self._bridged.config.params_dtype)

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch], adapted: bool = True) -> list[Outputs[Tensor]]:
        assert adapted, "adapters are of training.type: fsdp"
        return self._everywhere(self._run(micro_batches, None), micro_batches)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: TokenLoss[Tensor]) -> PassResult:
        results = self._run(micro_batches, loss)
        outputs = self._everywhere(results, micro_batches)
        speaks = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        own = sum_results(results if speaks else [])
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        return PassResult(*sum_parts(parts), outputs)

    def optimizer_step(self) -> dict[str, float]:
        return {**self._trained.step(), **expert_load(self._stages, self._bridged.config, self._device)}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._weights_here():
            yield from self._bridged.export(self._stages)

    @contextmanager
    def shards(self) -> Iterator[list[Shard[Tensor]]]:
        with self._weights_here():
            yield self._bridged.shards(self._stages)

    def offload(self) -> None:
        self._move_weights(here=False)
        if self._optimizer and not self._offloaded:
            self._optimizer.move(torch.device("cpu"))
        self._offloaded = True

    def onload(self) -> None:
        self._move_weights(here=True)
        if self._optimizer and self._offloaded:
            self._optimizer.move(self._device)
        self._offloaded = False

    def save(self, directory: Path) -> list[TensorFile]:
        with self._weights_here():
            files = save_model(self._bridged, self._stages, directory / "model")
            save_state(self._trained, self._stages, directory / "state")
        return files

    def load(self, directory: Path, new_schedule: bool = False) -> None:
        load_state(self._trained, self._stages, directory / "state")
        if new_schedule:
            self._trained.steps = 0
        self._bridged.load(self._stages, directory / "model")

    @contextmanager
    def _weights_here(self) -> Iterator[None]:
        """The weights are on the device, whether offloaded or not."""
        self._move_weights(here=True)
        yield
        if self._offloaded:
            self._move_weights(here=False)

    def _move_weights(self, here: bool) -> None:
        """The gradients' memory comes and goes with them."""
        for model in self._models:
            if self._optimizer is None:
                model.to(self._device if here else "cpu")
                continue
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                buffer.reload_from_cpu() if here else buffer.offload_to_cpu()

    @property
    def _trained(self) -> ShardedAdamW:
        assert self._optimizer is not None, "this engine was made without an optimizer: it is frozen"
        return self._optimizer

    def _run(self, micro_batches: Sequence[MicroBatch], loss: TokenLoss[Tensor] | None) -> list[LossResult]:
        """The results of each of this rank's micro-batches; of none of them except on the last stage."""
        passes = self._passes(len(micro_batches))
        if passes == 0:
            return []
        for model in self._models:
            model.train(loss is not None)
        group = parallel_state.get_context_parallel_group()
        config = self._bridged.config
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        padded = [*micro_batches, *[None] * (passes - len(micro_batches))]
        rows = [(part, lay_out(part, group, multiple, self._device)) for part in padded]
        if config.num_moe_experts:
            self._instruct_routers([part.plan for _, part in rows])
        results: list[LossResult] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, loss),
            data_iterator=[iter(rows) for _ in self._models],
            model=self._models,
            num_microbatches=passes,
            seq_length=1,  # the stages tell each other how much they send
            micro_batch_size=1,
            forward_only=loss is None,
        )
        return results[: len(micro_batches)]

    def _instruct_routers(self, plans: Sequence[PackedSeqPlan]) -> None:
        """Their losses are means over the real tokens of a pass."""
        tokens = torch.stack([(~plan.padding).sum() for plan in plans]).sum()
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        losses = self._training.load_balancing_loss, self._training.router_z_loss
        for plan in plans:
            plan.coefficients = losses[0] / int(tokens), losses[1] / int(tokens)
            if not self._training.router_replay:
                plan.experts = None
            elif plan.experts is None and not plan.padding.all():
                raise UserError(
                    "training.router_replay: the generation engine does not tell which experts it chose "
                    "(Completion.experts); turn it off, or use an engine that does"
                )

    def _passes(self, own: int) -> int:
        """As many passes as the rank with the most has; virtual stages need a multiple of the pipeline's length."""
        most = torch.tensor(own, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        unit = parallel_state.get_pipeline_model_parallel_world_size() if len(self._stages) > 1 else 1
        return -(-int(most) // unit) * unit

    def _forward_step(
        self, loss: TokenLoss[Tensor] | None, rows: Iterator[tuple[MicroBatch | None, RankRows]], model: Any
    ) -> tuple[Tensor, Any]:
        """One stage's part of one pass, and what the last one does with its hidden states."""
        micro_batch, here = next(rows)
        hidden = model(here.token_ids, None, None, packed_seq_params=here.plan)
        return hidden, partial(self._finish, micro_batch, here, loss)

    def _finish(
        self, micro_batch: MicroBatch | None, here: RankRows, loss: TokenLoss[Tensor] | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor, LossResult | None]:
        """The loss to go backwards from, no number of tokens to divide it by, and the result."""
        nothing, one = hidden.sum() * 0, torch.ones((), dtype=torch.int)
        if micro_batch is None:
            return nothing, one, None
        outputs = self._score(here, hidden[:, 0].index_select(0, here.predicted_at))
        if loss is None:
            return nothing, one, LossResult((), outputs)
        columns: TokenColumns[Tensor] = micro_batch.columns.map(lambda array: torch.from_numpy(array).to(self._device))
        value, metrics = loss(outputs, columns)
        detached = Outputs(
            *(None if x is None else x.detach() for x in (outputs.logprobs_S, outputs.entropy_S, outputs.values_S))
        )
        return value + nothing, one, LossResult.of([(value, metrics)], detached)

    def _score(self, here: RankRows, hidden: Tensor) -> Outputs[Tensor]:
        """`hidden`: of the tokens scored here. The answer is of all targets, on every context-parallel rank."""
        stage = self._stages[-1]
        if self._bridged.value_head:
            return Outputs(values_S=self._joined(here, stage.output_layer(hidden).float().squeeze(-1)))
        parts: list[Any] = []
        size = max(1, LOGITS_PER_CHUNK // (self._bridged.hf_config.vocab_size // stage.pg_collection.tp.size()))
        targets = here.targets[here.order]
        for hidden_C, targets_C in zip(hidden.split(size), targets.split(size), strict=True):
            if len(hidden) > size:
                chunk = partial(self._statistics, stage, hidden_C, targets_C)
                parts.append(checkpoint(chunk, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(self._statistics(stage, hidden_C, targets_C))
        columns = [self._joined(here, torch.cat(column)) for column in zip(*parts, strict=True)]
        return Outputs(logprobs_S=columns[0], entropy_S=columns[1], squared_probs_S=columns[2])

    def _statistics(self, stage: Stage, hidden_C: Tensor, targets_C: Tensor) -> tuple[Tensor, ...]:
        logits_CV, first = stage.logits(hidden_C, self._bridged.hf_config.vocab_size)
        group = parallel_state.get_tensor_model_parallel_group()
        return TokenStatistics.apply(logits_CV.float() / self._temperature, targets_C, first, group)  # pyright: ignore

    def _joined(self, here: RankRows, own: Tensor) -> Tensor:
        """All context-parallel ranks' parts; each rank's gradient goes on through its own."""
        whole_S = own.new_zeros(len(here.targets)).index_copy(0, here.order, own)
        return reduce_from_tensor_model_parallel_region(whole_S, group=parallel_state.get_context_parallel_group())

    def _everywhere(self, results: Sequence[LossResult], micro_batches: Sequence[MicroBatch]) -> list[Outputs[Tensor]]:
        """The outputs of this rank's micro-batches, which its last stage has, sent to its other stages."""
        sizes = [len(part.targets) for part in micro_batches]
        if not sizes:
            return []
        names = ["logprobs_S", "entropy_S", *([] if torch.is_grad_enabled() else ["squared_probs_S"])]
        names = ["values_S"] if self._bridged.value_head else names
        outputs = [result.outputs for result in results]
        known = torch.empty(len(names), sum(sizes), device=self._device)
        if outputs:
            known = torch.stack([torch.cat([getattr(part, name) for part in outputs]) for name in names])
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(known, last, group=parallel_state.get_pipeline_model_parallel_group())
        return [Outputs(**dict(zip(names, part, strict=True))) for part in known.split(sizes, 1)]


def join(training: MegatronTrainingConfig) -> None:
    """Give this rank its place in Megatron-Core's groups; engines of one process share them."""
    mend()
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if parallel_state.is_initialized():
        if _is_alive(parallel_state.get_model_parallel_group()):
            return
        parallel_state.destroy_model_parallel()  # an earlier run of this process has left torch.distributed since
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=training.tensor_parallel,
        pipeline_model_parallel_size=training.pipeline_parallel,
        virtual_pipeline_model_parallel_size=training.virtual_pipeline if training.virtual_pipeline > 1 else None,
        context_parallel_size=training.context_parallel,
        expert_model_parallel_size=training.expert_parallel,
        expert_tensor_parallel_size=training.expert_ranks,
    )
    model_parallel_cuda_manual_seed(0)


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def _spread(stage: Stage) -> DistributedDataParallel:
    """The stage with float32 gradients that data-parallel and context-parallel ranks sum."""
    how = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(stage.config, how, stage)
    keep_the_padding_of_buckets(model)
    return model
