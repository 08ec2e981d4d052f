"""What crosses between a test and a solution: data whole, and nothing that a hostile solution could make code of."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from tandem.sandbox.json_values import pack, receive, send, unpack
from tandem.sandbox.proxies import AnsweringEnd, AskingEnd, RemoteObject, SolutionError


def refuse(*parts: Any) -> Any:
    raise AssertionError(parts)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 0, 3)), np.arange(6, dtype=">i2").reshape(2, 3).T, np.array(["a", "bc"]), np.array([b"x"]),
        np.array("2024-01-02", "datetime64[D]"), np.array([1 + 2j], np.complex64), np.array(True), np.float32(0.1),
        np.array([None, "x", 2], object), np.str_("y"),
    ],
)  # fmt: skip
def test_arrays_arrive_whole(array: Any) -> None:
    arrived = unpack(json.loads(json.dumps(pack(array, refuse))), refuse)
    assert type(arrived) is type(array) and arrived.dtype == array.dtype and np.array_equal(arrived, array)
    if isinstance(arrived, np.ndarray) and arrived.size and arrived.dtype != object:
        assert arrived.flags.writeable


@pytest.fixture
def ends() -> Iterator[tuple[AskingEnd, int]]:
    """The test's end, and the descriptor of a solution's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield AskingEnd(ours.fileno()), theirs.fileno()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"result": {"type": "__loader__"}}, "no type of Python's"),
        ({"result": {"type": "eval"}}, "no type of Python's"),
        ({"result": {"nonsense": []}}, "list indices"),
        ({"result": {"lent": 3}}, "out of range"),
        ({"result": {"tuple": 1, "list": 2}}, "too many values"),
        ({"result": {"namedtuple": ["x", ["a; import os"], [1]]}}, "valid identifiers"),
        ({"result": {"exception": {"number": 1, "type": "E", "base": {"type": "int"}}}}, None),
        ({"raised": [{"type": "SystemExit"}, [0]]}, "SystemExit: 0"),
        ({"raised": [{"type": "KeyboardInterrupt"}, []]}, "KeyboardInterrupt"),
        ({"raised": [{"type": "int"}, []]}, "int"),
        ({"raised": [{"type": "StopIteration"}, [1]]}, "StopIteration: 1"),
    ],
)
def test_a_forged_answer_is_an_ordinary_error(ends: tuple[AskingEnd, int], message: Any, error: str | None) -> None:
    end, solution = ends
    send(solution, message)
    if error is None:
        assert end.ask("name", "x").__mro__[1:3] == (SolutionError, Exception)
        return
    with pytest.raises((TypeError, ValueError, IndexError, SolutionError), match=error):
        end.ask("name", "x")


@pytest.mark.parametrize(
    "values",
    [
        [{"type": "type"}, ["X", {"tuple": []}, {"dict": []}], {"dict": []}],
        [{"object": {"number": 0, "type": "f"}}, [], {"dict": []}],
        [{"lent": 0}, [], {"dict": []}],
    ],
)
def test_the_solution_can_call_what_the_test_lent_and_nothing_else(ends: tuple[AskingEnd, int], values: Any) -> None:
    end, solution = ends
    send(solution, {"ask": "call", "values": values})
    send(solution, {"result": 7})
    assert end.ask("name", "x") == 7
    assert receive(solution)["ask"] == "name" and "raised" in receive(solution)


def served(names: dict[str, Any], use: Callable[[AskingEnd], None]) -> None:
    """Use a solution that is served in a thread."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=AnsweringEnd(theirs.fileno(), names).serve)
    thread.start()
    try:
        use(AskingEnd(ours.fileno()))
    finally:
        ours.close()
        thread.join()
        theirs.close()


class Hostile:
    """Says yes to whatever it is asked."""

    seen: ClassVar[list[Any]] = []

    def __eq__(self, other: object) -> bool:
        self.seen.append(other)
        return True

    __lt__ = __sub__ = __rsub__ = __contains__ = __radd__ = __eq__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_an_object_is_not_told_what_it_is_compared_with() -> None:
    def use(end: AskingEnd) -> None:
        thing = end.ask("name", "thing")
        assert isinstance(thing, RemoteObject) and thing is end.ask("name", "thing")
        assert thing != 42 and [thing] != [42] and [thing] != [42] and 42 not in thing
        for operate in (lambda: thing < 42, lambda: thing - 42, lambda: 42 - thing, lambda: sum([thing])):
            with pytest.raises(TypeError):
                operate()

    Hostile.seen.clear()
    served({"thing": Hostile()}, use)
    assert Hostile.seen == []
