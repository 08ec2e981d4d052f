"""Control tokens come from the chat template alone: text that spells one is encoded as the letters it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.rollout.environment import ToolSchema
from tandem.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUSTED_ROLES = ("system", "developer", "assistant")
"""The operator's messages and the policy's may hold tags such as `<think>`, which templates look for in them."""


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that some models read as control tokens, although neither they are special nor their templates write them."""


class ControlTokens:
    """The tokens of one tokenizer that no text of a message may become: the special ones, and tags, which are TAGS and
    what the chat template writes. Other added tokens, such as Gemma's `<table>`, are ordinary text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._tokenizer = tokenizer
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        tags = {token.content for token in added if token.content in template or token.content in TAGS}
        self._names = sorted(special | tags, key=lambda name: (-len(name), name))
        self._number = {name: number for number, name in enumerate(self._names)}
        self._every, self._special = _any_of(self._names), _any_of([name for name in self._names if name in special])

    def hide(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], word: str
    ) -> tuple[list[Message], list[Any]]:
        """The same with a placeholder made of `word`, which occurs in none of them, for each control token that a
        string in them spells, and "?" for half a surrogate pair; what a template makes of it is text for `encode`."""

        def hidden(message: Message) -> Message:
            names = self._of(message)
            replaced = _mapped(dict(message), lambda text: self._replaced(text, names, word))
            return replaced | {"role": message["role"]}

        everywhere = [_mapped(tool, lambda text: self._replaced(text, self._every, word)) for tool in tools]
        return [hidden(message) for message in messages], everywhere

    def spelled(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[str]:
        """The control tokens that `hide` would hide, each once."""
        found = [name for message in messages for text in strings(message) for name in self._of(message).findall(text)]
        found += [name for text in strings(tools) for name in self._every.findall(text)]
        return list(dict.fromkeys(found))

    def _of(self, message: Message) -> re.Pattern[str]:
        """What text of a message must not become."""
        return self._special if message["role"] in TRUSTED_ROLES else self._every

    def encode(self, text: str, word: str) -> list[int]:
        """Token ids of `text`, whose placeholders made of `word` become letters: each is cut after its first one."""
        first, *rest = re.split(f"{word}([0-9]+)v", text)
        pieces = [first]
        for number, following in zip(rest[::2], rest[1::2], strict=True):
            name = self._names[int(number)]
            pieces[-1] += name[:1]
            pieces.append(name[1:] + following)
        return [token for piece in pieces for token in self._encoded(piece)]

    def _encoded(self, piece: str) -> list[int]:
        return list(self._tokenizer.encode(piece, add_special_tokens=False, verbose=False))

    def _replaced(self, text: str, names: re.Pattern[str], word: str) -> str:
        text = text.encode(errors="replace").decode()  # half of a surrogate pair is no text for a tokenizer
        return names.sub(lambda found: f"{word}{self._number[found[0]]}v", text)


def unused_word(*values: object) -> str:
    """Letters and digits that no string within `values` contains."""
    word, texts = "Qz7x", list(strings(values))
    while any(word in text for text in texts):
        word += "q"
    return word


def strings(value: object) -> Iterator[str]:
    """Every string within nested mappings and sequences, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings(item)


def _mapped(value: Any, function: Callable[[str], str]) -> Any:
    """`value` with `function` applied to every string within it, keys included."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {_mapped(key, function): _mapped(item, function) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_mapped(item, function) for item in value]
    return value


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    """Matches any of `names`, which begin with the longest; nothing where there are none."""
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")
