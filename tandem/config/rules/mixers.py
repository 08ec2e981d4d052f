"""What does not run yet with a model whose layers carry a state from token to token; docs/models.md lists it."""

from collections.abc import Iterator

from tandem.config.roles import model_roles
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import ModelsConfig, TrainConfig
from tandem.model_files import carries_state, known_config


def mixers_run_so(config: ModelsConfig) -> Iterator[str]:
    """Of Megatron-Core, whose families are named, `models_lie_on_ranks` tells it."""
    training = config.training
    engine = config.generation.type if isinstance(config, TrainConfig) else "native"
    if engine in ("vllm", "sglang") and carries_state(config.model.path):
        yield (
            f"generation.type: layers of {config.model.path} carry a state from token to token, and no weights have "
            f"been published into {engine} with such yet; take generation.type=native"
        )
    if not isinstance(training, FsdpTrainingConfig):
        return
    for _, path in model_roles(config):
        if carries_state(path):
            family = known_config(path).get("model_type")
            carried = f"layers of {path} ({family}) carry a state from token to token"
            if training.context_parallel > 1:
                yield f"training.context_parallel: {carried}, which ranks do not hand on to one another; leave it out"
            if training.compile:
                yield f"training.compile: {carried}, and are not compiled; leave it out"
