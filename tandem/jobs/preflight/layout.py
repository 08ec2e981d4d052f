"""Ranks: do models and engines fit on as many as there are, and does what they are asked to do fit together?"""

from collections.abc import Iterator
from typing import Any

from tandem.config.cluster import RoleName
from tandem.config.ranks import find_engine_mistakes, find_fsdp_mistakes
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
    if training.type == "megatron" and model.lora is not None:
        yield "model.lora: adapters are of training.type: fsdp; take that, or train the whole model"
    yield from _find_optimizer_mistakes(config)
    if training.type == "megatron" and training.router_replay:
        yield (
            "training.router_replay: no generation.type returns which experts it chose for a token; leave it out "
            "(an engine of your own that fills Completion.experts can be replayed from Python)"
        )
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


def _find_optimizer_mistakes(config: Any) -> Iterator[str]:
    chosen = {"training.optimizer": config.training.optimizer}
    if has_critic(config):
        chosen["algorithm.critic_optimizer"] = config.algorithm.critic_optimizer
    for key, optimizer in chosen.items():
        if config.training.type == "megatron" and optimizer.type != "adamw":
            yield f"{key}.type: {optimizer.type} is of training.type: fsdp; Megatron-Core's optimizer is adamw"


def find_generation_mistakes(config: Any) -> Iterator[str]:
    """Where engines in processes of their own cannot share the devices."""
    if not isinstance(config, RolloutConfig) or config.generation.type == "native":
        return
    yield from find_engine_mistakes(config)
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
