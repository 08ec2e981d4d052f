"""The tool of examples/calculator."""

import re

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
