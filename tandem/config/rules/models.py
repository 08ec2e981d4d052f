"""Which models a configuration names, and whether what it asks of them fits them."""

from collections.abc import Iterator, Mapping

from tandem.config.algorithms import MayHaveCriticConfig, OwnAlgorithmConfig
from tandem.config.tree import RolloutConfig, SftConfig, TrainConfig
from tandem.model_files import text_config

_OF_TRAIN: Mapping[str, str] = {
    "critic_path": "trains no critic",
    "teacher_path": "learns from no teacher",
    "reward_model_path": "scores nothing with a reward model",
    "judge_path": "asks no judge",
}
"""Models of `tandem train` -> why a command that trains on rows reads none."""


def rows_train_one_model(config: SftConfig) -> Iterator[str]:
    if config.model.critic_lora:
        mend = "leave it out (adapters of its model are model.lora)"
        yield f"model: critic_lora: this command trains no critic; {mend}"
    for name, use in _OF_TRAIN.items():
        if getattr(config.model, name):
            yield f"model: {name}: this command {use}; leave it out, or take tandem train (its model is model.path)"


def critic_is_trained(config: TrainConfig) -> Iterator[str]:
    if isinstance(config.algorithm, MayHaveCriticConfig):
        return
    if config.model.critic_path:
        yield f"algorithm: {config.algorithm.type} has no critic; remove model.critic_path or use algorithm.type: ppo"
    if config.model.critic_lora:
        yield f"algorithm: {config.algorithm.type} has no critic; remove model.critic_lora or use algorithm.type: ppo"


def teacher_is_one(config: TrainConfig) -> Iterator[str]:
    algorithm, path = config.algorithm, config.model.teacher_path
    if isinstance(algorithm, OwnAlgorithmConfig):
        return
    served = algorithm.served_teacher
    if algorithm.has_teacher and served is None and path is None:
        yield (
            f"algorithm: {algorithm.type} learns from a teacher; give its directory as model.teacher_path, or the "
            "section algorithm.teacher of a served one"
        )
    if served is not None and path:
        yield "algorithm: teacher: model.teacher_path is another one; give one of them"
    if not algorithm.has_teacher and path:
        mend = "remove model.teacher_path or use algorithm.type: on_policy_distillation"
        yield f"algorithm: {algorithm.type} has no teacher; {mend}"


def served_teacher_answers_at_1(config: TrainConfig) -> Iterator[str]:
    if config.algorithm.served_teacher is not None and config.generation.temperature != 1:
        yield (
            "algorithm: teacher: servers tell log-probs at temperature 1, and the student's would be at "
            f"generation.temperature: {config.generation.temperature:g}; give 1, or a model.teacher_path"
        )


def judge_is_one(config: RolloutConfig) -> Iterator[str]:
    judge = config.reward.judge
    if judge is None:
        return
    if judge.url is not None and config.model.judge_path is not None:
        yield f"reward: judge.url: {judge.url}, but model.judge_path is a judge, too; give one of them"
    if judge.url is None and config.model.judge_path is None:
        yield "reward: judge: there is none; give its directory as model.judge_path, or a url"


def answers_fit_positions(config: RolloutConfig) -> Iterator[str]:
    """Prompt and response must fit the positions that the model knows."""
    positions = text_config(config.model.path).get("max_position_embeddings")
    prompt, response = config.data.max_prompt_tokens, config.generation.max_response_tokens
    if isinstance(positions, int) and prompt + response > positions:
        yield (
            f"data.max_prompt_tokens: {prompt} + generation.max_response_tokens: {response} = {prompt + response} "
            f"tokens, but {config.model.path} knows only {positions} positions (max_position_embeddings); lower one"
        )
