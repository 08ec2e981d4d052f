"""What an algorithm needs of the steps, the rows, the engines and the placement of its run."""

from collections.abc import Iterator

from tandem.config.algorithms import MayHaveCriticConfig, PolicyGradientConfig
from tandem.config.ratio import anchored_at_engine
from tandem.config.tree import DpoConfig, SftConfig, TrainConfig


def rows_are_never_stale(config: SftConfig) -> Iterator[str]:
    if stale := config.trainer.max_staleness:
        told = f"{stale}, but this command generates no answers that could be stale; leave it out"
        yield f"trainer: max_staleness: {told}"


def rows_have_others_to_mismatch(config: DpoConfig) -> Iterator[str]:
    if config.preference.loss == "kto" and config.data.rows_per_step < 2:
        yield (
            "preference: loss: kto estimates the KL from prompts with other rows' answers of the same step; "
            "give data.rows_per_step of 2 or more"
        )


def minibatches_share_prompts(config: TrainConfig) -> Iterator[str]:
    if config.data.prompts_per_step < config.algorithm.minibatches:
        prompts = f"data.prompts_per_step: {config.data.prompts_per_step}"
        yield f"algorithm: minibatches: {config.algorithm.minibatches} cannot share {prompts}; lower it"


def warmup_leaves_the_policy_steps(config: TrainConfig) -> Iterator[str]:
    if isinstance(config.algorithm, MayHaveCriticConfig) and config.trainer.steps:
        warmup, steps = config.algorithm.critic_warmup_steps, config.trainer.steps
        if warmup >= steps:
            yield f"algorithm: critic_warmup_steps: {warmup} leaves the policy none of trainer.steps: {steps}"


def refreshed_reference_has_weights(config: TrainConfig) -> Iterator[str]:
    if config.algorithm.kl.refresh_steps and config.model.lora:
        refused = "with model.lora the reference is the policy without adapters, which nothing changes"
        yield f"algorithm: kl.refresh_steps: {refused}, or leave it out"


def refresh_copies_weights(config: TrainConfig) -> Iterator[str]:
    if config.algorithm.kl.refresh_steps and config.training.type != "fsdp":
        refused = f"training.type: {config.training.type} cannot copy weights from the policy; use fsdp"
        yield f"algorithm: kl.refresh_steps: {refused}, or leave it out"


def refreshed_reference_is_near(config: TrainConfig) -> Iterator[str]:
    if config.algorithm.kl.refresh_steps and config.placement.apart("actor", "reference"):
        refused = "actor and reference are in different pools; place them in one"
        yield f"algorithm: kl.refresh_steps: {refused}, or leave it out"


def distributions_are_told(config: TrainConfig) -> Iterator[str]:
    if config.algorithm.top_tokens and config.training.type != "fsdp":
        told = f"training.type: {config.training.type} tells no distributions yet; use fsdp, or top_k: 0"
        yield f"algorithm: top_k: {told}"


def staleness_is_corrected(config: TrainConfig) -> Iterator[str]:
    mistakes = find_stale_mistakes(config.algorithm, config.trainer.max_staleness)
    yield from (f"algorithm: {mistake}" for mistake in mistakes)


def find_stale_mistakes(algorithm: PolicyGradientConfig, max_staleness: int) -> Iterator[str]:
    """Where tokens of older weights would be trained on as if they were of the newest."""
    if max_staleness == 0:
        return
    correction, loss = algorithm.rollout_correction, algorithm.loss
    engines = anchored_at_engine(algorithm, max_staleness)
    stale = f"trainer.max_staleness: {max_staleness}"
    mend = "set rollout_correction.type: truncate or mask"
    if correction.type == "none" and loss.divides_by == "nothing":
        yield (
            f"loss.type: {loss.type} has no ratio to the policy that sampled, so with {stale} nothing corrects for "
            f"answers of older weights; {mend}, or loss.type: clip"
        )
        return
    if correction.type == "none" and loss.divides_by == "old_policy" and not engines:
        yield (
            f"rollout_correction.skip_old_logprobs: false leaves nothing with {stale} that corrects for answers of "
            f"older weights; leave it out, or {mend}"
        )
    if algorithm.needs_trainer_logprobs and engines:
        mend = "set rollout_correction.skip_old_logprobs: false" if loss.divides_by == "engine" else mend
        yield (
            f"type: {algorithm.type} needs the log-probs of the weights before the step, and with {stale} the "
            f"engine's, of older weights, stand in for them; {mend}"
        )
