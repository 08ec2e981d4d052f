"""What an algorithm is: the signals it needs, scores -> advantages, log-probs -> loss. Pure tensors.

Suffixes: `_B` trajectories (where a `Batch` has a row a branch), `_T` response tokens of all of them head to tail, `_A`
trained ones among these, `_S` predicted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.types import TokenLoss


class Need(Enum):
    """What the loop must ask the engines for before `advantages`."""

    OLD_LOGPROBS = "log-probs of the old policy: the trainer's of before the update, or the engine's"
    REF_LOGPROBS = "log-probs of the reference policy"
    TEACHER_LOGPROBS = "log-probs of the teacher that is distilled"
    TEACHER_TOP_LOGPROBS = "the teacher's most probable tokens at each position, and their log-probs"
    VALUES = "values of a critic"
    GREEDY_REWARDS = "the reward of each prompt's greedy answer"
    REWARD_PARTS = "the parts that rewards are made of"
    SQUARED_PROBS = "sum of the squared probabilities of all tokens at each position"


@dataclass(slots=True)
class Rollouts:
    """One step's trajectories, as an algorithm sees them; float32 on the CPU."""

    rewards_B: Tensor
    """0 where `scored_B` is False."""
    scored_B: Tensor
    """bool: False on trajectories whose reward failed; they take no part in any statistic and get advantage 0."""
    groups_B: Tensor
    """int64: trajectories with the same number are siblings."""
    trajectories_T: Tensor
    """int64, ascending: the trajectory of each token, in whichever branch."""
    mask_T: Tensor
    """bool: tokens the policy made, in scored trajectories."""
    old_logprobs_T: Tensor | None = None
    """Log-probs of the policy that is about to be trained, by the trainer; with
    `rollout_correction.skip_old_logprobs`, the default with `trainer.max_staleness`, those of the generation engine
    for the weights that made each token."""
    ref_logprobs_T: Tensor | None = None
    teacher_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None
    squared_probs_T: Tensor | None = None
    """sum(pi^2) over the vocabulary, of the policy that is about to be trained."""
    turn_rewards_T: Tensor | None = None
    """The part of the trajectory's reward that a turn earned, on the turn's last token; None where environments give
    none."""
    greedy_rewards_B: Tensor | None = None
    """`[B]`, the reward of the greedy answer to the trajectory's prompt, NaN where it has none."""
    parts: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """`[B]` each, NaN where a trajectory's reward lacks the part."""
    seed: int = 0
    """This step's seed, for what an algorithm draws."""
    branches_T: Tensor = field(default=cast("Tensor", None))
    """int64, ascending: the branch of each token; tokens with the same number follow one another in one context.
    Default: each trajectory has one branch."""

    def __post_init__(self) -> None:
        if self.branches_T is None:  # pyright: ignore[reportUnnecessaryComparison]
            self.branches_T = self.trajectories_T

    @property
    def trained_tokens_B(self) -> Tensor:
        """int64: how many tokens of each trajectory are trained on."""
        return self.trajectories_T[self.mask_T].bincount(minlength=len(self.rewards_B))

    def by_token(self, values_B: Tensor) -> Tensor:
        """Each trajectory's value on its trained tokens; float32 `[T]`, 0 elsewhere and in those that are not
        scored."""
        return (values_B * self.scored_B).float()[self.trajectories_T] * self.mask_T


@dataclass(slots=True)
class Advantages:
    advantages_T: Tensor
    """float32, 0 outside the mask."""
    returns_T: Tensor | None
    """What the critic regresses to; None without a critic."""
    metrics: dict[str, float]
    selected_T: Tensor | None = None
    """bool: tokens that the loss treats apart; None where it treats all alike."""


class Algorithm(Protocol):
    """Chosen by `algorithm.type`; the loop never branches on which one it is.

    Once a step, in this order: the loop fills what `needs` names, calls `advantages`, then cuts the step into optimizer
    steps and calls `weights` for each, before it is cut further into micro-batches.
    """

    needs: frozenset[Need]
    value_loss: TokenLoss[Tensor] | None
    """The critic's loss; None without a critic."""

    @property
    def loss(self) -> TokenLoss[Tensor]:
        """The policy's loss."""
        ...

    @property
    def zero_without_advantage(self) -> bool:
        """The policy loss has gradient zero on a token with advantage 0: such trajectories need no pass."""
        ...

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """One step's advantages; may move the algorithm's own state, such as the adaptive KL coefficient."""
        ...

    def weights(self, mask_T: Tensor, trajectories_T: Tensor) -> Tensor:
        """`columns.loss_weights` of one optimizer step, from its trained tokens and the trajectory each belongs to."""
        ...

    def state(self) -> dict[str, float]:
        """What a resumed run needs; plain JSON."""
        ...

    def load_state(self, state: dict[str, float]) -> None: ...
