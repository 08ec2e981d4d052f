"""The PyTorch engine: plain torch on one rank, FSDP2 on several; the model families of docs/models.md."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.config.algorithms import OptimizerConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import ModelConfig
from tandem.errors import UserError
from tandem.models.attention import PackedRows, ScatteredRows
from tandem.models.loading import fill, load_empty, load_model, saved_buffers
from tandem.models.lora import add_adapters, is_adapter, merged_weights, write_adapters
from tandem.training.base import LossResult, TrainEngine, sum_parts
from tandem.training.context import ContextParallel, LocalMicroBatch
from tandem.training.head import ValueHead, VocabularyHead
from tandem.training.layout import Sharded, Whole
from tandem.training.optimizer import MasterAdamW
from tandem.types import IntArray, MicroBatch, Outputs, TokenColumns, TokenLoss

_EMPTY_MICRO_BATCH = MicroBatch(
    token_ids=np.zeros(1, dtype=np.int32),
    offsets=np.array([0, 1]),
    prefixes=np.array([-1]),
    scored=np.zeros(0, dtype=np.int64),
    targets=np.zeros(0, dtype=np.int32),
    columns=TokenColumns(),
    source=np.zeros(0, dtype=np.int64),
)
"""What a rank without micro-batches computes while others still have some: the collectives need it."""


class FsdpEngine:
    """A TrainEngine over a model in this process; it trains the model's own parameters, in place.

    Generation may share them at one rank: their storage is never replaced while they stay on one device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: FsdpTrainingConfig,
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
        temperature: float = 1.0,
        layout: Whole | None = None,
    ) -> None:
        """A language model is a policy, `temperature` that of its log-probs; a token-classification one is a critic.

        `total_steps`: optimizer steps of the run. Without `optimizer` the model is frozen: `forward` only. `layout`:
        of the model over the ranks; default: all of it on this one.
        """
        self.model = model.eval()
        if not optimizer:
            model.requires_grad_(False)
        self._layout = layout or Whole(model)
        self._context = ContextParallel(config.context_parallel, model.config)
        self._optimizer = MasterAdamW(model, optimizer, total_steps, config.cpu_offload) if optimizer else None
        self._checkpointed = _checkpointed_layers(model) if config.activation_checkpointing else []
        layer: Any = model.get_output_embeddings()
        if layer is None:
            self._head = ValueHead(next(child for child in model.children() if isinstance(child, nn.Linear)))
        else:
            # On a GPU a chunk has to be large enough for its products; it is some GiB in all.
            chunk = 2**28 if self._layout.device.type == "cuda" else 2**25
            self._head = VocabularyHead(layer, temperature, chunk)

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs[torch.Tensor]]:
        with self._layout.gathered():
            passes = self._passes(micro_batches)
            outputs = [self._context.gather(part, self._head.forward(*self._inputs(part))) for part in passes]
        return outputs[: len(micro_batches)]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: TokenLoss[torch.Tensor]) -> LossResult:
        results: list[LossResult] = []
        with self._layout.gathered(), _checkpointing(self._checkpointed):
            passes = self._passes(micro_batches)
            for number, part in enumerate(passes, start=1):
                self._layout.starts(last=number == len(passes))
                results.append(self._context.backward(self._head, part, *self._inputs(part), loss))
        own = sum_parts([(result.loss, result.metrics) for result in results])
        outputs = [output for result in results for output in result.outputs]
        return LossResult(*sum_parts(self._layout.total(own)), outputs[: len(micro_batches)])

    def optimizer_step(self) -> dict[str, float]:
        return self._trained.step()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return merged_weights(self.model, self._layout.full, changed=True)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self._layout.home)

    def save(self, directory: Path) -> None:
        weights = chain(merged_weights(self.model, self._layout.full), saved_buffers(self.model).items())
        self._layout.save(weights, directory / "model")
        if any(is_adapter(name) for name, _ in self.model.named_parameters()):
            write_adapters(self.model, self._layout.full, directory / "adapter", self._layout.first)
        self._trained.save(directory / "state")

    def load(self, directory: Path, new_schedule: bool = False) -> None:
        self._trained.load(directory / "state", new_schedule)

    @property
    def _trained(self) -> MasterAdamW:
        assert self._optimizer is not None, "this engine was made without an optimizer: it is frozen"
        return self._optimizer

    def _passes(self, micro_batches: Sequence[MicroBatch]) -> list[LocalMicroBatch]:
        """This rank's part of each; as many as the rank with the most of them has."""
        passes = [*micro_batches, *[_EMPTY_MICRO_BATCH] * self._layout.lacking(len(micro_batches))]
        return [self._context.local_part(micro_batch, self._layout.device) for micro_batch in passes]

    def _inputs(self, part: LocalMicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's: hidden states `[S, hidden]` and the tokens that they predict, `[S]`."""
        hidden = _run(self.model.base_model, part.token_ids, part.plan)
        return hidden.index_select(0, part.scored), part.targets

    def _move(self, device: torch.device) -> None:
        nn.Module.to(self.model, device)
        if self._optimizer is not None:
            self._optimizer.move(device)


def make_engine(
    model: ModelConfig,
    training: FsdpTrainingConfig,
    optimizer: OptimizerConfig | None,
    *,
    total_steps: int = 1,
    temperature: float = 1.0,
    value_head: bool = False,
) -> TrainEngine:
    """The model of the configuration in an engine, sharded over the ranks of torch.distributed if there are several."""
    sharded, layout = dist.is_initialized() and dist.get_world_size() > 1, None
    loaded = load_empty(model, value_head) if sharded else load_model(model, value_head)
    loaded.requires_grad_(optimizer is not None)
    if model.lora and optimizer and not value_head:
        add_adapters(loaded, model.lora, model.path)
    if sharded:
        layout = Sharded(loaded, training)
        fill(loaded, model)
    return FsdpEngine(loaded, training, optimizer, total_steps, temperature, layout)


def _checkpointed_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The layers that recompute their activations. UserError for a family without them."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not (model.supports_gradient_checkpointing and layers):
        raise UserError(
            f"training.activation_checkpointing: transformers cannot checkpoint {type(model).__name__}; leave it out"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return layers


@contextmanager
def _checkpointing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """transformers checkpoints a layer in training mode.

    The modules in it stay in eval mode: there routers (phimoe's) draw no noise, in no pass other than in the others.
    """
    for layer in layers:
        layer.training = True
    yield
    for layer in layers:
        layer.training = False


def _run(module: Any, token_ids: IntArray, plan: PackedRows | ScatteredRows) -> torch.Tensor:
    """`[N, features]`: the module's first output for segments packed head to tail, as if each stood alone."""
    outputs = module(
        torch.from_numpy(token_ids)[None].to(plan.positions.device),
        position_ids=plan.positions[None],
        attention_plan=plan,
        use_cache=False,
        return_dict=False,
    )
    return outputs[0][0]
