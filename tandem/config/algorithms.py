"""The sections `algorithm` and `training.optimizer`: rewards to advantages, the loss on them, the steps down it.

Any advantage goes with any loss that makes sense; a published name brings the defaults of its paper.
"""

from typing import Annotated, Any, Literal, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from tandem.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share
from tandem.config.paths import Reference

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"]


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019) with a learning-rate schedule over the optimizer steps of the run."""

    lr: PositiveFloat = 1e-6
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From `lr` after the warm-up to `lr * min_lr_ratio` at the last step."""
    min_lr_ratio: Share = 0.0
    warmup_steps: NonNegativeInt = 0


class PreferenceConfig(Section):
    """What `tandem dpo` makes of pairs of answers."""

    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    """dpo: arXiv:2305.18290; ipo: arXiv:2310.12036; simpo, which needs no reference policy: arXiv:2405.14734."""
    beta: PositiveFloat = 0.1
    """Of the distance to the reference policy; simpo: of the margin, 2 to 2.5 are usual."""
    length_normalized: bool = False
    """dpo: log-probs are averaged over an answer's tokens, not summed; ipo and simpo always do so."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """dpo: this share of the pairs is taken to be the wrong way round (conservative DPO)."""
    target_margin: NonNegativeFloat = 0.0
    """simpo: gamma."""

    @model_validator(mode="after")
    def _of_its_loss(self) -> Self:
        if self.loss != "dpo" and (self.label_smoothing or self.length_normalized):
            raise ValueError(f"label_smoothing and length_normalized are of loss: dpo, not of {self.loss}")
        if self.loss != "simpo" and self.target_margin:
            raise ValueError(f"target_margin is of loss: simpo, not of {self.loss}")
        return self


class LossConfig(Section):
    """What every policy loss has."""

    aggregation: Aggregation = "token_mean"
    """How token losses become one; `fixed_length` divides by rows * max_response_tokens (Dr. GRPO)."""


class ClipRangeConfig(LossConfig):
    """Ratios count within 1 - clip_ratio_low … 1 + clip_ratio_high."""

    clip_ratio_low: PositiveFloat = 0.2
    clip_ratio_high: PositiveFloat = 0.2


class ClipLossConfig(ClipRangeConfig):
    """Clipped surrogate (PPO, arXiv:1707.06347), each side with a bound of its own (DAPO, arXiv:2503.14476)."""

    type: Literal["clip"] = "clip"
    dual_clip: float | None = Field(default=None, gt=1)
    """Lower bound of the objective at negative advantages, in units of the advantage (arXiv:1912.09729)."""


class ReinforceLossConfig(LossConfig):
    """Log-likelihood times advantage, without ratio and clip (Williams 1992)."""

    type: Literal["reinforce"] = "reinforce"


class GSPOLossConfig(ClipRangeConfig):
    """Clipped ratio of whole sequences, the geometric mean of their tokens' (arXiv:2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_ratio_low: PositiveFloat = 3e-4
    clip_ratio_high: PositiveFloat = 4e-4
    aggregation: Aggregation = "sequence_mean_token_mean"


