"""The tools that the policy may call, `conversation.environment.tools`: of any kind, or a function by its reference."""

from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Tag

from tandem.config.base import Section
from tandem.config.paths import absolute_reference
from tandem.config.sections import FoundIn, of_usual_type


class ToolsConfig(Section):
    """Tools that come from one place. The kinds are in tandem/rollout/tools/builtin, one a file."""

    type: Any


def _form(tool: object) -> str:
    return "reference" if isinstance(tool, str) else "built_in"


def _written_short(tool: str) -> str:
    """A reference, or the path of a verl file."""
    if tool.endswith((".yaml", ".yml")):
        raise ValueError(f"write a file of verl's tools as {{type: verl, path: {tool}}}")
    return absolute_reference(tool)


ToolConfig = Annotated[
    Annotated[ToolsConfig, FoundIn("tandem.rollout.tools.builtin"), Tag("built_in")]
    | Annotated[Annotated[str, AfterValidator(_written_short)], Tag("reference")],
    Discriminator(_form),
    of_usual_type("function"),
]
