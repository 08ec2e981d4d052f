"""What conversations name: environments, tools, users and agents. Are they there, and what they must be?"""

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.config.conversation import EndpointEnvironmentConfig, ScriptedUserConfig, ToolsEnvironmentConfig
from tandem.config.tree import RolloutConfig
from tandem.errors import UserError
from tandem.jobs.preflight.data import FirstRows


def find_environment_mistakes(config: Any) -> Iterator[str]:
    """It imports the modules of tools, environments and agents, and opens nothing."""
    conversation = config.conversation if isinstance(config, RolloutConfig) else None
    if conversation is None:
        return
    from tandem.rollout.make import make_agent, make_environments

    try:
        if isinstance(conversation.environment, EndpointEnvironmentConfig):
            make_agent(conversation.environment)
        else:
            make_environments(conversation.environment)
    except UserError as error:
        yield str(error) if "conversation." in str(error) else f"conversation.environment: {error}"


def find_user_mistakes(config: Any, first_rows: Mapping[str, FirstRows]) -> Iterator[str]:
    """The first row in which a scripted user finds no words."""
    conversation = config.conversation if isinstance(config, RolloutConfig) else None
    environment = conversation and conversation.environment
    if not isinstance(environment, ToolsEnvironmentConfig) or not isinstance(environment.user, ScriptedUserConfig):
        return
    column = environment.user.column
    for key, rows in first_rows.items():
        for number, row in enumerate(rows.usable):
            words = row.get(column)
            if not isinstance(words, list) or not all(isinstance(text, str) for text in words):
                what = "is missing" if words is None else "is no list of strings"
                yield (
                    f"conversation.environment.user.column: {key}, row {number}: column `{column}` {what}; it must "
                    f"list what the user says after each answer (the row has {', '.join(row)})"
                )
                return
