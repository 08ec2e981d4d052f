"""What planning asks of a configuration, of whichever command."""

from tandem.config.cluster import RoleName
from tandem.config.model import LoraConfig
from tandem.config.tree import RewardModelConfig, SftConfig, TrainConfig

Planned = TrainConfig | SftConfig
"""The configurations whose memory is known: of `tandem train`, `sft`, `dpo` and `reward-model`."""


def longest_row(config: Planned) -> int:
    if isinstance(config, SftConfig):
        return config.data.max_tokens + isinstance(config, RewardModelConfig)  # the token whose value is the score
    return config.data.max_prompt_tokens + config.generation.max_response_tokens


def learning_roles(config: Planned) -> tuple[RoleName, ...]:
    return ("reward_model",) if isinstance(config, RewardModelConfig) else ("actor", "critic")


def adapters_of(config: Planned, role: str) -> LoraConfig | None:
    """Those that a role learns in the place of its weights."""
    if role not in learning_roles(config):
        return None
    return config.model.critic_lora if role == "critic" else config.model.lora


def item_bytes(config: Planned) -> int:
    return 4 if config.model.dtype == "float32" else 2
