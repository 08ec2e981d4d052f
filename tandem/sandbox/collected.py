"""The functions and methods of a test that pytest or unittest would call.

This file is sent into the sandbox as text.
"""

import itertools
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

IS_COROUTINE = 0x80
"""A flag of a function's code: CO_COROUTINE."""


def run_collected(names: Mapping[str, Any], called: Collection[str]) -> None:
    """Call those that `names` holds, in their order, but the functions in `called`: the test has called these itself.

    Raises what they raise.
    """
    for name, value in list(names.items()):
        if getattr(value, "__module__", None) != names["__name__"]:
            continue
        if isinstance(value, types.FunctionType) and name.startswith("test") and name not in called:
            call_with_values(value, value)
        elif isinstance(value, type) and hasattr(value, "assertEqual"):
            run_unittest(value)
        elif isinstance(value, type) and name.startswith("Test"):
            run_methods(value)


def run_methods(kind: type) -> None:
    """Each on an instance of its own."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, types.FunctionType) and name.startswith("test"):
            instance = kind()
            setup = vars(kind).get("setup_method")
            if isinstance(setup, types.FunctionType):  # it may want to know for which method it is called
                setup(instance, *[method] * (setup.__code__.co_argcount - 1))
            call_with_values(types.MethodType(method, instance), method)


def call_with_values(function: Any, written: types.FunctionType) -> None:
    """Once, or with each set of values that pytest's `parametrize` gives; not where nothing gives an argument."""
    code = written.__code__
    needed = code.co_argcount - len(written.__defaults__ or ()) - (function is not written)
    for values in sets_of_values(written):
        if len(values) < needed:
            return
        result = function(**values)
        if code.co_flags & IS_COROUTINE:
            import asyncio  # which takes its time

            asyncio.run(result)


def sets_of_values(function: Any) -> Iterator[dict[str, Any]]:
    """One set of arguments, which is empty where there is no mark `parametrize`; of several marks all combinations."""
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    for combination in itertools.product(*[list(rows_of_values(*mark.args[:2])) for mark in marks]):
        yield {name: value for row in combination for name, value in row.items()}


def rows_of_values(names: Any, rows: Any) -> Iterator[dict[str, Any]]:
    listed = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
    for row in rows:
        if type(row).__name__ == "ParameterSet":  # pytest.param(…)
            yield dict(zip(listed, row.values, strict=True))
        else:
            yield dict(zip(listed, [row] if len(listed) == 1 else row, strict=True))


def run_unittest(kind: Any) -> None:
    """Raises AssertionError with the first failure of a TestCase."""
    import io
    import unittest

    tests = unittest.defaultTestLoader.loadTestsFromTestCase(kind)
    result = unittest.TextTestRunner(stream=io.StringIO()).run(tests)
    for _, trace in [*result.failures, *result.errors]:
        raise AssertionError(trace.strip().splitlines()[-1])
