"""What trains or scores: the actor, the critic, the reference policy, a reward model. An engine, and its verbs for the
controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tandem.batching.packing import micro_batches
from tandem.config.model import ModelConfig
from tandem.config.optimizer import OptimizerConfig
from tandem.config.training import TrainingConfig
from tandem.training.base import TopTokens, TrainEngine
from tandem.types import Batch, FloatArray, IntArray, MicroBatch, Outputs, StepMetrics, TokenLoss
from tandem.workers.host import Worker, WorkerContext
from tandem.workers.peak_memory import cuda_in_use
from tandem.workers.registration import Dispatch, Mesh, Returns, register
from tandem.workers.saving import BackgroundWrite

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from tandem.weights.bridge import Address, Sender


@dataclass(frozen=True)
class TrainSpec:
    """What a model of the dataflow is made from: the actor, the critic, the reference policy, a reward model."""

    model: ModelConfig
    """`model.path` is the directory that this model starts from, whichever role it has, and `model.lora` are its
    adapters, if it learns."""
    training: TrainingConfig
    optimizer: OptimizerConfig | None = None
    """None: the model is frozen, it scores only."""
    total_steps: int = 1
    """Optimizer steps of the run, for the learning-rate schedule."""
    temperature: float = 1.0
    """The temperature that a policy's log-probs and entropy are of."""
    value_head: bool = False
    """One number a token, as a critic and a reward model answer, instead of log-probs."""
    scores_rows: bool = False
    """Of these one counts in each row, and only beside those of other rows, as of a reward model that learns."""
    pictures: Path | None = None
    """Where the pictures of rows are stored, for a model that sees them."""
    processor: Path | None = None
    """The model directory whose image processor prepares them: the policy's; default: that of the model itself."""
    top: TopTokens | None = None
    """What `top_logprobs` of a frozen policy tells; `training.type: fsdp` alone."""


