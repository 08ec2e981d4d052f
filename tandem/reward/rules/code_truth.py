"""A ground truth of code -> its tests, in whichever published shape it stands (docs/sandbox.md lists them)."""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.reward.rules.code_checks import require_checks

_TABLES = (("inputs", "outputs"), ("input", "output"))
"""Keys of what is given and what is expected."""
_SOURCES = ("test", "assert_case")
"""Keys of Python next to which rows have tables, too: HumanEval, LeetCode, KodCode; verl."""
_HOLDERS = (
    *("tests", "test_list", "input_output", "test_cases", "official_tests"),
    *("public_tests", "private_tests", "generated_tests", "public_test_cases", "private_test_cases"),
)
"""Other keys of tests: ours; MBPP; APPS and TACO; SYNTHETIC-1; Codeforces; CodeContests; LiveCodeBench."""
_FUNCTIONS = ("fn_name", "func_name")
_OF_PROGRAMS, _OF_FUNCTIONS = ("stdin", "stdin_stdout"), ("functional", "function_call")
"""What tests say that they are."""
_SHAPES = (
    "it is a list of tests in Python, or {tests}, or {inputs, outputs} with as many outputs as inputs, and fn_name for "
    "a function (docs/sandbox.md)"
)


@dataclass(frozen=True)
class SourceTests:
    """Python that raises where a solution is wrong."""

    tests: Sequence[str]
    preamble: str
    """What runs before the solution and before each test."""


@dataclass(frozen=True)
class CallTests:
    """Calls of a function, or of a method of the class `Solution`."""

    function: str
    arguments: Sequence[Sequence[Any]]
    expected: Sequence[Sequence[Any]]
    """For each call the values of which it returns one: where all are lists of one, as APPS publishes them, nothing
    tells whether the list is part of the value."""
    preamble: str


@dataclass(frozen=True)
class ProgramTests:
    """What a program reads from its standard input, and what it prints for that."""

    inputs: Sequence[str]
    outputs: Sequence[str]


@dataclass(frozen=True)
class _Case:
    """One test of a table."""

    given: Any
    expected: Any
    function: str | None


def read_tests(ground_truth: Any) -> SourceTests | CallTests | ProgramTests:
    """Raises ValueError where there are no tests, where their shape is unknown, and where one of them tests nothing."""
    truth = _parsed(ground_truth)
    whole: Mapping[str, Any] = truth if isinstance(truth, Mapping) else {"tests": truth}
    cases = list(_held(whole, None))
    sources = [case for case in cases if isinstance(case, str)]
    tabled = [case for case in cases if isinstance(case, _Case)]
    functions = {case.function for case in tabled}
    if not cases:
        raise ValueError(f"the ground truth {ground_truth!r:.200} holds no tests: {_SHAPES}")
    if len(functions) + bool(sources) > 1:
        raise ValueError(f"the ground truth {ground_truth!r:.200} holds tests of several kinds; write one kind a row")
    if sources:
        return _source_tests(sources, whole)
    (function,) = functions
    return _program_tests(tabled) if function is None else _call_tests(tabled, function, _preamble(whole))


