"""Data row -> what the policy is asked first in a conversation, as far as that is known before one is held.

    the row's messages, the tools' descriptions --Format.open--> token ids, which `data.max_prompt_tokens` bounds

What an environment says by itself, and the tools of an MCP server, are known when they are opened: the row's part of
the opening is measured before the run, and `jobs/room.py` watches the rest.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from tandem.config.conversation import (
    ConversationConfig,
    EndpointEnvironmentConfig,
    OwnEnvironmentConfig,
    ToolsEnvironmentConfig,
)
from tandem.config.model import ModelConfig
from tandem.data.chat import TooLong, refuse_long
from tandem.data.dataset import Opened
from tandem.data.rows import BadRow
from tandem.errors import UserError
from tandem.models.loading import stop_token_ids
from tandem.models.rendering import TemplateExceedsLimits
from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.rollout.conversation_images import stored, with_all_tokens
from tandem.rollout.environment import ToolSchema
from tandem.rollout.environments.tools import as_messages
from tandem.rollout.formats.calls.base import read_text
from tandem.rollout.formats.stand_in import ASKED
from tandem.rollout.formats.template import TemplateFormat
from tandem.types import Message


@dataclass(frozen=True)
class Openings:
    """The openings of a run's rows. It is sent to processes that read rows."""

    chat_format: TemplateFormat
    tools: tuple[ToolSchema, ...]
    """Those that are known."""
    pictures: ModelPictures | None
    """Of a model that sees them."""
    made_of: str
    """All that an opening depends on besides the row and the tokenizer, as text."""

    def open(self, prompt: str | Sequence[Message], most_tokens: int) -> Opened:
        """What is asked on a row whose column `prompt` this is. Raises BadRow, and TooLong where there are sure to be
        more than `most_tokens`, before all of them are counted."""
        try:
            messages = stored(as_messages(prompt), self.pictures)
            text, word = self.chat_format.written(messages, self.tools)
            limit = most_tokens + self._usual_tools_tokens  # they are no reason not to count the row's
            refuse_long(text, limit, lambda part: len(self.chat_format.encode(part, word)))
            ids, pictures = with_all_tokens(self.chat_format.encode(text, word), messages, self.pictures)
            of_tools = self._tools_tokens(messages) if len(ids) > most_tokens else 0
        except TooLong as error:
            raise TooLong(error.tokens, self._usual_tools_tokens) from None
        except TemplateExceedsLimits:
            raise
        except (UserError, BadPicture) as error:
            raise BadRow(str(error)) from error
        return Opened(self.chat_format.text(ids.tolist()), ids, pictures, of_tools)

    @cached_property
    def _usual_tools_tokens(self) -> int:
        return self._tools_tokens(ASKED)

    def _tools_tokens(self, messages: Sequence[Message]) -> int:
        """By how many tokens the tools make an opening longer."""
        if not self.tools:
            return 0
        return len(self.chat_format.open(messages, self.tools)) - len(self.chat_format.open(messages, ()))


def make_openings(
    config: ConversationConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, pictures: ModelPictures
) -> Openings | None:
    """None where nothing of an opening is known: an agent program and a class of the user's own say what they like.
    Raises UserError where a tool is not there, or the chat template can hold no conversation."""
    environment = config.environment
    if isinstance(environment, EndpointEnvironmentConfig | OwnEnvironmentConfig):
        return None
    tools: list[ToolSchema] = []
    if isinstance(environment, ToolsEnvironmentConfig):
        from tandem.rollout.make import known_schemas  # the processes that read rows have no use for it

        tools = known_schemas(environment)
    # Nothing is read of answers here, so that the format of calls does not matter.
    tokens = TemplateFormat(tokenizer, stop_token_ids(model, tokenizer), read_text)
    seen = pictures if pictures.format is not None else None
    return Openings(tokens, tuple(tools), seen, json.dumps(tools, sort_keys=True, default=str))


def unknown_part(config: ConversationConfig) -> str | None:
    """What of openings is known only when a conversation is held, in words; None where nothing is. Raises UserError
    where a tool is not there."""
    environment = config.environment
    if isinstance(environment, EndpointEnvironmentConfig):
        return "an agent program says itself what the policy is asked"
    if isinstance(environment, OwnEnvironmentConfig):
        return f"{environment.environment} says itself what the policy is asked, and which tools it has"
    if not isinstance(environment, ToolsEnvironmentConfig):
        return f"the environment ({environment.type}) adds its first observation"
    from tandem.rollout.make import unknown_of_tools  # as above

    return "; ".join(unknown_of_tools(environment)) or None
