"""The section `algorithm`: rewards to advantages, and the loss on them.

Any advantage goes with any loss that makes sense; a published name brings the defaults of its paper.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Discriminator, Field, Tag

from tandem.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share, rule
from tandem.config.optimizer import AnyOptimizerConfig
from tandem.config.paths import Reference
from tandem.config.sections import FoundIn, of_usual_type
from tandem.config.teacher import TeacherConfig

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"]


class PreferenceConfig(Section):
    """What `tandem dpo` makes of pairs of answers, or of answers that are good or bad each for itself."""

    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """dpo: arXiv:2305.18290; ipo: arXiv:2310.12036; simpo and orpo, which need no reference policy: arXiv:2405.14734,
    arXiv:2403.07691; kto, whose rows are answers with a `label`: arXiv:2402.01306."""
    beta: PositiveFloat = 0.1
    """Coefficient of the distance to the reference policy; simpo: of the margin, where 2 to 2.5 are usual; orpo: of the
    odds ratio's loss, lambda."""
    length_normalized: bool = False
    """dpo: log-probs are averaged over an answer's tokens, not summed; ipo and simpo always do so."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """dpo: this share of the pairs is taken to be the wrong way round (conservative DPO)."""
    target_margin: NonNegativeFloat = 0.0
    """simpo: gamma."""
    desirable_weight: PositiveFloat = 1.0
    """kto: of good answers' losses. Where n_good of the rows are good and n_bad are bad, desirable_weight * n_good is
    best 1 to 4/3 times undesirable_weight * n_bad."""
    undesirable_weight: PositiveFloat = 1.0
    """kto: of bad answers' losses."""

    @property
    def has_reference(self) -> bool:
        """The loss compares with the policy as it was before training."""
        return self.loss not in ("simpo", "orpo")

    @rule()
    def _of_dpo(self) -> Iterator[str]:
        if self.loss != "dpo" and (self.label_smoothing or self.length_normalized):
            yield f"label_smoothing and length_normalized are of loss: dpo, not of {self.loss}"

    @rule()
    def _of_simpo(self) -> Iterator[str]:
        if self.loss != "simpo" and self.target_margin:
            yield f"target_margin is of loss: simpo, not of {self.loss}"

    @rule()
    def _of_kto(self) -> Iterator[str]:
        if self.loss != "kto" and (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0):
            yield f"desirable_weight and undesirable_weight are of loss: kto, not of {self.loss}"


class LossConfig(Section):
    """What every policy loss has. Those of `algorithm.loss.type` are in tandem/algorithms/builtin, one a file."""

    type: Any
    aggregation: Aggregation = "token_mean"
    """How token losses become one; `sequence` is a trajectory, all branches of it; `fixed_length` divides by
    trajectories * max_response_tokens (Dr. GRPO)."""

    divides_by: ClassVar[Literal["old_policy", "engine", "nothing"]] = "old_policy"
    """Whose probability of a token the surrogate divides the policy's by: what corrects for tokens of other weights."""
    bounds_ratio: ClassVar[bool] = True
    """Something keeps that ratio near 1, so that answers several steps old can be learned from."""

    def find_mistakes(self, algorithm: "PolicyGradientConfig") -> Iterator[str]:
        """Where the loss makes no sense with the algorithm."""
        yield from ()


BUILTIN = FoundIn("tandem.algorithms.builtin")
PolicyLossConfig = Annotated[LossConfig, BUILTIN]
"""The loss of any type."""


class ClipRangeConfig(LossConfig):
    """Ratios count within 1 - clip_ratio_low … 1 + clip_ratio_high."""

    clip_ratio_low: PositiveFloat = 0.2
    clip_ratio_high: PositiveFloat = 0.2


