"""How models write calls of tools, one format a file: `conversation.calls` may name every CallFormat of this folder."""

from tandem.discovery import modules_in
from tandem.rollout.formats.calls.base import CallFormat

FORMATS = {
    one.name: one for module in modules_in(__name__) for one in vars(module).values() if isinstance(one, CallFormat)
}


def written_by(template: str) -> CallFormat | None:
    """The format in which a chat template writes calls, None where it is none of those."""
    fitting = [one for one in FORMATS.values() if all(sign in template for sign in one.signs)]
    return min(fitting, key=lambda one: one.is_general, default=None)
