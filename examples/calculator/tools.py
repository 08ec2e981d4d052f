"""The tool of examples/calculator, and how its tiny model writes a call of it."""

import re
from collections.abc import Mapping, Sequence

from tandem import Answer, ToolCall

OPERATION = re.compile(r"(\d{1,4})([*+-])(\d{1,4})")


def calculate(expression: str) -> str:
    """Multiply, add or subtract two whole numbers.

    Args:
        expression: Two numbers and an operator, as in 12*34.
    """
    found = OPERATION.fullmatch(expression)
    if found is None:
        raise ValueError(f"{expression!r} is not two numbers with an operator between them")
    left, operator, right = int(found[1]), found[2], int(found[3])
    return str({"*": left * right, "+": left + right, "-": left - right}[operator])


def read_calls(text: str, tools: Sequence[Mapping]) -> Answer:
    """`<tool_call>12*34</tool_call>`: without JSON, so that 138,000 parameters can learn it."""
    content, _, call = text.partition("<tool_call>")
    if not call:
        return Answer(content)
    expression = call.partition("</tool_call>")[0]
    return Answer(content, tool_calls=(ToolCall("call_0", "calculate", {"expression": expression}),))