class GMPOLossConfig(LossConfig):
    """Geometric mean of the tokens' clipped ratios (arXiv:2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    clip_log_ratio: PositiveFloat = 0.4
    """Token ratios count within exp(-this) … exp(this)."""
    aggregation: Aggregation = "sequence_mean_token_mean"


class CISPOLossConfig(ClipRangeConfig):
    """Log-likelihood weighted by the clipped ratio, which has no gradient (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_ratio_low: PositiveFloat = 1.0
    """1: no lower bound."""
    clip_ratio_high: PositiveFloat = 4.0


class SAPOLossConfig(LossConfig):
    """A smooth gate on the ratio in the place of a clip (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    temperature_positive: PositiveFloat = 1.0
    temperature_negative: PositiveFloat = 1.05
    """At negative advantages; a higher one closes the gate sooner."""
    aggregation: Aggregation = "sequence_mean_token_mean"


class DPPOLossConfig(LossConfig):
    """Tokens leave the loss when the policy moves too far from the one that sampled them (arXiv:2602.04879)."""

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Of sampling and trained policy, over two outcomes: the token, and any other."""
    max_divergence: PositiveFloat = 0.15
    """0.15 with tv, 0.05 with kl are usual."""
    max_ratio: float = Field(default=20.0, gt=1)
    """Importance weights are cut here."""


class KLCovLossConfig(LossConfig):
    """A KL penalty on the tokens of highest covariance of log-prob and advantage (arXiv:2505.22617)."""

    type: Literal["kl_cov"] = "kl_cov"
    share: Share = 0.002
    """Of the step's tokens; at least one."""
    coefficient: NonNegativeFloat = 1.0


class ClipCovLossConfig(ClipRangeConfig):
    """Takes tokens of high covariance of log-prob and advantage out of the clipped loss (arXiv:2505.22617)."""

    type: Literal["clip_cov"] = "clip_cov"
    share: Share = 0.0002
    """Of the step's tokens, drawn from those within the bounds; at least one."""
    covariance_low: float = 1.0
    covariance_high: float = 5.0


RatioLoss = ClipLossConfig | GSPOLossConfig | GMPOLossConfig | SAPOLossConfig | KLCovLossConfig | ClipCovLossConfig
LikelihoodLoss = ReinforceLossConfig | CISPOLossConfig | DPPOLossConfig
PolicyLossConfig = Annotated[RatioLoss | LikelihoodLoss, Field(discriminator="type")]


class KLConfig(Section):
    """Distance to the frozen reference policy (the model as it was before training)."""

    place: Literal["none", "reward", "loss"] = "none"
    """`reward`: every token's reward is lowered by coefficient * kl; `loss`: coefficient * kl is added to the loss."""
    estimator: KLEstimator = "k3"
    """Schulman, "Approximating KL Divergence" (2020); with + the value is this one's and the gradient that of k2."""
    coefficient: NonNegativeFloat = 0.001
    control: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive`: the coefficient follows the target (Ziegler et al. 2019, section 2.2); for `place: reward`."""
    target: PositiveFloat = 0.1
    horizon_trajectories: PositiveInt = 10_000

    @model_validator(mode="after")
    def _adaptive_needs_reward(self) -> Self:
        if self.control == "adaptive" and self.place != "reward":
            raise ValueError(f"control: adaptive works with place: reward, not with place: {self.place}")
        return self


PUBLISHED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"normalize_by_std": False, "loss": {"aggregation": "fixed_length"}},
    "dapo": {"loss": {"clip_ratio_high": 0.28}, "resample_rounds": 10, "overlong_buffer": 0.2},
    "gspo": {"loss": {"type": "gspo"}},
    "gmpo": {"loss": {"type": "gmpo"}},
    "cispo": {"loss": {"type": "cispo"}},
    "sapo": {"loss": {"type": "sapo"}},
    "dppo": {"loss": {"type": "dppo"}},
    "rloo": {"loss": {"type": "reinforce", "aggregation": "sequence_mean_token_sum"}},
    "opo": {"loss": {"type": "reinforce", "aggregation": "sequence_mean_token_sum"}},
    "otb": {"loss": {"type": "reinforce", "aggregation": "sequence_mean_token_sum"}},
    "remax": {"loss": {"type": "reinforce", "aggregation": "sequence_mean_token_sum"}},
    "gpg": {"loss": {"type": "reinforce"}},
    "maxrl": {"loss": {"type": "reinforce"}},
    "reinforce_plus_plus": {"kl": {"place": "reward", "estimator": "k1", "coefficient": 0.01}},
    "reinforce_plus_plus_baseline": {"kl": {"place": "loss", "estimator": "k2", "coefficient": 0.01}},
}
"""What a name brings along, as its paper has it."""
BY_TOKEN = {"ppo", "reinforce_plus_plus", "otb"}
"""Their advantages differ between the tokens of a trajectory."""
RAW_REWARDS = {"maxrl": "divides by the mean reward", "gdpo": "reads the parts of the reward"}
"""They bear no shaping of the rewards, because each …"""


class RolloutCorrectionConfig(Section):
    """For generation engines whose log-probs differ from the trainer's: each token's loss times an importance weight.

    The published ones: TIS is `truncate`, MIS `mask`, each by token or sequence; IcePop is `mask` with `lower: 0.5` and
    `upper: 5`; the geometric ones take the mean over a sequence.
    """

    type: Literal["none", "truncate", "mask"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    """What the ratio of trainer and engine is of: the token, its whole response, or that per token."""
    upper: PositiveFloat = 2.0
    """Larger ratios are cut to it (truncate) or leave the loss (mask)."""
    lower: NonNegativeFloat = 0.0
    """Of `mask`: smaller ratios leave the loss."""
    skip_old_logprobs: bool = False
    """Take the engine's log-probs for those of the old policy, which saves a pass; the loss's own ratio corrects."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.skip_old_logprobs and self.type != "none":
            raise ValueError(f"skip_old_logprobs: type: {self.type} compares them; set one of the two")
        if self.lower and self.type != "mask":
            raise ValueError(f"lower: is of type: mask alone, not of {self.type}")
        return self


class PolicyGradientConfig(Section):
    """What every policy-gradient algorithm shares."""

    type: Any
    group_size: PositiveInt = 8
    """Samples a prompt."""
    epochs: PositiveInt = 1
    """Passes over the trajectories of a step."""
    minibatches: PositiveInt = 1
    """Optimizer steps a pass; groups are spread over them evenly."""
    loss: PolicyLossConfig = ClipLossConfig()
    entropy_coefficient: float = 0.0
    """Times the mean token entropy, subtracted from the loss."""
    kl: KLConfig = KLConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    normalize_rewards: bool = False
    """Rewards minus their mean, over their standard deviation, of all steps so far: for a reward model's scores."""
    clip_rewards: PositiveFloat | None = None
    """Rewards are cut at ± this, after they are normalised."""
    resample_rounds: NonNegativeInt = 0
    """Dynamic sampling (DAPO): so often are groups whose rewards are all equal replaced by those of further prompts."""
    overlong_buffer: Share = 0.0
    """Soft overlong punishment (DAPO): in this last share of max_response_tokens the reward falls, by up to 1."""

    @model_validator(mode="before")
    @classmethod
    def _published_defaults(cls, given: Any) -> Any:
        """What is not given is as published under the type's name; another loss brings its own defaults."""
        if not isinstance(given, dict):
            return given
        chosen = cast(dict[str, Any], given)
        published = PUBLISHED.get(chosen.get("type", ""), {})
        merged = {**published, **chosen}
        for key, defaults in (("loss", {"type": "clip", **published.get("loss", {})}), ("kl", published.get("kl", {}))):
            own = merged.get(key)
            filled: dict[str, Any] = {**defaults, **own} if isinstance(own, dict) else {}
            if filled and filled.get("type") == defaults.get("type"):
                merged[key] = filled
        return merged

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.loss.type == "gmpo" and self.type in BY_TOKEN:
            raise ValueError(f"loss.type: gmpo weighs whole responses, but {self.type} judges tokens; use gspo")
        if self.loss.type == "kl_cov" and self.epochs * self.minibatches == 1:
            raise ValueError(
                "loss.type: kl_cov does nothing on one optimizer step a batch; raise minibatches or epochs"
            )
        if self.resample_rounds and self.group_size == 1:
            raise ValueError("resample_rounds: rewards of one sample are always equal; give group_size 2 or more")
        shaped = self.kl.place == "reward" or self.overlong_buffer or self.normalize_rewards or self.clip_rewards
        if self.type in RAW_REWARDS and shaped:
            reason = f"{self.type} {RAW_REWARDS[self.type]}"
            raise ValueError(f"{reason}, so nothing may shape them: neither KL, nor length, normalisation and clipping")
        return self


class GroupConfig(PolicyGradientConfig):
    """Comparison with the siblings of a prompt.

    rloo: with the mean of the others (arXiv:2402.14740); opo: with the length-weighted mean (arXiv:2505.23585); otb: at
    each token (arXiv:2602.07078); gpg: scaled up for groups that teach nothing (arXiv:2504.02546); maxrl: in units of
    the mean reward (arXiv:2602.02710); reinforce_plus_plus_baseline: whitened over the step (arXiv:2501.03262).
    """

    type: Literal["rloo", "opo", "otb", "gpg", "maxrl", "reinforce_plus_plus_baseline"]
    group_size: int = Field(default=8, ge=2)
    """Samples a prompt; alone, every advantage is 0."""


class GRPOConfig(PolicyGradientConfig):
    """Group Relative Policy Optimization (arXiv:2402.03300), and what others made of it.

    dr_grpo: arXiv:2503.20783; dapo: arXiv:2503.14476; gspo: arXiv:2507.18071; gmpo: arXiv:2507.20673; cispo:
    arXiv:2506.13585; sapo: arXiv:2511.20347; dppo: arXiv:2602.04879.
    """

    type: Literal["grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "dppo"] = "grpo"
    group_size: int = Field(default=8, ge=2)
    """Samples a prompt; alone, every advantage is 0."""
    normalize_by_std: bool = True
    """Divide the group's centred rewards by their standard deviation."""


class GDPOConfig(PolicyGradientConfig):
    """Several rewards, each normalised apart within its group (arXiv:2601.05242)."""

    type: Literal["gdpo"]
    group_size: int = Field(default=8, ge=2)
    """Samples a prompt; alone, every advantage is 0."""
    rewards: dict[str, float] = Field(min_length=1)
    """Weights of parts: names of reward functions, where there are several, or keys that they return."""


class ReMaxConfig(PolicyGradientConfig):
    """The reward of the greedy answer is the baseline (arXiv:2310.10505)."""

    type: Literal["remax"]
    group_size: PositiveInt = 1


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Rewards with a token-wise KL penalty, whitened over the whole step (arXiv:2501.03262)."""

    type: Literal["reinforce_plus_plus"]
    group_size: PositiveInt = 1
    gamma: Share = 1.0


class PPOConfig(PolicyGradientConfig):
    """Proximal Policy Optimization with a critic (Schulman et al. 2017, arXiv:1707.06347)."""

    type: Literal["ppo"]
    group_size: PositiveInt = 1
    gamma: Share = 1.0
    gae_lambda: Share = 1.0
    whiten_advantages: bool = True
    """Advantages of a step get mean 0 and standard deviation 1 over their tokens."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from the rollout's within one step (null: free)."""
    critic_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class OwnAlgorithmConfig(PolicyGradientConfig):
    """An algorithm of your own, in a file or a module of yours: docs/extend.md shows one."""

    type: Reference = Field(pattern=":")
    """`path/to/file.py:Class` or `package.module:Class`."""
    options: dict[str, Any] = {}
    """For the class, which finds them in `self.config.options`."""
    critic_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Of the critic, if the class needs values."""


def _whose(section: object) -> str:
    name: Any = cast(dict[str, Any], section).get("type", "") if isinstance(section, dict) else section
    return "own" if isinstance(name, OwnAlgorithmConfig) or ":" in str(getattr(name, "type", name)) else "built_in"


BuiltInConfig = Annotated[
    GRPOConfig | GroupConfig | GDPOConfig | ReMaxConfig | ReinforcePlusPlusConfig | PPOConfig,
    Field(discriminator="type"),
]
AlgorithmConfig = Annotated[
    Annotated[BuiltInConfig, Tag("built_in")] | Annotated[OwnAlgorithmConfig, Tag("own")], Discriminator(_whose)
]
