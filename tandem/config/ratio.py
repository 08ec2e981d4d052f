"""Which log-probs losses are given as the old policy's, and which pass tells the trainer's of before the step.

    anchor      where (the first line that holds)                 the trainer's log-probs are those of
    engine      rollout_correction.skip_old_logprobs, by default  the first optimizer step's own pass
                where answers may be of older weights and no
                correction is asked
    trainer     several optimizer steps, advantages that read     a pass before the update
                them, a correction, or answers of older weights
    own pass    elsewhere                                         the only optimizer step's own pass

While the policy rests it has no optimizer step: the engine's stay alone, and elsewhere the pass before the update is
made. Decoupled PPO (Hilton et al. 2022) calls the trainer's policy of before the step proximal, the engine's behaviour.

What a loss's ratio is to is the loss's own (`LossConfig.divides_by`): mostly these log-probs, but dppo divides by the
engine's whatever the anchor, and reinforce by nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.config.algorithms import PolicyGradientConfig


class Anchor(Enum):
    """Whose log-probs the losses take for the old policy's: what `TokenColumns.old_logprobs` has."""

    OWN_PASS = "those of the optimizer step's own pass: the ratio is 1, with a gradient, and the column stays empty"
    TRAINER = "the trainer's, by the weights before the step"
    ENGINE = "the generation engine's, by the weights that made each token"


class TrainerPass(Enum):
    """Which pass tells `TokenColumns.trainer_logprobs`, by the weights before the step."""

    BEFORE_UPDATE = "one of its own, over all rows, before advantages"
    FIRST_STEP = "that of the first optimizer step, which no update precedes, over the rows that are in it"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RatioPlan:
    """Of one training step."""

    anchor: Anchor
    trainer_pass: TrainerPass


def ratio_plan(
    algorithm: PolicyGradientConfig, max_staleness: int, *, reads_old_logprobs: bool, critic_alone: bool = False
) -> RatioPlan:
    """`max_staleness`: that of `trainer`. `reads_old_logprobs`: advantages, or the tokens that the loss selects, need
    the old policy's log-probs (`Need.OLD_LOGPROBS`). `critic_alone`: the critic alone learns in this step."""
    if anchored_at_engine(algorithm, max_staleness):
        return RatioPlan(Anchor.ENGINE, TrainerPass.NONE if critic_alone else TrainerPass.FIRST_STEP)
    several_steps = algorithm.epochs * algorithm.minibatches > 1
    corrected = algorithm.rollout_correction.type != "none"
    if several_steps or reads_old_logprobs or corrected or max_staleness > 0 or critic_alone:
        return RatioPlan(Anchor.TRAINER, TrainerPass.BEFORE_UPDATE)
    return RatioPlan(Anchor.OWN_PASS, TrainerPass.FIRST_STEP)


def anchored_at_engine(algorithm: PolicyGradientConfig, max_staleness: int) -> bool:
    """The policy that drew each token, whatever its version, is the old one: `skip_old_logprobs`, or its default."""
    correction = algorithm.rollout_correction
    if correction.skip_old_logprobs is None:
        return max_staleness > 0 and correction.type == "none"
    return correction.skip_old_logprobs
