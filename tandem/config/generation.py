"""The section `generation`: how tokens are drawn, and the engine that draws them."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag

from tandem.config.base import (
    MayChange,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    by_type,
    rule,
)
from tandem.types import LEAST_TEMPERATURE, check_temperature


class EvalSamplingConfig(Section):
    """How validation answers are drawn."""

    temperature: Annotated[NonNegativeFloat, AfterValidator(check_temperature)] = 0.0
    """0 is greedy; else at least 0.01."""
    top_p: PositiveFloat = Field(default=1.0, le=1)
    samples: PositiveInt = 1
    """Answers a prompt: the N of mean@N, best@N, maj@N. Greedy ones are all the same."""
    max_response_tokens: PositiveInt | None = None
    """At most `generation.max_response_tokens`, which is the default."""


class SamplingConfig(Section):
    """What every engine has."""

    FREE_TEXT: ClassVar[tuple[str, ...]] = ("stop_strings",)

    temperature: PositiveFloat = Field(default=1.0, ge=LEAST_TEMPERATURE)
    top_p: PositiveFloat = Field(default=1.0, le=1)
    top_k: NonNegativeInt = 0
    """0 keeps the whole vocabulary."""
    max_response_tokens: PositiveInt = 1024
    stop_strings: list[str] = []
    partial_rollouts: bool = True
    """With `trainer.max_staleness`, weights are published while answers are being made, which go on with the new ones.
    false: a publish waits for what runs, so that an answer has one version and the run is the same every time."""
    balance: MayChange[bool | None] = None
    """Of several engines, one that is free gets the next prompt, and a faster one more. false, where nothing else
    depends on time (`trainer.max_staleness: 0`, or `partial_rollouts: false`): each has an equal share from the start,
    so that the same samples are made side by side every time, and the last bits of their log-probs are the same.
    null: false for native engines, true for others, whose batches depend on time anyway."""
    eval: EvalSamplingConfig = EvalSamplingConfig()

    @rule()
    def _has_room_for_validation(self) -> Iterator[str]:
        own = self.eval.max_response_tokens
        if own is not None and own > self.max_response_tokens:
            yield (
                f"eval.max_response_tokens: {own:,} is more than max_response_tokens: {self.max_response_tokens:,}, "
                "for which engines have room; raise that"
            )

    @property
    def balanced(self) -> bool:
        """`balance`, decided."""
        return bool(self.balance)


class NativeGenerationConfig(SamplingConfig):
    """The built-in engine: continuous batching, on the parameters of a trainer of one rank itself, else on its own."""

    type: Literal["native"] = "native"
    max_running: MayChange[PositiveInt] = 256
    """Samples that decode at once."""
    prefix_cache_tokens: MayChange[NonNegativeInt | None] = None
    """The most tokens of ended turns whose keys and values are kept for the next turn of their conversation; those used
    longest ago go first, and a publish drops all. The states of mixers that are kept with a turn count as the tokens
    that take as much memory. null: as many as `max_running` samples have, each as long as the longest, so that kept
    ones take no more memory than running ones may."""
    sleep: MayChange[Literal["never", "idle", "always"]] = "idle"
    """When the keys and values of answers give their memory to models on the same devices, which then come and go, too.
    idle: when no answer is under way; always: those that are under way are computed again after the publish."""
    cuda_graphs: MayChange[bool] = True
    """On a GPU, record decoding steps and replay them. Turn it off for a family whose forward pass cannot be recorded,
    as those that wait for a number from the GPU."""


class WeightSyncConfig(Section):
    """How trained weights reach an engine in processes of its own."""

    type: Literal["shared_memory", "disk"] = "shared_memory"
    """`disk`: a directory of safetensors, which is slow and needs nothing of the engine."""
    bucket_mib: PositiveFloat = 64.0
    """Memory that a publish takes beside the weights; a tensor larger than half of it travels alone."""
    checksum: bool = False
    """Each engine compares what has reached it with what was sent, at every publish."""
    delta: bool = False
    """Between pools send only elements that changed, exactly, over gloo; each rank then keeps a copy of what it
    sends or receives in host memory."""


class ReplicatedGenerationConfig(SamplingConfig):
    """What engines in processes of their own have."""

    replicas: MayChange[PositiveInt] = 1
    """Engines on each rank that hosts any; requests go to the one that is through with what it has soonest."""
    tensor_parallel: MayChange[PositiveInt] = 1
    """Devices that share one engine: those of this many neighbouring ranks, or of one rank that sees them all."""
    sleep: MayChange[Literal["never", "cache", "weights"]] = "cache"
    """What leaves the device while the trainer works on it; pools of their own never sleep."""
    memory_share: MayChange[PositiveFloat | None] = Field(default=None, lt=1)
    """The share of each device's memory that an engine takes, for weights, cache and all. null, on a GPU: 0.8 where
    models on its devices take turns with it, 0.4 where they stay there, 0.9 on devices of its own."""
    health_timeout_s: MayChange[PositiveFloat] = 60.0
    """A replica that gives no sign of life for so long is killed and replaced; no engine step may take longer."""
    start_timeout_s: MayChange[PositiveFloat] = 600.0
    """For a replica to load its model."""
    max_restarts: MayChange[NonNegativeInt] = 3
    """In a row, without a token delivered between them; one more failure ends the run, and so does a
    replica whose engine raises the same error, or ends its process in the same way, as the one before it."""
    sync: MayChange[WeightSyncConfig] = WeightSyncConfig()
    engine_args: MayChange[dict[str, Any]] = {}
    """Further options of the engine, passed on as they are."""

    @property
    def balanced(self) -> bool:
        return self.balance is not False

    @rule()
    def _says_the_share_once(self) -> Iterator[str]:
        twice = [name for name in ("gpu_memory_utilization", "mem_fraction_static") if name in self.engine_args]
        if self.memory_share is not None and twice:
            yield f"memory_share is what engine_args.{twice[0]} says, too; leave one of them out"


def default_memory_share(beside_models: bool, takes_turns: bool) -> float:
    """Of a GPU, for an engine. Beside models that take turns a fifth is left for what these keep meanwhile: contexts
    and buffers of NCCL, 1 to 3 GiB a process, and what the engine itself takes outside its share. Models that stay need
    most of the rest. Alone it is what vLLM takes of itself."""
    if not beside_models:
        return 0.9
    return 0.8 if takes_turns else 0.4


class VllmGenerationConfig(ReplicatedGenerationConfig):
    """vLLM; `scripts/vllm-env` installs it."""

    type: Literal["vllm"]
    quantization: Literal["fp8_per_channel", "fp8_per_tensor", "fp8_per_block", "mxfp8"] | None = None
    """The engine keeps linear layers in eight bits, made anew of the weights of each publish, and computes the rest in
    bfloat16, whatever `model.dtype` is; `rollout/mismatch_*` say what that costs. The output layer is left as it is. A
    CPU has `fp8_per_channel` alone."""


class SglangGenerationConfig(ReplicatedGenerationConfig):
    """SGLang, on CUDA; seeds hold as long as `engine_args` leaves its deterministic inference on."""

    type: Literal["sglang"]


GenerationConfig = Annotated[
    Annotated[NativeGenerationConfig, Tag("native")]
    | Annotated[VllmGenerationConfig, Tag("vllm")]
    | Annotated[SglangGenerationConfig, Tag("sglang")],
    by_type("native"),
]