class TrainWorker(Worker[TrainSpec]):
    """One rank of a model that is trained or that scores."""

    def __init__(self, context: WorkerContext, spec: TrainSpec) -> None:
        super().__init__(context, spec)
        self.engine = make_engine(spec)
        self._meeting_place: TCPStore | None = None
        """Of the bridge, on rank 0."""
        self._sender: Sender | None = None
        self._write: BackgroundWrite | None = None

    @property
    def meshes(self) -> dict[str, Mesh]:
        from tandem.models.loading import model_cost

        cost = model_cost(self.spec.model, self.spec.value_head)
        return {"training": Mesh(self.spec.training.mesh(self.context.size), cost)}

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def logprobs(self, batch: Batch) -> FloatArray:
        """The policy's log-prob of each response token; float32 `[T]`, 0 outside `loss_mask`."""
        return self._score(batch, lambda outputs: (outputs.logprobs_S,))[0]

    @register(Dispatch.DATA_PARALLEL, returns=(Returns.PER_TOKEN, Returns.PER_TOKEN))
    def token_statistics(self, batch: Batch) -> tuple[FloatArray, FloatArray]:
        """What `logprobs` returns, and of the same pass the sum of the policy's squared probabilities over the
        vocabulary; float32 `[T]` each, 0 outside `loss_mask`."""
        logprobs_T, squared_probs_T = self._score(batch, lambda outputs: (outputs.logprobs_S, outputs.squared_probs_S))
        return logprobs_T, squared_probs_T

    @register(Dispatch.DATA_PARALLEL, returns=(Returns.PER_TOKEN, Returns.PER_TOKEN))
    def top_logprobs(self, batch: Batch) -> tuple[IntArray, FloatArray]:
        """The policy's most probable tokens in the place of each response token, and their log-probs; int32 and float32
        `[T, spec.top.count]`, 0 outside `loss_mask`."""
        assert self.spec.top is not None, "this policy was made without `top`"
        shape = len(batch.response_ids), self.spec.top.count
        ids_TK, logprobs_TK = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
        packed = self._micro_batches(batch)
        for micro_batch, outputs in zip(packed, self.engine.forward(packed), strict=True):
            assert outputs.top_ids_S is not None and outputs.top_logprobs_S is not None
            ids_TK[micro_batch.source] = outputs.top_ids_S.int().cpu().numpy()
            logprobs_TK[micro_batch.source] = outputs.top_logprobs_S.float().cpu().numpy()
        return ids_TK, logprobs_TK

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def base_logprobs(self, batch: Batch) -> FloatArray:
        """As `logprobs`, of the policy without its adapters: what it was before it learned."""
        return self._score(batch, lambda outputs: (outputs.logprobs_S,), adapted=False)[0]

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def values(self, batch: Batch) -> FloatArray:
        """The value head's number for each response token; float32 `[T]`, 0 outside `loss_mask`."""
        return self._score(batch, lambda outputs: (outputs.values_S,))[0]

    @register(Dispatch.DATA_PARALLEL, returns=(Returns.SAME, Returns.PER_TOKEN))
    def learn(self, batch: Batch, loss: TokenLoss[torch.Tensor]) -> tuple[StepMetrics, FloatArray]:
        """One optimizer step. `batch.tokens` holds every column that the loss reads; its weights are of the whole step.

        Returns the loss's metrics with `<name>/grad_norm` and `<name>/lr`, and the log-probs of a policy before the
        step, float32 `[T]`, NaN outside `loss_mask`.
        """
        packed = self._micro_batches(batch, whole_trajectories=not loss.token_local)
        result = self.engine.forward_backward(packed, loss)
        logprobs_T = np.full(len(batch.response_ids), np.nan, dtype=np.float32)
        for micro_batch, outputs in zip(packed, result.outputs, strict=True):
            if outputs.logprobs_S is not None:
                logprobs_T[micro_batch.source] = outputs.logprobs_S.float().cpu().numpy()
        stepped = {f"{self.context.name}/{name}": value for name, value in self.engine.optimizer_step().items()}
        return {**result.metrics, **stepped}, logprobs_T

    @register(Dispatch.ALL)
    def save(self, directory: Path) -> Path:
        """Copy the state, and begin to write `model/` and `state/` into an existing directory that every rank sees.

        Returns the file that will be there when all of this rank's are whole. Call it again only then.
        """
        self._write = BackgroundWrite(self.engine.save(directory), directory, self.context.rank)
        return self._write.seals

    @register(Dispatch.ALL)
    def check_saved(self) -> None:
        """Raises what went wrong with writing what `save` copied."""
        if self._write is not None:
            self._write.check()

    @register(Dispatch.REPLICATED)
    def load(self, directory: Path, new_schedule: bool = False) -> None:
        """Continue where `save` was; with `new_schedule` the learning rate's schedule begins anew."""
        self.engine.load(directory, new_schedule)

    @register(Dispatch.REPLICATED)
    def approach_actor(self, share: float) -> None:
        """Move the weights by this share of the way to those of the actor in this process: 1 takes them as they are."""
        from tandem.training.fsdp import FsdpEngine

        actor = self.context.colocated.get("actor")
        assert isinstance(actor, TrainWorker) and isinstance(actor.engine, FsdpEngine)
        assert isinstance(self.engine, FsdpEngine)
        self.engine.approach(actor.engine, share)

    @register(Dispatch.REPLICATED)
    def offload(self) -> None:
        """Leave the device until `onload`; meanwhile only `save`, publishing and `approach_actor` are legal."""
        self.engine.offload()
        if (cuda := cuda_in_use()) is not None:
            cuda.empty_cache()  # other processes have to see the memory that is free now

    @register(Dispatch.REPLICATED)
    def onload(self) -> None:
        """Come back to the device."""
        self.engine.onload()

    @register(Dispatch.RANK_ZERO)
    def open_bridge(self, receivers: int, delta: bool = False) -> Address:
        """Make a way for weights to the ranks of another pool; returns where all ranks of both pools join it."""
        from tandem.weights.bridge import open_bridge

        address, self._meeting_place = open_bridge(self.context.size, receivers, self.context.address, delta)
        return address

    @register(Dispatch.REPLICATED)
    def join_bridge(self, address: Address) -> None:
        """Returns when the ranks of the other pool have joined, too."""
        from tandem.weights.bridge import Sender

        with self.engine.shards() as shards:
            self._sender = Sender(address, self.context.rank, shards)

    @register(Dispatch.REPLICATED)
    def send_weights(self) -> None:
        """Send over the bridge what this rank holds of the weights and no other rank sends."""
        assert self._sender is not None, "the bridge is joined before weights are sent"
        with self.engine.shards() as shards:
            self._sender.send(shards)

    def _micro_batches(self, batch: Batch, *, whole_trajectories: bool = False) -> list[MicroBatch]:
        training = self.spec.training
        return micro_batches(
            batch,
            np.arange(len(batch)),
            training.tokens_per_micro_batch,
            whole_trajectories=whole_trajectories,
            prompts_once=training.computes_prompts_once,
        )

    def _score(
        self,
        batch: Batch,
        wanted: Callable[[Outputs[torch.Tensor]], tuple[torch.Tensor | None, ...]],
        adapted: bool = True,
    ) -> FloatArray:
        """Some outputs of a forward pass for each response token, 0 outside `loss_mask`: float32, `[T]` each."""
        packed = self._micro_batches(batch)
        columns = [wanted(outputs) for outputs in self.engine.forward(packed, adapted)]
        scores = np.zeros((len(wanted(Outputs())), len(batch.response_ids)), dtype=np.float32)
        for micro_batch, of_outputs in zip(packed, columns, strict=True):
            for scores_T, scores_S in zip(scores, of_outputs, strict=True):
                assert scores_S is not None
                scores_T[micro_batch.source] = scores_S.float().cpu().numpy()
        return scores


def make_engine(spec: TrainSpec) -> TrainEngine:
    """The training engine that `spec.training.type` names; only that one is imported."""
    if spec.training.type == "megatron":
        from tandem.training.megatron.engine import MegatronEngine

        return MegatronEngine(
            spec.model,
            spec.training,
            spec.optimizer,
            total_steps=spec.total_steps,
            temperature=spec.temperature,
            value_head=spec.value_head,
        )
    from tandem.training.fsdp import make_engine as make_fsdp_engine

    return make_fsdp_engine(
        spec.model,
        spec.training,
        spec.optimizer,
        total_steps=spec.total_steps,
        temperature=spec.temperature,
        value_head=spec.value_head,
        scores_rows=spec.scores_rows,
        pictures=spec.pictures,
        processor=spec.processor,
        top=spec.top,
    )
