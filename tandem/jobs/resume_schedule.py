"""What another length of a run means for its learning rates."""

from collections.abc import Iterator

from tandem.config.algorithms import MayHaveCriticConfig
from tandem.config.optimizer import OptimizerConfig
from tandem.config.tree import SftConfig, TrainConfig
from tandem.training.optimizer import learning_rate


def schedule_changes(config: TrainConfig | SftConfig, step: int, before: int, now: int) -> Iterator[str]:
    """A line for each schedule that depends on the length of a run, which was `before` steps and is `now`.

    `step` is the last one that was made. A schedule is a function of the optimizer step and of their number, so it is
    that of the new length from here on.
    """
    if before == now:
        return
    each = config.algorithm.epochs * config.algorithm.minibatches if isinstance(config, TrainConfig) else 1
    for key, optimizer, rests in _optimizers(config):
        if optimizer.schedule != "constant" and step < now:
            at = max(0, step - rests)
            old, new = (learning_rate(optimizer, at * each, (total - rests) * each) for total in (before, now))
            yield (
                f"{key}.schedule: {optimizer.schedule} ends at step {now}, not {before}: the next learning rate is "
                f"{new:.3g}, not {old:.3g}"
            )


def _optimizers(config: TrainConfig | SftConfig) -> Iterator[tuple[str, OptimizerConfig, int]]:
    """With the number of the run's first steps that the model does not learn in."""
    rests = config.critic_warmup_steps if isinstance(config, TrainConfig) else 0
    yield "training.optimizer", config.training.optimizer, rests
    if isinstance(config, TrainConfig) and isinstance(config.algorithm, MayHaveCriticConfig):
        yield "algorithm.critic_optimizer", config.algorithm.critic_optimizer, 0
