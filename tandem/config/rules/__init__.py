"""What the sections of a configuration must keep together, as a list of plain functions, by the command it is of.

A rule yields a sentence for each mistake: the key at fault, what is wrong, and a mend. It reads sections and no more
than a model's config.json, in the order in which it needs them: of a configuration with other mistakes it runs until
it reads what was refused (`found_by`), and the other rules go on. What one section alone shows to be impossible is a
`@rule` there; what takes other files, rows or packages to see is a check in `tandem/jobs/preflight/`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from tandem.config.rules import algorithm, engines, mixers, models, pictures, placement, ranks, validation
from tandem.config.tree import DpoConfig, ModelsConfig, RolloutConfig, RunConfig, SftConfig, TrainConfig, Tree
from tandem.config.valid_part import found_by

RULES: Mapping[type[Tree], tuple[Callable[[Any], Iterator[str]], ...]] = {
    SftConfig: (models.rows_train_one_model, algorithm.rows_are_never_stale),
    DpoConfig: (algorithm.rows_have_others_to_mismatch,),
    TrainConfig: (
        models.critic_is_trained,
        models.teacher_is_one,
        models.served_teacher_answers_at_1,
        algorithm.minibatches_share_prompts,
        algorithm.warmup_leaves_the_policy_steps,
        algorithm.refreshed_reference_has_weights,
        algorithm.refresh_copies_weights,
        algorithm.refreshed_reference_is_near,
        algorithm.distributions_are_told,
        algorithm.staleness_is_corrected,
    ),
    RolloutConfig: (
        models.judge_is_one,
        models.answers_fit_positions,
        validation.validation_has_room,
        placement.pools_count_processes,
        placement.pools_have_their_nodes,
        engines.judge_has_devices,
        engines.reward_model_leaves_weights,
        engines.engines_share_ranks,
        engines.weights_come_back,
        engines.quantization_is_said_once,
    ),
    RunConfig: (validation.validation_has_rows,),
    ModelsConfig: (
        pictures.pictures_run_so,
        pictures.readers_see_pictures,
        mixers.mixers_run_so,
        ranks.models_lie_on_ranks,
        ranks.megatron_has_it,
    ),
}
"""Kind of configuration -> the rules of all that are of it."""


def broken_rules(config: Tree, *, whole: bool = True) -> list[str]:
    """What is wrong with a configuration, or, where it is not `whole`, with the sound part of one that is not."""
    rules = (rule for kind, some in RULES.items() if isinstance(config, kind) for rule in some)
    return list(dict.fromkeys(told for rule in rules for told in found_by(partial(rule, config), whole)))
