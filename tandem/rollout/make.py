"""The environments that a configuration names."""

from collections.abc import Iterator
from typing import Any

from tandem.config.conversation import (
    EndpointEnvironmentConfig,
    OwnEnvironmentConfig,
    ScriptedUserConfig,
    SteppedEnvironmentConfig,
    ToolsEnvironmentConfig,
    UserConfig,
    VerlUserConfig,
)
from tandem.config.ecosystem import HostedConfig, OpenEnvConfig
from tandem.config.tools import ToolConfig
from tandem.pictures.shown import ModelPictures
from tandem.rollout.agents import Agent, CommandAgent, FunctionAgent
from tandem.rollout.environment import Environments, ToolSchema
from tandem.rollout.environments.hosted import HostedEnvironments
from tandem.rollout.environments.openenv import OpenEnvEnvironments
from tandem.rollout.environments.own_environment import OwnEnvironments
from tandem.rollout.environments.tools import ToolEnvironments
from tandem.rollout.tools.base import CallLimits, MakesTools, ToolSet
from tandem.rollout.tools.builtin.function import FunctionToolConfig
from tandem.rollout.tools.calls import Toolbox
from tandem.rollout.tools.function_tools import ClassTools
from tandem.rollout.users.base import Users
from tandem.rollout.users.model_user import ModelUsers
from tandem.rollout.users.scripted import ScriptedUsers
from tandem.rollout.users.verl_users import VerlUsers


def make_environments(config: SteppedEnvironmentConfig, pictures: ModelPictures | None = None) -> Environments:
    """Nothing is opened yet. `pictures`: of a model that sees them. Raises UserError where something that is named is
    not there, or is not what it must be."""
    if isinstance(config, OwnEnvironmentConfig):
        return OwnEnvironments(config)
    if isinstance(config, HostedConfig):
        return HostedEnvironments(config)
    if isinstance(config, OpenEnvConfig):
        return OpenEnvEnvironments(config)
    toolbox = Toolbox(_tool_sets(config), config.limits, pictures)
    return ToolEnvironments(toolbox, None if config.user is None else make_users(config.user))


def known_schemas(config: ToolsEnvironmentConfig) -> list[ToolSchema]:
    """Of the tools whose descriptions are known before anything is opened: all but those of MCP servers. Raises
    UserError as above."""
    return [schema for tools in _tool_sets(config) for schema in tools.schemas]


def unknown_of_tools(config: ToolsEnvironmentConfig) -> Iterator[str]:
    """A clause for each thing that tools add, when they are opened, to what the policy is asked first. Raises UserError
    as above."""
    sets = _tool_sets(config)
    if any(not tools.schemas for tools in sets):  # those of MCP servers tell them when they are opened
        yield "the tools of MCP servers are added"
    if any(isinstance(tools, ClassTools) and tools.resets for tools in sets):
        yield "what the reset of a tool returns ends the last message"


def _tool_sets(config: ToolsEnvironmentConfig) -> list[ToolSet]:
    limits = CallLimits(config.limits.calls_at_once, config.limits.timeout_s)
    return [tools for tool in config.tools for tools in make_tools(tool, limits, config.limits.result_characters)]


def make_tools(config: ToolConfig, limits: CallLimits, result_characters: int) -> list[ToolSet]:
    """Raises UserError as above."""
    section: Any = FunctionToolConfig(function=config) if isinstance(config, str) else config
    made: MakesTools = section
    return made.tool_sets(limits, result_characters)


def make_users(config: UserConfig) -> Users:
    """Raises UserError as above."""
    if isinstance(config, ScriptedUserConfig):
        return ScriptedUsers(config)
    if isinstance(config, VerlUserConfig):
        return VerlUsers(config)
    return ModelUsers(config)


def make_agent(config: EndpointEnvironmentConfig) -> Agent:
    """Raises UserError where the function or the program is not there."""
    if config.function is not None:
        return FunctionAgent(config.function, "conversation.environment.function")
    assert config.command is not None
    return CommandAgent(config.command)
