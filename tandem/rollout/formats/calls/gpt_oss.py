"""Messages on channels: gpt-oss.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME json<|message|>{…}

What is on the channel `analysis` is thought, what has a recipient is a call, all else is said.
"""

import re
from collections.abc import Iterator, Sequence

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, CallFormat, broken, call_of, whole_json

_START = "<|start|>"
_END = re.compile(r"<\|(?:end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BEGUN = re.compile(r"(?:<\|channel\|>\s*\w+\s+to=\S+|^\s*to=\S+<\|channel\|>).*", re.DOTALL)
"""The header of a call, where no message follows."""


def read_gpt_oss(text: str, tools: Sequence[ToolSchema]) -> Answer:
    del tools  # JSON carries types, and the header marks a call, whatever its name
    thoughts, said, calls, failures = list[str](), list[str](), list[ToolCall](), list[str]()
    for header, body in _messages(text):
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if not header and (begun := _BEGUN.search(body)):
            failures.append(broken(BrokenCall("it ends before its arguments"), begun[0]))
            said.append(body)
        elif recipient:
            try:
                calls.append(_call(recipient[1], body))
            except BrokenCall as error:
                failures.append(broken(error, f"{recipient[0]} {body}"))
                said.append(f"{header.removeprefix('assistant')}<|message|>{body}")
        elif channel and channel[1] == "analysis":
            thoughts.append(body)
        else:
            said.append(body)
    reasoning = "\n".join(thoughts) if thoughts else None
    return Answer("\n".join(said).strip(), tuple(calls), reasoning, tuple(failures))


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """Header and body of each. What has no header is said on no channel."""
    while text:
        header, found, rest = text.partition("<|message|>")
        if not found:
            header, rest = "", text
        end = _END.search(rest)
        body, text = (rest[: end.start()], rest[end.end() :]) if end else (rest, "")
        yield header.removeprefix(_START), body


def _call(recipient: str, body: str) -> ToolCall:
    if not body.strip():
        raise BrokenCall("it ends before its arguments")
    return call_of({"name": recipient.removeprefix("functions."), "arguments": whole_json(body, "its JSON is")})


GPT_OSS = CallFormat("gpt_oss", read_gpt_oss, ("<|channel|>", "<|start|>assistant"))
