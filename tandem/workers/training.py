"""What trains or scores: the actor, the critic, the reference policy, a reward model. An engine, and its verbs for the
controller."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tandem.batching.packing import micro_batches
from tandem.config.algorithms import OptimizerConfig
from tandem.config.training import TrainingConfig
from tandem.config.tree import ModelConfig
from tandem.training.base import TrainEngine
from tandem.types import Batch, FloatArray, MicroBatch, Outputs, StepMetrics, TokenLoss
from tandem.weights.bridge import Bridge
from tandem.workers.host import Worker, WorkerContext
from tandem.workers.registration import Dispatch, Mesh, Returns, register


@dataclass(frozen=True)
class TrainSpec:
    """What a model of the dataflow is made from: the actor, the critic, the reference policy, a reward model."""

    model: ModelConfig
    """`model.path` is the directory that this model starts from, whichever role it has."""
    training: TrainingConfig
    optimizer: OptimizerConfig | None = None
    """None: the model is frozen, it scores only."""
    total_steps: int = 1
    """Optimizer steps of the run, for the learning-rate schedule."""
    temperature: float = 1.0
    """The temperature that a policy's log-probs and entropy are of."""
    value_head: bool = False
    """One number a token, as a critic and a reward model answer, instead of log-probs."""


class TrainWorker(Worker[TrainSpec]):
    """One rank of a model that is trained or that scores."""

    def __init__(self, context: WorkerContext, spec: TrainSpec) -> None:
        super().__init__(context, spec)
        self.engine = make_engine(spec)
        self._bridge: Bridge | None = None

    @property
    def meshes(self) -> dict[str, Mesh]:
        return {"training": Mesh(self.spec.training.mesh(self.context.size))}

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def logprobs(self, batch: Batch) -> FloatArray:
        """The policy's log-prob of each response token; float32 `[T]`, 0 outside `loss_mask`."""
        return self._score(batch, lambda outputs: outputs.logprobs_S)

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def squared_probs(self, batch: Batch) -> FloatArray:
        """The sum of the policy's squared probabilities over the vocabulary; float32 `[T]`, 0 outside `loss_mask`."""
        return self._score(batch, lambda outputs: outputs.squared_probs_S)

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def values(self, batch: Batch) -> FloatArray:
        """The value head's number for each response token; float32 `[T]`, 0 outside `loss_mask`."""
        return self._score(batch, lambda outputs: outputs.values_S)

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

    @register(Dispatch.REPLICATED)
    def save(self, directory: Path) -> None:
        """Write `model/` and `state/` into an existing directory that every rank sees."""
        self.engine.save(directory)

    @register(Dispatch.REPLICATED)
    def load(self, directory: Path, new_schedule: bool = False) -> None:
        """Continue where `save` was; with `new_schedule` the learning rate's schedule begins anew."""
        self.engine.load(directory, new_schedule)

    @register(Dispatch.REPLICATED)
    def offload(self) -> None:
        """Leave the device until `onload`; meanwhile only `save` and publishing are legal."""
        self.engine.offload()

    @register(Dispatch.REPLICATED)
    def onload(self) -> None:
        """Come back to the device."""
        self.engine.onload()

    @register(Dispatch.RANK_ZERO)
    def open_bridge(self, receivers: int, delta: bool = False) -> str:
        """Make a way for weights to the ranks of another pool; returns the address that they join it at."""
        self._bridge = Bridge.open(receivers, self.context.address, delta)
        return self._bridge.address

    @register(Dispatch.REPLICATED)
    def send_weights(self) -> None:
        """Send the weights over the bridge, tensor by tensor. Every rank takes part in gathering them; one sends."""
        weights = self.engine.named_weights()
        if self._bridge is None:
            deque(weights, maxlen=0)
        else:
            self._bridge.send(weights)

    def _micro_batches(self, batch: Batch, *, whole_trajectories: bool = False) -> list[MicroBatch]:
        tokens = self.spec.training.tokens_per_micro_batch
        return micro_batches(batch, np.arange(len(batch)), tokens, whole_trajectories=whole_trajectories)

    def _score(self, batch: Batch, column: Callable[[Outputs[torch.Tensor]], torch.Tensor | None]) -> FloatArray:
        """One of the outputs of a forward pass for each response token, 0 outside `loss_mask`."""
        scores_T = np.zeros(len(batch.response_ids), dtype=np.float32)
        packed = self._micro_batches(batch)
        for micro_batch, outputs in zip(packed, self.engine.forward(packed), strict=True):
            scores_S = column(outputs)
            assert scores_S is not None
            scores_T[micro_batch.source] = scores_S.float().cpu().numpy()
        return scores_T


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
    )
