"""The section `generation`: how tokens are drawn, and the engine that draws them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag

from tandem.config.base import MayChange, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, by_type
from tandem.types import LEAST_TEMPERATURE, check_temperature


class EvalSamplingConfig(Section):
    """How validation answers are drawn."""

    temperature: Annotated[NonNegativeFloat, AfterValidator(check_temperature)] = 0.0
    """0 is greedy; else at least 0.01."""
    top_p: PositiveFloat = Field(default=1.0, le=1)
    samples: PositiveInt = 1
    """Answers a prompt: the N of mean@N, best@N, maj@N. Greedy ones are all the same."""


class SamplingConfig(Section):
    """What every engine has."""

    temperature: PositiveFloat = Field(default=1.0, ge=LEAST_TEMPERATURE)
    top_p: PositiveFloat = Field(default=1.0, le=1)
    top_k: NonNegativeInt = 0
    """0 keeps the whole vocabulary."""
    max_response_tokens: PositiveInt = 1024
    stop_strings: list[str] = []
    partial_rollouts: bool = True
    """With `trainer.max_staleness`, weights are published while answers are being made, which go on with the new ones.
    false: a publish waits for what runs, so that an answer has one version and the run is the same every time."""
    eval: EvalSamplingConfig = EvalSamplingConfig()


class NativeGenerationConfig(SamplingConfig):
    """The built-in engine: continuous batching on the trainer's own parameters."""

    type: Literal["native"] = "native"
    max_running: MayChange[PositiveInt] = 256
    """Samples that decode at once."""
    prefix_cache_tokens: MayChange[NonNegativeInt | None] = None
    """The most tokens of ended turns whose keys and values are kept for the next turn of their conversation; those used
    longest ago go first, and a publish drops all. null: as many as `max_running` samples have, each as long as the
    longest, so that kept ones take no more memory than running ones may."""
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
    """Between pools send only elements that changed, exactly; either side then keeps a copy of all weights."""


class ReplicatedGenerationConfig(SamplingConfig):
    """What engines in processes of their own have."""

    replicas: MayChange[PositiveInt] = 1
    """Engines on each rank that hosts any; requests go to the least loaded one."""
    tensor_parallel: MayChange[PositiveInt] = 1
    """Devices that share one engine: those of this many neighbouring ranks, or of one rank that sees them all."""
    sleep: MayChange[Literal["never", "cache", "weights"]] = "cache"
    """What leaves the device while the trainer works on it; pools of their own never sleep."""
    health_timeout_s: MayChange[PositiveFloat] = 60.0
    """A replica that gives no sign of life for so long is killed and replaced; no engine step may take longer."""
    start_timeout_s: MayChange[PositiveFloat] = 600.0
    """For a replica to load its model."""
    max_restarts: MayChange[NonNegativeInt] = 3
    """In a row, without a sample completed between them; one more failure ends the run."""
    sync: MayChange[WeightSyncConfig] = WeightSyncConfig()
    engine_args: MayChange[dict[str, Any]] = {}
    """Further options of the engine, passed on as they are."""


class VllmGenerationConfig(ReplicatedGenerationConfig):
    """vLLM; `scripts/vllm-env` installs it."""

    type: Literal["vllm"]


class SglangGenerationConfig(ReplicatedGenerationConfig):
    """SGLang, on CUDA; seeds hold as long as `engine_args` leaves its deterministic inference on."""

    type: Literal["sglang"]


GenerationConfig = Annotated[
    Annotated[NativeGenerationConfig, Tag("native")]
    | Annotated[VllmGenerationConfig, Tag("vllm")]
    | Annotated[SglangGenerationConfig, Tag("sglang")],
    by_type("native"),
]