class KLConfig(Section):
    """Distance to the reference policy: the model as it was before training, or at the last refresh."""

    place: Literal["none", "reward", "loss"] = "none"
    """`reward`: every token's reward is lowered by coefficient * kl; `loss`: coefficient * kl is added to the loss."""
    estimator: KLEstimator = "k3"
    """Schulman, "Approximating KL Divergence" (2020); with + the value is this one's and the gradient that of k2."""
    coefficient: NonNegativeFloat = 0.001
    control: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive`: the coefficient follows the target (Ziegler et al. 2019, section 2.2); for `place: reward`."""
    target: PositiveFloat = 0.1
    horizon_trajectories: PositiveInt = 10_000
    refresh_steps: NonNegativeInt = 0
    """After every so many steps the reference takes up the policy's weights; 0: never."""
    refresh_share: float = Field(default=1.0, gt=0, le=1)
    """reference = (1 - refresh_share) * reference + refresh_share * policy (TR-DPO, arXiv:2404.09656). 1: the policy's
    weights; TRL's `sync_ref_model` has 0.6 every 512 steps."""

    @rule()
    def _adaptive_needs_reward(self) -> Iterator[str]:
        if self.control == "adaptive" and self.place != "reward":
            yield f"control: adaptive works with place: reward, not with place: {self.place}"

    @rule()
    def _refresh_has_a_reference(self) -> Iterator[str]:
        if self.refresh_steps and self.place == "none":
            yield "place: none has no reference to refresh; leave refresh_steps out, or give a place"

    @rule()
    def _share_has_a_refresh(self) -> Iterator[str]:
        if not self.refresh_steps and self.refresh_share != 1:
            yield f"refresh_share: {self.refresh_share} without refresh_steps does nothing; give both"


class RolloutCorrectionConfig(Section):
    """For tokens that another policy drew than the trainer's: each one's surrogate times an importance weight. Another
    one is an engine whose log-probs differ, and, with `trainer.max_staleness`, older weights.

    The published ones: TIS is `truncate`, MIS `mask`, each by token or sequence; IcePop is `mask` with `lower: 0.5` and
    `upper: 5`; the geometric ones take the mean over a sequence.
    """

    type: Literal["none", "truncate", "mask"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    """What the ratio of trainer and engine is of: the token, all tokens of its trajectory, or the mean over these."""
    upper: PositiveFloat = 2.0
    """Larger ratios are cut to it (truncate) or take the token's surrogate out of the loss (mask)."""
    lower: NonNegativeFloat = 0.0
    """With `mask`, tokens with smaller ratios leave the loss too."""
    skip_old_logprobs: bool | None = None
    """Take the engine's log-probs for those of the old policy, which saves a pass; the loss's own ratio corrects.
    Default: with `trainer.max_staleness` of 1 or more and `type: none`."""

    @rule()
    def _takes_or_compares(self) -> Iterator[str]:
        if self.skip_old_logprobs and self.type != "none":
            yield (
                f"skip_old_logprobs: it takes the engine's log-probs for the trainer's, and type: {self.type} compares "
                "them; set one of the two keys"
            )

    @rule()
    def _masks_from_below(self) -> Iterator[str]:
        if self.lower and self.type != "mask":
            yield f"lower: is of type: mask alone, not of {self.type}"

    @rule()
    def _leaves_ratios(self) -> Iterator[str]:
        if self.lower >= self.upper:
            yield f"lower: {self.lower:g} and upper: {self.upper:g} leave no ratio between them; lower < upper"


class PolicyGradientConfig(Section):
    """What every policy-gradient algorithm shares. Those of `algorithm.type` are in tandem/algorithms/builtin."""

    type: Any
    group_size: PositiveInt = 8
    """Samples a prompt."""
    epochs: PositiveInt = 1
    """How often the trajectories of a step are gone over."""
    minibatches: PositiveInt = 1
    """Optimizer steps an epoch; groups are spread over them evenly."""
    loss: PolicyLossConfig = Field(default={"type": "clip"}, validate_default=True)
    entropy_coefficient: float = 0.0
    """Times the mean token entropy, subtracted from the loss."""
    kl: KLConfig = KLConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    normalize_rewards: bool = False
    """Rewards minus their mean, over their standard deviation, of all steps so far: for a reward model's scores."""
    clip_rewards: PositiveFloat | None = None
    """Rewards are cut at ± this, after they are normalised."""
    resample_rounds: NonNegativeInt = 0
    """Dynamic sampling (DAPO): each group with equal rewards is replaced by that of a further prompt, in each step so
    many times `data.prompts_per_step` groups at most."""
    overlong_buffer: Share = 0.0
    """Soft overlong punishment (DAPO): in this last share of max_response_tokens the reward falls, by up to 1. Of a
    conversation with several branches the longest one counts."""
    mask_truncated: bool = False
    """Overlong filtering (DAPO): answers that were cut at a limit leave the losses of policy and critic, which are
    normalised without them. Advantages are computed before: their rewards count among their siblings', their tokens
    where advantages are whitened."""
    turn_rewards: Literal["whole", "by_turn"] = "whole"
    """What environments give for single turns. `whole`: all is the trajectory's, which each of its tokens answers for.
    `by_turn`: a turn answers for what came from it on."""

    takes_turn_rewards: ClassVar[bool] = False
    """Advantages are returns less a baseline, so that they can be those of turns."""
    advantages_by_token: ClassVar[bool] = False
    """Advantages may differ between the tokens of a trajectory."""
    has_teacher: ClassVar[bool] = False
    """Another model tells the log-probs of the sampled tokens: `model.teacher_path`, or a served one."""

    @property
    def needs_trainer_logprobs(self) -> bool:
        """Advantages need the log-probs of the weights before the step: those of older weights do not do."""
        return False

    @property
    def reads_rewards(self) -> bool:
        """Something is learned from rewards, and not from a teacher alone."""
        return True

    @property
    def served_teacher(self) -> TeacherConfig | None:
        """The teacher, where it is no model of the run."""
        return None

    @property
    def top_tokens(self) -> int:
        """How many of the tokens that a teacher finds likely the loss reads the policy's log-probs of."""
        return 0

    @classmethod
    def filled(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """A loss or KL that is given in part is filled up from the algorithm's own; another type of loss is not."""
        filled = dict(given)
        for name in ("loss", "kl"):
            part = filled.get(name)
            if isinstance(part, dict):
                own = _given_in(cls.model_fields[name].default)
                part = cast(dict[str, Any], part)
                if part.get("type", own.get("type")) == own.get("type"):
                    filled[name] = {**own, **part}
        return filled

    @rule()
    def _has_a_loss_that_fits(self) -> Iterator[str]:
        yield from self.loss.find_mistakes(self)

    @rule()
    def _resamples_groups(self) -> Iterator[str]:
        if self.resample_rounds and self.group_size == 1:
            yield "resample_rounds: rewards of one sample are always equal; give group_size 2 or more"

    @rule()
    def _takes_its_turn_rewards(self) -> Iterator[str]:
        if self.turn_rewards == "by_turn" and not self.takes_turn_rewards:
            yield f"turn_rewards: by_turn: advantages of type: {self.type} are of whole trajectories; use grpo"

    @rule()
    def _leaves_turn_rewards(self) -> Iterator[str]:
        if self.turn_rewards == "by_turn" and (self.normalize_rewards or self.clip_rewards is not None):
            yield (
                "turn_rewards: by_turn takes rewards as they are: leave out normalize_rewards and clip_rewards, which "
                "know only whole ones"
            )

    @property
    def shapes_rewards(self) -> bool:
        """Something changes the rewards before they become advantages."""
        rewards_change = self.overlong_buffer > 0 or self.normalize_rewards or self.clip_rewards is not None
        return rewards_change or self.kl.place == "reward"


def _given_in(default: Any) -> dict[str, Any]:
    """What a section that is a default states, as a file would state it."""
    if not isinstance(default, Section):
        return default
    stated = default.model_dump(exclude_unset=True)
    return {"type": default.type, **stated} if isinstance(default, LossConfig) else stated


class GroupConfig(PolicyGradientConfig):
    """What algorithms share that compare the siblings of a prompt."""

    group_size: int = Field(default=8, ge=2)
    """Samples a prompt; alone, every advantage is 0."""


def find_shaped_rewards(algorithm: PolicyGradientConfig, reason: str) -> Iterator[str]:
    """Where something changes the rewards of an algorithm that needs them as they are."""
    if algorithm.shapes_rewards:
        shapes = "neither KL, nor length, normalisation and clipping"
        yield f"{algorithm.type} {reason}, so nothing may shape them: {shapes}"


class MayHaveCriticConfig(PolicyGradientConfig):
    """What algorithms share that may have a critic."""

    critic_optimizer: AnyOptimizerConfig = Field(default={"lr": 1e-5}, validate_default=True)
    """The critic's optimizer, where the algorithm needs values."""
    critic_warmup_steps: NonNegativeInt = 0
    """Steps at the beginning in which the critic alone learns: the policy, and its learning rate's schedule, begin
    after them."""


class OwnAlgorithmConfig(MayHaveCriticConfig):
    """An algorithm of your own, in a file or a module of yours: docs/extend.md shows one."""

    type: Reference = Field(pattern=":")
    """`path/to/file.py:Class` or `package.module:Class`."""
    options: dict[str, Any] = {}
    """For the class, which finds them in `self.config.options`."""


def _whose(section: object) -> str:
    name: Any = cast(dict[str, Any], section).get("type", "") if isinstance(section, dict) else section
    return "own" if isinstance(name, OwnAlgorithmConfig) or ":" in str(getattr(name, "type", name)) else "built_in"


AlgorithmConfig = Annotated[
    Annotated[PolicyGradientConfig, BUILTIN, Tag("built_in")] | Annotated[OwnAlgorithmConfig, Tag("own")],
    Discriminator(_whose),
    of_usual_type("grpo"),
]
