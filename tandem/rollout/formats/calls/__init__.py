"""How models write calls of tools: one reader a format, by the name that `conversation.calls` takes."""

from tandem.rollout.formats.calls.base import ReadsAnswer
from tandem.rollout.formats.calls.hermes import read_hermes

READERS: dict[str, ReadsAnswer] = {"hermes": read_hermes}


def written_by(template: str) -> str | None:
    """The name of the format in which a chat template writes calls, None where it is none of those."""
    return "hermes" if "<tool_call>" in template and '"arguments"' in template else None
