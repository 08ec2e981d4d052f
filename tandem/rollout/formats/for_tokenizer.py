"""The Format of a tokenizer: its chat template, and what reads the calls that its model writes."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.errors import UserError
from tandem.files import load_named, users_traceback
from tandem.rollout.environment import Answer, ToolSchema
from tandem.rollout.formats.calls import FORMATS, written_by
from tandem.rollout.formats.calls.base import ReadsAnswer
from tandem.rollout.formats.calls.response_template import by_response_template
from tandem.rollout.formats.chat_template import template_of
from tandem.rollout.formats.template import TemplateFormat, Thinking


def make_format(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], calls: str = "auto", thinking: Thinking = "all"
) -> TemplateFormat:
    """`calls`: "auto" tells the format of calls by the chat template; or a name in FORMATS, or `path.py:function`.

    Raises UserError where there is no such format, and where the chat template can hold no conversation at all: neither
    with tools nor with a user who speaks again. `require_tools` and `require_users` refuse what a run needs of both.
    """
    made = TemplateFormat(tokenizer, stop_token_ids, _reader(calls, tokenizer), thinking)
    if made.refuses_tools and made.refuses_users:
        made.require_users()
    return made


def _reader(calls: str, tokenizer: PreTrainedTokenizerBase) -> ReadsAnswer | None:
    if calls == "auto":
        return _detected(tokenizer)
    if calls in FORMATS:
        return FORMATS[calls].read
    if ":" not in calls:
        known = ", ".join(["auto", *sorted(FORMATS)])
        raise UserError(
            f"conversation.calls {calls!r}: there is no such format; use one of {known}, or path.py:function"
        )
    function = load_named(calls, "conversation.calls")
    if not callable(function):
        raise UserError(f"conversation.calls {calls!r}: there is no function of that name")
    return _Own(calls, function)


def _detected(tokenizer: PreTrainedTokenizerBase) -> ReadsAnswer | None:
    """By the signs of a format in the chat template, else by the response template that the model comes with."""
    format = written_by(template_of(tokenizer))
    if format is not None:
        return format.read
    own = getattr(tokenizer, "response_template", None)
    return None if own is None else by_response_template(own)


class _Own:
    """A user's function that reads turns."""

    def __init__(self, name: str, function: Any) -> None:
        self._name, self._function = name, function

    def __call__(self, text: str, tools: Sequence[ToolSchema], /) -> Answer:
        try:
            answer = self._function(text, tools)
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"conversation.calls {self._name!r} failed:\n{users_traceback(error, __file__)}") from error
        if not isinstance(answer, Answer):
            raise UserError(f"conversation.calls {self._name!r} returned {type(answer).__name__}; return an Answer")
        return answer
