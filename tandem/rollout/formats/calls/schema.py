"""Values that a format writes as bare text, cast to the type that the tool's schema gives them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tandem.rollout.environment import ToolSchema
from tandem.rollout.formats.calls.base import whole_json


def cast(text: str, tool: str, parameter: str, tools: Sequence[ToolSchema]) -> Any:
    """What `text` means as a parameter of a tool: of the first declared type that it is a value of.

    Where nothing is declared: the JSON value that it is, or itself. Where it is of none of the types: itself, so that
    whoever runs the tool can say what is wrong with it.
    """
    schema = _schema_of(tool, parameter, tools)
    if text in schema.get("enum", ()):
        return text
    types = [*_types(schema)]
    for name in sorted(types, key=lambda name: name != "null") or ["any"]:
        try:
            return _CASTS.get(name, str)(text)
        except ValueError:
            continue
    return text


def _schema_of(tool: str, parameter: str, tools: Sequence[ToolSchema]) -> Mapping[str, Any]:
    """Of one parameter, as far as it is declared."""
    for declared in tools:
        function = declared.get("function", {})
        if function.get("name") == tool:
            properties = (function.get("parameters") or {}).get("properties") or {}
            schema = properties.get(parameter)
            return schema if isinstance(schema, Mapping) else {}
    return {}


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    declared = schema.get("type", ())
    yield from [declared] if isinstance(declared, str) else declared
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _types(choice)
    if schema.get("nullable"):
        yield "null"


def _json(*types: type) -> Callable[[str], Any]:
    """A cast by way of JSON that takes values of `types`, and no truth value for a number."""

    def cast(text: str) -> Any:
        value = whole_json(text, "it is")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError("a value of another type")
        return value

    return cast


def _word(words: Mapping[str, Any]) -> Callable[[str], Any]:
    def cast(text: str) -> Any:
        if text.strip() not in words:
            raise ValueError("no such word")
        return words[text.strip()]

    return cast


def _any(text: str) -> Any:
    return whole_json(text, "it is")


_CASTS: dict[str, Callable[[str], Any]] = {
    "string": str,
    "null": _word({"null": None, "None": None}),  # templates write Python's words as well as JSON's
    "boolean": _word({"true": True, "True": True, "false": False, "False": False}),
    "integer": _json(int),
    "number": _json(int, float),
    "object": _json(dict),
    "array": _json(list),
    "any": _any,
}
