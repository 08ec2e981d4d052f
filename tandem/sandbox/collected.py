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
    set_up(names.get("setup_module"))
    for name, value in list(names.items()):
        if getattr(value, "__module__", None) != names["__name__"]:
            continue
        if isinstance(value, types.FunctionType) and name.startswith("test") and name not in called:
            set_up(names.get("setup_function"))
            call_with_values(value)
        elif isinstance(value, type) and hasattr(value, "assertEqual"):
            run_unittest(value)
        elif isinstance(value, type) and name.startswith("Test"):
            run_methods(value)


def run_methods(kind: type) -> None:
    """Each on an instance of its own, inherited ones and those of classes within it, too."""
    set_up(getattr(kind, "setup_class", None))
    for name in dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base)):
        if name.startswith("test"):
            instance = kind()
            set_up(getattr(instance, "setup_method", None))
            call_with_values(getattr(instance, name))
        elif name.startswith("Test") and isinstance(getattr(kind, name), type):
            run_methods(getattr(kind, name))


def set_up(function: Any) -> None:
    """Call it, if it is there; it may want to know for what."""
    if isinstance(function, (types.FunctionType, types.MethodType)):
        function(*[None] * parameters(function))


def parameters(function: Any) -> int:
    """How many arguments it must be given, but for `self`."""
    code, defaults = function.__code__, function.__defaults__ or ()
    return code.co_argcount - len(defaults) - isinstance(function, types.MethodType)


def call_with_values(function: Any) -> None:
    """Once, or with each set of values that pytest's `parametrize` gives; not where nothing gives an argument, or where
    it is marked to be skipped."""
    if not isinstance(function, (types.FunctionType, types.MethodType)) or is_skipped(function):
        return
    for values in sets_of_values(function):
        if len(values) < parameters(function):
            return
        result = function(**values)
        if function.__code__.co_flags & IS_COROUTINE:
            import asyncio  # which takes its time

            asyncio.run(result)


def is_skipped(function: Any) -> bool:
    """Whether pytest would not run it, or not mind if it fails."""
    marks = getattr(function, "pytestmark", ())
    return any(
        mark.name in ("skip", "xfail") or (mark.name == "skipif" and mark.args and mark.args[0]) for mark in marks
    )


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
