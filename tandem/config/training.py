"""The section `training`: the engine that trains, and how the model lies on the ranks."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Tag

from tandem.config.base import MayChange, NonNegativeFloat, PositiveInt, Section, by_type, rule
from tandem.config.optimizer import AnyOptimizerConfig


class TrainingSection(Section):
    """What every engine has."""

    optimizer: AnyOptimizerConfig = Field(default={}, validate_default=True)
    tokens_per_micro_batch: MayChange[PositiveInt] = 16_384
    """Tokens in one forward and backward pass; a longer row is passed alone. What prompts have in common (siblings all,
    a conversation's turns what came before) is computed and counted once, by Megatron-Core with each row."""
    skip_zero_advantage: bool = True
    """Leave out rows whose gradient is exactly zero; the loss is normalised as if they were there."""

    @property
    def computes_prompts_once(self) -> bool:
        """Rows whose prompts begin alike share that part in a pass."""
        return True

    @property
    def adds_losses(self) -> bool:
        """The engine adds losses of its own, which have a gradient on every row."""
        return False

    def mesh(self, ranks: int) -> dict[str, int]:
        """How `ranks` are laid out: sizes by dimension, outermost first."""
        return {"data": ranks}


class FsdpTrainingConfig(TrainingSection):
    """The PyTorch engine: plain torch on one rank, FSDP2 on several."""

    type: Literal["fsdp"] = "fsdp"
    activation_checkpointing: MayChange[bool | Literal["selective"]] = False
    """Recompute activations in the backward pass: less memory, about a third more time. selective: all but attention,
    whose output is kept as well as each layer's input: less time with long rows, for twice that memory."""
    compile: MayChange[bool] = False
    """torch.compile the layers between their attentions: for long runs on GPUs, as the first
    step compiles."""
    attention: MayChange[Literal["auto", "fa2", "fa3", "fa4"]] = "auto"
    """FlashAttention on a GPU. fa2 comes with torch; fa3 (compute capability 9) and fa4 (9, 10) are packages of their
    own. auto: fa3 on 9 and fa4 on 10 where they are installed and compute what they should, else fa2."""
    shard_size: MayChange[PositiveInt | None] = None
    """Ranks that share one copy of the model; the others hold replicas. Default: all share one."""
    cpu_offload: MayChange[bool] = False
    """Keep the optimizer, and on several ranks the shards, in host memory; the optimizer runs there."""
    optimizer_offload: MayChange[bool] = False
    """Keep the optimizer's moments, and on one rank the masters, in host memory but for the step, for which they visit
    the device some at a time: 8 to 12 bytes a parameter less, over the ranks, and the same numbers."""
    reduce_once: MayChange[bool | None] = None
    """Sum gradients over ranks once a pass: less to send, but each rank holds the whole gradient in float32 until then.
    False: after each micro-batch. None: once where the whole gradient is at most a GiB."""
    context_parallel: MayChange[PositiveInt] = 1
    """Ranks that share the tokens of a micro-batch: for responses too long for one."""

    @rule()
    def _offloads_once(self) -> Iterator[str]:
        if self.cpu_offload and self.optimizer_offload:
            yield "cpu_offload has the optimizer in host memory already; leave optimizer_offload out"

    def mesh(self, ranks: int) -> dict[str, int]:
        return {"data": ranks // self.context_parallel, "context": self.context_parallel}

    def sums_gradients_once(self, parameters: int) -> bool:
        """Whether the float32 gradient of so many parameters that learn is summed once a pass."""
        return 4 * parameters <= 2**30 if self.reduce_once is None else self.reduce_once


class MegatronTrainingConfig(TrainingSection):
    """Megatron-Core: tensor, pipeline, context and expert parallelism; docs/megatron.md says how to choose.

    Ranks that the degrees leave over hold replicas with rows of their own.
    """

    type: Literal["megatron"]
    activation_checkpointing: MayChange[bool] = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    tensor_parallel: MayChange[PositiveInt] = 1
    """Ranks that share every matrix: inside a node."""
    sequence_parallel: MayChange[bool] = False
    """They share what lies between the matrices by token, too; a mixture of experts needs it."""
    pipeline_parallel: MayChange[PositiveInt] = 1
    """Ranks that share the layers, one stage after another."""
    virtual_pipeline: MayChange[PositiveInt] = 1
    """Stages a rank: more of them, shorter waits, more messages."""
    context_parallel: MayChange[PositiveInt] = 1
    """Ranks that share the tokens of every row: for long rows."""
    expert_parallel: MayChange[PositiveInt] = 1
    """Ranks that share the experts; they hold rows or tokens of their own elsewhere."""
    expert_tensor_parallel: MayChange[PositiveInt | None] = None
    """Ranks that share the matrices of each expert. Default: 1, or `tensor_parallel` if all ranks hold all experts."""
    load_balancing_loss: NonNegativeFloat = 0.0
    """Coefficient of the loss that keeps experts equally busy (Fedus et al. 2021), 0: none."""
    router_z_loss: NonNegativeFloat = 0.0
    """Coefficient of the loss that keeps router logits small (Zoph et al. 2022), 0: none."""
    router_replay: bool = False
    """Send tokens to the experts that the generation engine sent them to, instead of choosing again."""

    @property
    def computes_prompts_once(self) -> bool:
        """Each row gets its prompt back: Megatron-Core knows no shared prefixes."""
        return False

    @property
    def adds_losses(self) -> bool:
        """Those of the routers."""
        return self.load_balancing_loss > 0 or self.router_z_loss > 0

    @property
    def expert_ranks(self) -> int:
        """That share each expert's matrices."""
        alone = self.tensor_parallel if self.expert_parallel == 1 else 1
        return self.expert_tensor_parallel or alone

    @rule()
    def _has_a_pipeline(self) -> Iterator[str]:
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            yield "virtual_pipeline needs pipeline_parallel over 1"

    @rule()
    def _has_tensor_ranks(self) -> Iterator[str]:
        if self.sequence_parallel and self.tensor_parallel == 1:
            yield "sequence_parallel needs tensor_parallel over 1"

    @rule()
    def _has_expert_ranks(self) -> Iterator[str]:
        if self.expert_parallel == 1 and self.expert_ranks != self.tensor_parallel:
            yield "expert_tensor_parallel other than tensor_parallel needs expert_parallel over 1"

    def mesh(self, ranks: int) -> dict[str, int]:
        inner = {"context": self.context_parallel, "tensor": self.tensor_parallel}
        replica = self.pipeline_parallel * self.context_parallel * self.tensor_parallel
        return {"pipeline": self.pipeline_parallel, "data": ranks // replica, **inner}


TrainingConfig = Annotated[
    Annotated[FsdpTrainingConfig, Tag("fsdp")] | Annotated[MegatronTrainingConfig, Tag("megatron")], by_type("fsdp")
]
