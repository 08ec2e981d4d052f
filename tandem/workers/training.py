"""What trains or scores: the actor, the critic, the reference. An engine, and what the controller may ask of it."""

from collections import deque
from collections.abc import Callable
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
from tandem.workers.dispatch import Dispatch, Mesh, register
from tandem.workers.host import Place, Worker


class TrainWorker(Worker):
    """One rank of a model: a policy, or with `critic` a model of one value a token."""

    def __init__(
        self,
        place: Place,
        model: ModelConfig,
        training: TrainingConfig,
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
        temperature: float = 1.0,
        critic: bool = False,
    ) -> None:
        """`total_steps`: optimizer steps of the run; `temperature`: of a policy's log-probs.

        Without `optimizer` the model is frozen: it scores only.
        """
        super().__init__(place)
        self._training = training
        how = {"total_steps": total_steps, "temperature": temperature, "critic": critic}
        self.engine: TrainEngine
        if training.type == "megatron":
            from tandem.training.megatron.engine import MegatronEngine

            self.engine = MegatronEngine(model, training, optimizer, **how)
        else:
            from tandem.training.fsdp import make_engine

            self.engine = make_engine(model, training, optimizer, **how)
        self._bridge: Bridge | None = None

    @property
    def meshes(self) -> dict[str, Mesh]:
        return {"training": Mesh(self._training.mesh(self.place.size))}

    @register(Dispatch.DATA_PARALLEL)
    def logprobs(self, batch: Batch) -> FloatArray:
        """Of a policy: float32 `[T]`, 0 outside `loss_mask`."""
        return self._score(batch, lambda outputs: outputs.logprobs_S)

    @register(Dispatch.DATA_PARALLEL)
    def squared_probs(self, batch: Batch) -> FloatArray:
        """Of a policy: sum of its squared probabilities at each token; float32 `[T]`, 0 outside `loss_mask`."""
        return self._score(batch, lambda outputs: outputs.squared_probs_S)

    @register(Dispatch.DATA_PARALLEL)
    def values(self, batch: Batch) -> FloatArray:
        """Of a critic: float32 `[T]`, 0 outside `loss_mask`."""
        return self._score(batch, lambda outputs: outputs.values_S)

    @register(Dispatch.DATA_PARALLEL)
    def learn(self, batch: Batch, loss: TokenLoss[torch.Tensor]) -> tuple[StepMetrics, FloatArray]:
        """One optimizer step; `batch.tokens` holds every column that the loss reads, weights of the whole step too.

        Returns the loss's metrics with `<role>/grad_norm` and `<role>/lr`, and a policy's log-probs before the step,
        `[T]`, NaN outside `loss_mask`.
        """
        parts = self._cut(batch)
        result = self.engine.forward_backward(parts, loss)
        logprobs = np.full(len(batch.response_ids), np.nan, dtype=np.float32)
        for part, outputs in zip(parts, result.outputs, strict=True):
            if outputs.logprobs_S is not None:
                logprobs[part.source] = outputs.logprobs_S.float().cpu().numpy()
        done = {f"{self.place.role}/{name}": value for name, value in self.engine.optimizer_step().items()}
        return {**result.metrics, **done}, logprobs

    @register(Dispatch.REPLICATED)
    def save(self, directory: Path) -> None:
        """Write `model/` and `state/` into an existing directory that every rank sees."""
        self.engine.save(directory)

    @register(Dispatch.REPLICATED)
    def load(self, directory: Path) -> None:
        self.engine.load(directory)

    @register(Dispatch.REPLICATED)
    def offload(self) -> None:
        """Leave the device until `onload`; meanwhile only `save` and publishing are legal."""
        self.engine.offload()

    @register(Dispatch.REPLICATED)
    def onload(self) -> None:
        self.engine.onload()

    @register(Dispatch.RANK_ZERO)
    def open_bridge(self, receivers: int, delta: bool = False) -> str:
        """Make a way to the ranks of another pool; answers its address."""
        self._bridge = Bridge.open(receivers, self.place.address, delta)
        return self._bridge.address

    @register(Dispatch.REPLICATED)
    def send_weights(self) -> None:
        """Over the bridge, tensor by tensor; every rank takes part in gathering them."""
        weights = self.engine.named_weights()
        if self._bridge is None:
            deque(weights, maxlen=0)
        else:
            self._bridge.send(weights)

    def _cut(self, batch: Batch) -> list[MicroBatch]:
        return micro_batches(batch, np.arange(len(batch)), self._training.tokens_per_micro_batch)

    def _score(self, batch: Batch, column: Callable[[Outputs[torch.Tensor]], torch.Tensor | None]) -> FloatArray:
        result = np.zeros(len(batch.response_ids), dtype=np.float32)
        parts = self._cut(batch)
        for part, outputs in zip(parts, self.engine.forward(parts), strict=True):
            scored = column(outputs)
            assert scored is not None
            result[part.source] = scored.float().cpu().numpy()
        return result
