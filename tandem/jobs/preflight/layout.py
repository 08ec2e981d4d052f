"""Ranks: do models and engines fit on as many as there are, and does what they are asked to do fit together?"""

from collections.abc import Iterator
from typing import Any

from tandem.config.cluster import RoleName
from tandem.config.ranks import find_engine_mistakes, find_fsdp_mistakes, find_megatron_option_mistakes
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import EvalConfig, RolloutConfig, TrainConfig, has_critic
from tandem.errors import UserError
from tandem.jobs.preflight.models import text_config
from tandem.models.families import sees_pictures
from tandem.training.megatron.degrees import check_degrees


def training_roles(config: Any) -> list[RoleName]:
    """The roles whose models are on the training engine, as far as the configuration shows it."""
    if not isinstance(config, RolloutConfig):
        return ["actor"]
    scores: list[RoleName] = ["reward_model"] if config.model.reward_model_path is not None else []
    if isinstance(config, EvalConfig):
        return scores
    assert isinstance(config, TrainConfig)
    critic: list[RoleName] = ["critic"] if has_critic(config) else []
    reference: list[RoleName] = ["reference"] if config.algorithm.kl.place != "none" else []
    teacher: list[RoleName] = ["teacher"] if config.model.teacher_path is not None else []
    return ["actor", *critic, *reference, *teacher, *scores]


def find_training_mistakes(config: Any) -> Iterator[str]:
    """Where models cannot lie on the ranks of their roles."""
    training, model = config.training, config.model
    if training.type == "megatron" and sees_pictures(model.path):
        return  # find_picture_mistakes reports it
    yield from find_megatron_option_mistakes(config)
    paths = {"critic": model.critic_path, "teacher": model.teacher_path, "reward_model": model.reward_model_path}
    reported: set[str] = set()
    for role in training_roles(config):
        path, ranks = paths.get(role) or model.path, sum(config.nodes_of(role))
        if isinstance(training, FsdpTrainingConfig):
            heads = text_config(path).get("num_attention_heads")
            problems = list(find_fsdp_mistakes(training, heads if isinstance(heads, int) else None, ranks))
        else:
            problems = _find_megatron_mistakes(training, path, ranks)
        yield from (problem for problem in problems if problem not in reported)
        reported.update(problems)


def find_generation_mistakes(config: Any) -> Iterator[str]:
    """Where engines in processes of their own cannot share the devices."""
    if not isinstance(config, RolloutConfig) or config.generation.type == "native":
        return
    yield from find_engine_mistakes(config, sees_pictures(config.model.path))
    generation = config.generation
    if generation.type == "vllm" and generation.quantization is not None:
        twice = [key for key in ("quantization", "quantization_config", "dtype") if key in generation.engine_args]
        if twice:
            yield (
                f"generation.engine_args.{twice[0]}: generation.quantization: {generation.quantization} says it, too; "
                "leave one of them out"
            )


def _find_megatron_mistakes(training: Any, path: Any, ranks: int) -> list[str]:
    try:
        if (path / "config.json").is_file():
            check_degrees(path, training, ranks)
    except UserError as error:
        return [str(error)]
    return []
