"""On-policy distillation: a teacher scores each token that the student samples, and the log-ratio is the advantage; or,
with the teacher's likeliest tokens, the distance of the two distributions is the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.algorithms.base import Advantages, Need, Rollouts
from tandem.algorithms.group_relative import GroupRelative, Siblings
from tandem.algorithms.returns import discounted_returns
from tandem.config.algorithms import PolicyGradientConfig, find_shaped_rewards
from tandem.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share, rule
from tandem.config.teacher import TeacherConfig

if TYPE_CHECKING:
    from torch import Tensor


class OnPolicyDistillationConfig(PolicyGradientConfig):
    """How much likelier the teacher finds each token that the student sampled (GKD, arXiv:2306.13649)."""

    advantages_by_token: ClassVar[bool] = True
    has_teacher: ClassVar[bool] = True

    type: Literal["on_policy_distillation"] = "on_policy_distillation"
    group_size: PositiveInt = 1
    """Samples a prompt; siblings are compared with `reward_weight` alone."""
    distillation_coefficient: PositiveFloat = 1.0
    """Factor of the log-ratio of teacher and student; with `top_k`, of their KL."""
    top_k: NonNegativeInt = 0
    """0: the sampled tokens are compared. k: the distributions in the place of each of them, over the teacher's k
    likeliest tokens and all others as one."""
    teacher: TeacherConfig | None = None
    """A served teacher, in the place of `model.teacher_path`; for `generation.temperature: 1`."""
    gamma: Share = 0.0
    """Discount of the log-ratios of later tokens. 0: a token answers for its own; 1: for all that follow it."""
    reward_weight: NonNegativeFloat = 0.0
    """Factor of GRPO's advantage, which is added; with 0 rewards are metrics alone."""

    @property
    def served_teacher(self) -> TeacherConfig | None:
        return self.teacher

    @property
    def top_tokens(self) -> int:
        return self.top_k

    @property
    def needs_trainer_logprobs(self) -> bool:
        return not self.top_k

    @property
    def reads_rewards(self) -> bool:
        return self.reward_weight > 0

    @rule()
    def _discounts_tokens(self) -> Iterator[str]:
        if self.top_k and self.gamma:
            yield "gamma: with top_k each token answers for its own distribution; leave it out"

    @rule()
    def _has_a_loss_of_distributions(self) -> Iterator[str]:
        if self.top_k and self.loss.type != "clip":
            yield f"loss.type: {self.loss.type} reads no distributions; with top_k use clip"

    @rule()
    def _compares_siblings(self) -> Iterator[str]:
        if self.reward_weight and self.group_size == 1:
            yield "reward_weight: rewards are compared between siblings; give group_size 2 or more"

    @rule()
    def _resamples_nothing(self) -> Iterator[str]:
        if self.resample_rounds:
            yield "resample_rounds: groups with equal rewards teach as much as others here; leave it out"

    @rule()
    def _leaves_rewards(self) -> Iterator[str]:
        if not self.reward_weight:
            yield from find_shaped_rewards(self, "with reward_weight: 0 learns nothing from rewards")
        elif self.kl.place == "reward":
            yield "kl.place: reward is no part of these advantages; give kl.place: loss"


class OnPolicyDistillation(GroupRelative[OnPolicyDistillationConfig]):
    """Advantage of a trajectory's token t, the sum being over the trained tokens s >= t of its branch:

        A_t = c * sum of gamma^(s - t) (log teacher_s - log pi_s) + w * (r - group mean) / (group std + 1e-6)

    with c `distillation_coefficient`, w `reward_weight`, and 0^0 = 1. Log-probs are of the sampled tokens, both at the
    sampling temperature. With gamma 0 and w 0 the expected gradient at the present policy is that of c times the
    token-wise KL(student || teacher), on contexts that the student made and that take no gradient. With top_k the first
    term is 0, and the loss is `TopKDistillationLoss`.
    """

    def __init__(self, config: OnPolicyDistillationConfig, max_response_tokens: int) -> None:
        super().__init__(config, max_response_tokens)
        if config.top_k:
            from tandem.algorithms.distillation import TopKDistillationLoss

            self.loss = TopKDistillationLoss(self.loss.config, config, config.distillation_coefficient)
            self.needs |= {Need.TEACHER_TOP_LOGPROBS}
        else:
            self.needs |= {Need.OLD_LOGPROBS, Need.TEACHER_LOGPROBS}

    def trajectory_advantages(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        return self.config.reward_weight * (rewards_B - siblings.mean(rewards_B)) / (siblings.std(rewards_B) + 1e-6)

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        mask_T, config = rollouts.mask_T, self.config
        if config.top_k:
            rewarded = super().estimate(rollouts, rewards_T)
            return replace(rewarded, metrics=rewarded.metrics if config.reward_weight else {})
        assert rollouts.old_logprobs_T is not None and rollouts.teacher_logprobs_T is not None
        log_ratio_T = (rollouts.teacher_logprobs_T - rollouts.old_logprobs_T) * mask_T
        return_T = discounted_returns(log_ratio_T, mask_T, rollouts.branches_T, gamma=config.gamma)
        metrics = {"teacher/kl": -log_ratio_T.double().sum().item() / max(int(mask_T.sum()), 1)}
        advantages_T = config.distillation_coefficient * return_T
        if config.reward_weight:
            rewarded = super().estimate(rollouts, rewards_T)
            advantages_T = advantages_T + rewarded.advantages_T
            metrics |= rewarded.metrics
        return Advantages(advantages_T, None, metrics)
