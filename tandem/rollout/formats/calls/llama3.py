"""`{"name": …, "parameters": {…}}`, several with `;` between them, or behind `<|python_tag|>`: Llama 3.1 to 3.3."""

import re
from collections.abc import Sequence

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, broken, call_of, json_at

_TAG = "<|python_tag|>"
_CALL = re.compile(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?(?:name|function)"\s*:\s*"')

_NEXT = re.compile(";\\s*(?=" + _CALL.pattern + ")")
_BETWEEN = "; \n"


def read_llama3(text: str, tools: Sequence[ToolSchema]) -> Answer:
    del tools  # JSON carries types
    head, tagged, rest = text.partition(_TAG)
    if tagged and not _CALL.match(rest.lstrip()):
        return Answer(text.strip(), broken=(broken(BrokenCall(f"no JSON follows {_TAG}"), rest),))
    text = head + rest
    said, calls, failures = "", list[ToolCall](), list[str]()
    while found := _CALL.search(text):
        said, text = said + text[: found.start()], text[found.start() :]
        after = None
        try:
            value, after = json_at(text)
            calls.append(call_of(value, "arguments" if "arguments" in value else "parameters"))
        except BrokenCall as error:
            if after is None:
                following = _NEXT.search(text)
                after = text[following.start() :] if following else ""
            failed = text[: len(text) - len(after)]
            failures.append(broken(error, failed))
            said += failed
        text = after.lstrip(_BETWEEN)
    return Answer((said + text).strip(), tuple(calls), None, tuple(failures))