def _parsed(value: Any) -> Any:
    """What a text of JSON says; any other text is Python, and stays."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _held(table: Mapping[str, Any], function: str | None) -> Iterator[str | _Case]:
    """The tests that a mapping holds, one at a time. Raises ValueError."""
    function = _function(table) or function
    keys = [key for key in _SOURCES if table.get(key)]
    for given, expected in _TABLES:
        if not keys and (table.get(given) or table.get(expected)):
            yield from _rows(table.get(given), table.get(expected), function)
            return
    for key in keys or [key for key in _HOLDERS if table.get(key)]:
        tests = _parsed(table[key])
        if key == "private_test_cases" and isinstance(tests, str):
            tests = _unpacked(tests)
        if isinstance(tests, Mapping):
            yield from _held(tests, function)
        else:
            yield from _listed([tests] if isinstance(tests, str) else tests, function)


def _listed(tests: Any, function: str | None) -> Iterator[str | _Case]:
    if not _is_list(tests):
        raise ValueError(f"the tests are {tests!r:.200}; {_SHAPES}")
    for number, test in enumerate(tests, 1):
        if isinstance(test, str):
            yield test
        elif isinstance(test, Mapping) and {"input", "output"} <= test.keys():
            yield _Case(test["input"], test["output"], _called(number, test, function))
        else:
            raise ValueError(f"test {number} is {test!r:.200}, neither Python nor {{input, output}}")


def _rows(inputs: Any, outputs: Any, function: str | None) -> Iterator[_Case]:
    """Of a table; two texts are a single test."""
    if isinstance(inputs, str) and isinstance(outputs, str):
        inputs, outputs = [inputs], [outputs]
    if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs):
        raise ValueError(f"inputs {inputs!r:.100} and outputs {outputs!r:.100} are no lists of the same length")
    for given, expected in zip(inputs, outputs, strict=True):
        yield _Case(given, expected, function)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _function(table: Mapping[str, Any]) -> str | None:
    """The name of the function under test, where one is named."""
    metadata = _parsed(table.get("metadata"))
    places = [table, metadata] if isinstance(metadata, Mapping) else [table]
    return next((str(place[key]) for place in places for key in _FUNCTIONS if place.get(key)), None)


def _called(number: int, test: Mapping[str, Any], function: str | None) -> str | None:
    """The function that a test of a list calls; None for that of a program."""
    kind, name = test.get("testtype") or test.get("type"), _function(test) or function
    if kind in _OF_FUNCTIONS and name is None:
        raise ValueError(f"test {number} calls a function, and nothing names it; add fn_name")
    return None if kind in _OF_PROGRAMS else name


class _TextOnly(pickle.Unpickler):
    """Makes nothing but plain data."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpacked(text: str) -> Any:
    """LiveCodeBench's tests that are not shown: JSON, pickled, compressed, in Base64."""
    try:
        return json.loads(_TextOnly(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load())
    except (ValueError, TypeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise ValueError(f"private_test_cases {text[:40]!r} cannot be unpacked: {error}") from error


def _preamble(truth: Mapping[str, Any]) -> str:
    """`preamble`; else what stands before the function in HumanEval's `prompt`, or all of LeetCode's."""
    prompt, name = truth.get("prompt"), truth.get("entry_point")
    if truth.get("preamble") or not isinstance(prompt, str) or not name:
        return str(truth.get("preamble") or "")
    before, found, _ = prompt.rpartition(f"def {name}(")
    return before if found else prompt


def _source_tests(sources: Sequence[str], truth: Mapping[str, Any]) -> SourceTests:
    """With what MBPP runs before a test, and HumanEval and LeetCode behind it."""
    imports, preamble = truth.get("test_imports") or [], _preamble(truth)
    before = "\n".join([*([imports] if isinstance(imports, str) else imports), str(truth.get("test_setup_code") or "")])
    name = truth.get("entry_point")
    tests = [
        f"{before}\n{test}{f'{chr(10)}check({name})' if name and 'def check(' in test else ''}".lstrip("\r\n")
        for test in sources
    ]
    for number, test in enumerate(tests, 1):
        require_checks(number, test, preamble)
    return SourceTests(tests, preamble)


def _program_tests(cases: Sequence[_Case]) -> ProgramTests:
    inputs = [_text(case.given, f"the input of test {number}") for number, case in enumerate(cases, 1)]
    outputs = [_text(case.expected, f"the output of test {number}") for number, case in enumerate(cases, 1)]
    if not any(map(str.strip, outputs)):
        raise ValueError("every expected output is empty, which a program that does nothing prints, too")
    for number, (given, expected) in enumerate(zip(inputs, outputs, strict=True), 1):
        if not given.strip() and not expected.strip():
            raise ValueError(f"test {number} has neither an input nor an output; leave it out")
    return ProgramTests(inputs, outputs)


def _text(value: Any, what: str) -> str:
    """A text, its lines in a list, or a number. Raises ValueError, which says `what` it is."""
    if isinstance(value, str):
        return value
    if _is_list(value) and not any(map(_is_list, value)):
        return "\n".join(_text(line, what) for line in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{what} is {value!r:.100}, neither text nor a list of lines; for calls of a function add fn_name")


def _call_tests(cases: Sequence[_Case], function: str, preamble: str) -> CallTests:
    if not function.isidentifier():
        raise ValueError(f"fn_name {function!r:.100} is no name of a function")
    arguments, expected = list[Sequence[Any]](), list[Any]()
    for number, case in enumerate(cases, 1):
        given, returned = case.given, case.expected
        if isinstance(given, str):
            given = _json_values(given, f"the input of test {number}")
            if isinstance(returned, str):
                (returned,) = _json_values(returned, f"the output of test {number}", count=1)
        if not _is_list(given):
            raise ValueError(f"the input of test {number} is {given!r:.100}, not the list of {function}'s arguments")
        arguments.append(given)
        expected.append(returned)
    if all(value is None for value in expected):
        raise ValueError(f"every test expects null of {function}, as whatever returns nothing does")
    lists_of_one = all(_is_list(case.expected) and len(case.expected) == 1 for case in cases)
    either = [[value, value[0]] if lists_of_one else [value] for value in expected]
    return CallTests(function, arguments, either, preamble)


def _json_values(text: str, what: str, count: int | None = None) -> list[Any]:
    """The values of JSON that `text` has one a line. Raises ValueError, which says `what` it is."""
    values, left, decoder = list[Any](), text.strip(), json.JSONDecoder()
    try:
        while left:
            value, end = decoder.raw_decode(left)
            values.append(value)
            left = left[end:].lstrip()
    except ValueError as error:
        raise ValueError(f"{what} is {text!r:.100}, not values of JSON, one a line: {error}") from error
    if count is not None and len(values) != count:
        raise ValueError(f"{what} is {text!r:.100}, not {count} value of JSON")
    return values
