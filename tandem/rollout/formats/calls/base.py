"""The seam: the text of a policy's turn -> what it says. And what the readers share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tandem.rollout.environment import Answer, ToolCall, ToolSchema

ARGUMENT_KEYS = ("arguments", "parameters", "args")
"""Where a call in JSON has its arguments; models write each of them, whatever their format says."""
_OTHER_KEYS = ("id", "call_id", "tool_call_id", "type", "index")
"""What a call may have beside them, and nobody asks for but for `id`."""
_SHOWN = 200
"""Characters of a broken call that are said back to the policy."""


class ReadsAnswer(Protocol):
    """Reads one turn: its text without the stop token, control tokens spelled out, and begun with the tag that opens a
    thought where the prompt ends in it.

    Calls come in the order in which they are written, with the id "" where the policy gives none. A call that cannot be
    read is a sentence in `Answer.broken`, and hides no other; its text stays in the content, for it may be rendered
    again, and the policy is then shown what it wrote. A call inside a thought is none.
    """

    def __call__(self, text: str, tools: Sequence[ToolSchema], /) -> Answer: ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls of tools. Every one in this folder is found."""

    name: str
    """What `conversation.calls` calls it."""
    read: ReadsAnswer
    signs: tuple[str, ...]
    """What the chat templates of the format all write."""
    is_general: bool = False
    """Other formats' templates may hold its signs, too: it is meant where no other format is."""


class BrokenCall(ValueError):
    """A call that cannot be read; the message says why."""


def split_thinking(text: str, call: str, tags: tuple[str, str] = ("<think>", "</think>")) -> tuple[str | None, str]:
    """What was thought, and the rest of `text`. A thought that is not closed lasts to the end.

    The closing tag alone ends a thought too, as models write it whose prompt opens one; not behind `call`, which
    begins a call: there it is part of an argument.
    """
    opening, closing = tags
    thoughts, said = [], ""
    head, closed, rest = text.partition(closing)
    if closed and opening not in head and call not in head:
        thoughts, text = [head], rest
    while opening in text.partition(call)[0]:
        before, _, inside = text.partition(opening)
        thought, _, text = inside.partition(closing)
        thoughts.append(thought)
        said += before
    return "\n".join(thought.strip("\n") for thought in thoughts) if thoughts else None, said + text


def joined_thinking(first: str | None, later: str | None) -> str | None:
    """What was thought before a call, and behind it."""
    return later if first is None else first if later is None else f"{first}\n{later}"


def read_text(text: str, tools: Sequence[ToolSchema]) -> Answer:
    """What a model says that calls nothing, or of which nobody knows how it does."""
    del tools
    reasoning, text = split_thinking(text, "\0")
    return Answer(text.strip(), reasoning=reasoning)


def json_at(text: str) -> tuple[Any, str]:
    """The JSON value that `text` begins with, and what follows it. Raises BrokenCall."""
    try:
        text = text.lstrip()
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise BrokenCall(f"its JSON cannot be read: {error}") from error
    return value, text[end:]


def whole_json(text: str, what: str) -> Any:
    """The JSON value that all of `text` is. Raises BrokenCall, which says `what` it is."""
    value, rest = json_at(text)
    if rest.strip():
        raise BrokenCall(f"{what} followed by {rest.strip()[:40]!r}")
    return value


def call_of(value: Any) -> ToolCall:
    """A call from {name, arguments}, or from {function: {name, arguments}} as OpenAI's interface has it.

    Raises BrokenCall, also where something of it would be lost: under a key that has no meaning, or under two keys of
    ARGUMENT_KEYS.
    """
    given = _flat(value)
    name = given.pop("name", None) or given.pop("function", None)
    if not isinstance(name, str):
        raise BrokenCall("it has no name of a tool")
    filled = [key for key in ARGUMENT_KEYS if given.get(key) not in (None, "", {})]
    if len(filled) > 1:
        raise BrokenCall(f"its arguments stand under {' and '.join(filled)}; one of them is enough")
    if lost := sorted(given.keys() - {*ARGUMENT_KEYS, *_OTHER_KEYS}):
        raise BrokenCall(f"it has {', '.join(map(repr, lost))} beside its name; arguments stand inside of 'arguments'")
    return ToolCall(str(given.get("id") or ""), name, _object(given[filled[0]], filled[0]) if filled else {})


def _flat(value: Any) -> dict[str, Any]:
    """The keys of a call, those of an object under `function` among them. Raises BrokenCall."""
    if not isinstance(value, dict):
        raise BrokenCall("it has no name of a tool")
    inner = value.get("function")
    if not isinstance(inner, dict):
        return {**value}
    outer = {key: item for key, item in value.items() if key != "function"}
    if twice := sorted(outer.keys() & inner.keys()):
        raise BrokenCall(f"it has {', '.join(map(repr, twice))} inside and outside of 'function'")
    return outer | inner


def _object(given: Any, key: str) -> dict[str, Any]:
    """Arguments, which may be JSON in a text. Raises BrokenCall."""
    if isinstance(given, str):
        given = whole_json(given, f"its {key} are") if given.strip() else {}
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BrokenCall(f"its {key} are no JSON object")
    return given


def broken(error: BrokenCall, text: str) -> str:
    """The sentence about a call that cannot be read."""
    text = text.strip()
    return f"This call of a tool was not run, {error}: {text[:_SHOWN]}{'…' * (len(text) > _SHOWN)}"


def without_bad_json(answer: Answer) -> Answer:
    """The same, with calls broken that hold what no tool, template or file could be given: half a surrogate pair, a
    number beyond all floats."""
    calls, failures = list[ToolCall](), list(answer.broken)
    for call in answer.tool_calls:
        try:
            json.dumps([call.id, call.name, dict(call.arguments)], ensure_ascii=False, allow_nan=False).encode()
            calls.append(call)
        except UnicodeEncodeError:
            failures.append(broken(BrokenCall("it has half a surrogate pair, which is no text"), ascii(call.name)))
        except (TypeError, ValueError, RecursionError) as error:
            failures.append(broken(BrokenCall(f"it has what JSON has not: {error}"), ascii(call.name)))
    return replace(answer, tool_calls=tuple(calls), broken=tuple(failures))


def cut(text: str, opening: str, closing: str) -> tuple[str, str]:
    """A broken call with its closing tag, or up to the next call's opening one, and what follows it."""
    ends = [place for place in (text.find(closing), text.find(opening)) if place >= 0]
    end = min(ends, default=len(text))
    end += len(closing) if text.startswith(closing, end) else 0
    return text[:end], text[end:]


def unread(block: str, broken_calls: Sequence[str], read: int) -> str:
    """What stays text of a block of calls: the broken ones, with all that is around them where none was `read`."""
    return block if broken_calls and not read else "".join(broken_calls)


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in made if keys.count(key) > 1)!r} stands twice in an object")
    return made


_DECODER = json.JSONDecoder(parse_constant=_no_number, object_pairs_hook=_once, strict=False)
"""Line feeds within a text may stand as they are."""
