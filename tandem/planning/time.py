"""How long the stages of a training step take: data sheets, twelve constants, and arithmetic. No torch.

`benchmarks/plan_time.py` holds it to published step times. On a setup that nobody has measured, expect to be 15 to 20%
off; `tandem/planning/calibration.py` scales each stage by what a run measured.
"""

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Constants:
    """All that data sheets do not say. The first six are of decoding, fitted on inter-token latencies of vLLM on H100
    GPUs; the last two are published times of new weights alone; those between are fitted on steps of NeMo-RL
    (`benchmarks/plan_time.py`)."""

    memory_share: float = 0.843
    """Of the memory's bandwidth that decoding reaches."""
    layer_s: float = 55e-6
    """Kernel launches and gaps of a layer in an iteration of decoding."""
    exchange_s: float = 17.5e-6
    """More with tensor parallelism: a layer's two sums."""
    mixture_s: float = 57e-6
    """More where the layer is a mixture of experts."""
    row_s: float = 60e-6
    """Scheduling and sampling of a row, each iteration."""
    expert_skew: float = 0.817
    """Rows that choose experts are as good as rows ** expert_skew that choose independently."""
    matmul_share: float = 0.40
    """Of the peak that forward and backward passes reach."""
    mixture_pass_s: float = 4.8e-3
    """A layer of experts in the forward pass of a micro-batch takes at least so long, however few tokens there are."""
    distant_s: float = 97e-6
    """Each doubling of tensor parallelism beyond a node adds to each of a layer's two sums."""
    switch_s: float = 25.0
    """Between generation and training on the same devices: sleep, wake, and what no stage counts."""
    own_refit_bytes_per_s: float = 38e9
    """New weights into engines on the same devices."""
    sent_refit_bytes_per_s: float = 120e9
    """New weights into engines on devices of their own."""


CONSTANTS = Constants()


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """How a model that trains or scores lies on its GPUs."""

    gpus: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    sharded: bool = False
    """FSDP: weights are gathered and gradients scattered for each micro-batch, while others are computed."""

    @property
    def replicas(self) -> int:
        """That have rows of their own."""
        return max(1, self.gpus // (self.tensor * self.context * self.pipeline))

    def __str__(self) -> str:
        degrees = {"TP": self.tensor, "CP": self.context, "EP": self.expert, "PP": self.pipeline}
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return gpus + "".join(f" {name}{degree}" for name, degree in degrees.items() if degree > 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """A step's rows."""

    rows: int
    """Answers a step."""
    response_tokens: float
    """On average."""
    max_response_tokens: int
    prompt_tokens: float
    siblings: int = 1
    """Answers a prompt, whose tokens pass once for them all."""
    optimizer_steps: int = 1
    epochs: int = 1
    """How often a step's rows are trained on; `optimizer_steps` are of one."""
    micro_batch_tokens: int = 16_384
    """A longer row is passed alone."""
    spread: float = 0.7
    """Deviation of the logarithm of the lengths: lognormal, cut at the longest."""
    recompute: bool = False
    """Activation checkpointing: the backward pass computes the forward pass again."""
    picture_tokens: float = 0
    """Of the prompt, for a model that sees pictures; its vision tower computes them for each pass."""
    tower_learns: bool = True

    @property
    def row_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of each stage; those that a step does not have take none."""

    generation: float = 0.0
    log_probs: float = 0.0
    reference: float = 0.0
    critic: float = 0.0
    update: float = 0.0
    publish: float = 0.0
    switch: float = 0.0

    @property
    def preparation(self) -> float:
        return self.log_probs + self.reference + self.critic

    @property
    def total(self) -> float:
        """Stages one after another."""
        return sum(self.stages().values())

    @property
    def beside(self) -> float:
        """Generation beside all else, with staleness of one or more: arXiv:2409.19256 has no such case."""
        return max(self.generation, self.preparation + self.update) + self.publish

    def stages(self) -> dict[str, float]:
        return {stage.name: getattr(self, stage.name) for stage in fields(self)}


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """The lengths of a step's responses, ascending, and which share of the rows has each."""

    tokens: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(length * share for length, share in zip(self.tokens, self.shares, strict=True))

    @property
    def weighted_mean(self) -> float:
        """The mean over tokens, each of which counts its row's length."""
        return sum(length**2 * share for length, share in zip(self.tokens, self.shares, strict=True)) / self.mean


@lru_cache(maxsize=1024)
def response_lengths(workload: Workload) -> LengthDistribution:
    """Lognormal lengths, cut at the longest, whose mean is as wanted; finer where they are long, to a single row."""
    shares = [1 / 32] * 31
    while (left := 1 - sum(shares)) > 2 / max(32, workload.rows):
        shares.append(left / 2)
    shares.append(1 - sum(shares))
    normal, below = [], 0.0
    for share in shares:
        normal.append(NormalDist().inv_cdf(below + share / 2))
        below += share
    low, high = -20.0, 2.0 * math.log(workload.max_response_tokens + 1) + 20.0
    lengths = LengthDistribution((), ())
    for _ in range(50):
        middle = (low + high) / 2
        tokens = tuple(min(math.exp(middle + workload.spread * z), workload.max_response_tokens) for z in normal)
        lengths = LengthDistribution(tokens, tuple(shares))
        low, high = (middle, high) if lengths.mean < workload.response_tokens else (low, middle)
    return lengths
